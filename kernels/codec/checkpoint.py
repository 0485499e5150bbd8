"""Load a checkpoint directory, on any number of ranks.

    with Checkpoint.open(latest("runs/a")) as checkpoint:
        checkpoint.load({"model": model, "optim": optimizer})     # in place; DTensors get their shard
        w = checkpoint.tensor("model.head.weight")                # the whole tensor

Every rank reads only the shards that overlap its own; nothing is gathered or broadcast. A tensor that lies in
one file and is stored raw is handed out without a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from costlab.kernels.codec.codecs import Codec
from costlab.kernels.codec.container import Container, Mode
from costlab.kernels.codec.device_load import DeviceLoader, Job
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.layout import MAX_CHAIN, Entry, Kind, Limits
from costlab.kernels.codec.manifest import Manifest, open_rank, read_manifest
from costlab.kernels.codec.state import Leaf, flatten, is_dtensor, restore, shard_box

Place = tuple[int, Entry]
Range = tuple[int, int]


def _overlap(
    start: Sequence[int], shape: Sequence[int], other: Sequence[int], size: Sequence[int]
) -> list[Range] | None:
    """Common box of two boxes as (first, last + 1) for each dimension, None where there is none."""
    both = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(start, shape, other, size, strict=True)]
    return None if any(low >= high for low, high in both) else both


def check_cover(name: str, places: list[Place]) -> None:
    """Raise unless the shards of a tensor agree on shape and dtype, don't overlap and fill the global shape."""
    shape, dtype = places[0][1].global_shape, places[0][1].dtype
    if len(places) == 1 and places[0][1].shape == shape:
        return
    if any((e.global_shape, e.dtype) != (shape, dtype) for _, e in places):
        raise CheckpointError(f"{name}: ranks disagree on its shape or dtype")
    if sum(e.numel for _, e in places) != math.prod(shape):
        raise CheckpointError(f"{name}: shards hold {sum(e.numel for _, e in places)} of {math.prod(shape)} values")
    boxes = sorted((e.start, e.shape) for _, e in places if e.numel)
    cut = [d for d in range(len(shape)) if len({(b[0][d], b[1][d]) for b in boxes}) > 1]
    pairs = itertools.pairwise(boxes) if len(cut) == 1 else itertools.combinations(boxes, 2)
    if any(_overlap(a[0], a[1], b[0], b[1]) for a, b in pairs):
        raise CheckpointError(f"{name}: shards overlap")


class Checkpoint:
    """An open checkpoint: the files of all ranks, opened when needed. `places` has every tensor's shards."""

    def __init__(
        self, directory: Path, mode: Mode = "map", limits: Limits | None = None, replicas: Sequence[Path] = ()
    ) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self._mode, self._limits, self._replicas = mode, limits, tuple(replicas)
        self._bases: dict[bytes, Container] = {}
        self._loaders: dict[int, DeviceLoader] = {}  # by the device's number
        self.files: list[Container] = []
        try:
            for rank in range(len(self.manifest.files)):
                self.files.append(open_rank(directory, self.manifest, rank, mode, limits, self._replicas))
            self.places = self._index()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, directory: Path | str, mode: Mode = "map", limits: Limits | None = None,
        replicas: Sequence[Path | str] = (),
    ) -> Checkpoint:  # fmt: skip
        """Open and validate manifest, headers and indexes of all ranks, and that shards cover their tensors.

        `replicas`: roots of peers' copies, for rank files that are lost.
        """
        return cls(Path(directory), mode, limits, [Path(root) for root in replicas])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; zero-copy tensors stay valid."""
        for file in [*self.files, *self._bases.values()]:
            file.close()
        for loader in self._loaders.values():
            loader.close()
        self._loaders = {}

    def _index(self) -> dict[str, list[Place]]:
        places: dict[str, list[Place]] = {}
        for rank, file in enumerate(self.files):
            for name, entry in file.entries.items():
                places.setdefault(name, []).append((rank, entry))
        for name, found in places.items():
            check_cover(name, found)
        return places

    @property
    def names(self) -> list[str]:
        """Names of all values."""
        return sorted(self.places)

    def _find(self, name: str) -> list[Place]:
        if name not in self.places:
            raise CheckpointError(f"{self.directory}: has no {name!r}")
        return self.places[name]

    def resolve(self, digest: bytes) -> Container:
        """The file of this digest among the directories that this checkpoint's deltas build on."""
        if digest in self._bases:
            return self._bases[digest]
        manifest, directory = self.manifest, self.directory
        for _ in range(MAX_CHAIN):
            if manifest.base is None:
                break
            directory = directory.parent / manifest.base
            manifest = read_manifest(directory)
            for rank, file in enumerate(manifest.files):
                if file.digest == digest.hex():
                    self._bases[digest] = open_rank(directory, manifest, rank, self._mode, self._limits, self._replicas)
                    return self._bases[digest]
        raise CheckpointError(f"{self.directory}: the base {digest.hex()[:16]} of its deltas is missing")

    def _shard(self, place: Place, device: torch.device | None, verify: bool) -> torch.Tensor:
        rank, entry = place
        file = self.files[rank]
        if device is None or device.type != "cuda" or entry.choice.codec is Codec.ZSTD:
            return file.tensor(entry.name, device, verify, self.resolve)
        extent = torch.empty(entry.length, dtype=torch.uint8, device=device)
        self._device_loader(device, verify).load([Job(file, entry, extent)])
        return file.finish(entry, file.encoded_from(entry, extent, verify), device, self.resolve)

    def _device_loader(self, device: torch.device, verify: bool) -> DeviceLoader:
        number = torch.cuda.current_device() if device.index is None else device.index
        if number not in self._loaders:
            self._loaders[number] = DeviceLoader(torch.device("cuda", number))
        self._loaders[number].verify = verify
        return self._loaders[number]

    def tensor(self, name: str, device: torch.device | None = None, verify: bool = True) -> torch.Tensor:
        """The whole tensor, put together from its shards; zero-copy where it is one raw shard on the CPU."""
        shape = self._find(name)[0][1].global_shape
        return self.box(name, (0,) * len(shape), shape, device, verify)

    def box(
        self, name: str, start: Sequence[int], shape: Sequence[int], device: torch.device | None = None,
        verify: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """The part of a tensor from `start` of this shape; only overlapping shards are read."""
        places = self._find(name)
        if places[0][1].kind is not Kind.TENSOR:
            raise CheckpointError(f"{self.directory}: {name!r} is a value, not a tensor")
        for place in places:
            if (place[1].start, place[1].shape) == (tuple(start), tuple(shape)):
                return self._shard(place, device, verify)
        out = torch.empty(tuple(shape), dtype=places[0][1].dtype, device=device)
        for place in places:
            common = _overlap(start, shape, place[1].start, place[1].shape)
            if common is not None:
                here = tuple(slice(low - s, high - s) for (low, high), s in zip(common, start, strict=True))
                there = tuple(slice(low - s, high - s) for (low, high), s in zip(common, place[1].start, strict=True))
                out[here] = self._shard(place, device, verify)[there]
        return out

    def value(self, name: str) -> Leaf:
        """A number, text, bool, null, bytes or whole tensor."""
        rank, entry = self._find(name)[0]
        return self.tensor(name) if entry.kind is Kind.TENSOR else self.files[rank].value(name)

    def verify(self) -> None:
        """Check every stored byte of every rank's file."""
        for file in self.files:
            file.verify()

    def load(self, state: Any, strict: bool = True, rank: int = 0) -> list[str]:
        """Fill a state in place: tensors are copied into, DTensors get their shard, numbers are replaced.

        Names, nesting and global shapes are those of the save; `name@rank` is taken for values saved per rank.
        With `strict` a leaf that the checkpoint doesn't have raises; otherwise it stays and its name is
        returned. An optimizer must have its state (one step, or
        `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`) to be filled.
        """
        wanted = flatten(state)
        stored = {name: f"{name}@{rank}" if f"{name}@{rank}" in self.places else name for name in wanted}
        missing = [name for name in wanted if stored[name] not in self.places]
        if missing and strict:
            raise CheckpointError(
                f"{self.directory}: has no {', '.join(map(repr, missing[:5]))} ({len(missing)} missing)"
            )
        filled = self._prefetch({stored[n]: leaf for n, leaf in wanted.items() if n not in missing})

        def get(name: str, leaf: Leaf) -> Leaf:
            return leaf if stored[name] not in self.places else self._fill(stored[name], leaf, filled)

        restore(state, get)
        return missing

    def _prefetch(self, wanted: dict[str, Leaf]) -> set[str]:
        """Read raw shards that match contiguous CUDA tensors exactly straight into them, all in one go."""
        filled: set[str] = set()
        devices = {leaf.device for leaf in wanted.values() if isinstance(leaf, torch.Tensor)}
        for device in sorted((device for device in devices if device.type == "cuda"), key=str):
            jobs = self._jobs(wanted, filled, device)
            first = next(jobs, None)
            if first is not None:
                self._device_loader(device, verify=True).load(itertools.chain([first], jobs))
        return filled

    def _jobs(self, wanted: dict[str, Leaf], filled: set[str], device: torch.device) -> Iterator[Job]:
        """Reads of whole raw shards into a device's tensors, in file order; adds the tensors' names to `filled`."""
        order = sorted(wanted, key=lambda name: (self.places[name][0][0], self.places[name][0][1].offset))
        for name in order:
            leaf = wanted[name]
            local, start = _local(leaf) if isinstance(leaf, torch.Tensor) else (None, ())
            if local is None or local.device != device or not local.is_contiguous():
                continue
            for rank, entry in self.places[name]:
                same = (entry.start, entry.shape, entry.dtype) == (start, tuple(local.shape), local.dtype)
                if same and entry.choice.codec is Codec.RAW and entry.length:
                    filled.add(name)
                    yield Job(self.files[rank], entry, local.detach().reshape(-1).view(torch.uint8))

    def _fill(self, name: str, leaf: Leaf, filled: set[str]) -> Leaf:
        entry = self.places[name][0][1]
        if not isinstance(leaf, torch.Tensor):
            return self.value(name) if entry.kind is not Kind.TENSOR else self.tensor(name).clone()
        if entry.kind is not Kind.TENSOR or tuple(leaf.shape) != entry.global_shape:
            raise CheckpointError(f"{name}: has shape {entry.global_shape}, the state wants {tuple(leaf.shape)}")
        if entry.dtype is not leaf.dtype:
            raise CheckpointError(f"{name}: is {entry.dtype}, the state wants {leaf.dtype}; convert it knowingly")
        local, start = _local(leaf)
        if name not in filled and local.numel():
            with torch.no_grad():
                device = local.device if local.is_cuda else None
                local.copy_(self.box(name, start, tuple(local.shape), device))
        return leaf


def _local(leaf: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor's local part and its start in the whole."""
    if not is_dtensor(leaf):
        return leaf, (0,) * leaf.ndim
    with torch.no_grad():
        return leaf.to_local(), shard_box(leaf).start  # type: ignore[attr-defined]

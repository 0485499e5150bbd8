"""Read one checkpoint file (layout: see `layout`).

    write_container(path, {"w": tensor}, step=7)
    with Container.open(path) as file:
        w = file.tensor("w")            # zero-copy for raw tensors, checked against its checksums

`Container.open` maps the file privately: the descriptor is read-only, so nothing done to a tensor reaches the file;
writing into a zero-copy tensor copies the page. A file that is truncated while mapped ends the process with SIGBUS like
any mapped file: where that can happen (network filesystems), open with `mode="read"`, which copies.

Whatever the bytes of a file, opening and reading it raises `CheckpointError` and nothing else, in memory bounded by its
size and `Limits`.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

import numpy as np
import torch

from costlab.kernels.codec import crc
from costlab.kernels.codec.blocks import FP32_MIN_NORMAL
from costlab.kernels.codec.codecs import Codec, Encoded, block_grid, decode
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.layout import (
    HEADER,
    INDEX_OFFSET,
    ChecksumTable,
    Entry,
    Kind,
    Limits,
    check_extents,
    index_extent,
    parse_index,
    part_offsets,
)
from costlab.kernels.codec.writing import MAX_LITERAL, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Mode = Literal["map", "read"]
BaseResolver = Callable[[bytes], "Container"]
_SCALARS = (bool, int, float, str, type(None))


class Container:
    """An open, validated checkpoint file. `header` and `entries` (by name, sorted) describe it."""

    def __init__(self, path: Path, fd: int, mode: Mode, limits: Limits) -> None:
        self.path = path
        self._fd = fd
        self._stat = os.fstat(fd)
        if not stat.S_ISREG(self._stat.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        size = self._stat.st_size
        first = self._pread(0, min(size, HEADER.size)).tobytes()
        length, records = index_extent(first, size, limits)
        index = self._pread(INDEX_OFFSET, length).tobytes()
        self.header, entries, counts, table = parse_index(first, index, records, limits)
        gaps = check_extents(entries, counts, table, self.header, length)
        self._map = self._mapped() if mode == "map" else None
        self._assign_checksums(entries, counts, table)
        for start, end in gaps:
            if self._bytes(start, end - start).any():
                raise CheckpointError(f"bytes between {start} and {end} belong to nothing and are not zero")
        self.entries: dict[str, Entry] = {entry.name: entry for entry in entries}

    @classmethod
    def open(
        cls, path: Path | str, mode: Mode = "map", limits: Limits | None = None, follow_symlinks: bool = True
    ) -> Container:
        """Open and validate header, index, checksum table and padding; the data is checked when a tensor is read."""
        path = Path(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
        with readable(f"opening {path}"):
            fd = os.open(path, flags)
        try:
            with readable(f"reading {path}"):
                return cls(path, fd, mode, limits or Limits())
        except CheckpointError as error:
            os.close(fd)
            raise CheckpointError(f"{path}: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Zero-copy tensors stay valid: the map lives as long as they do."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None

    @property
    def digest(self) -> bytes:
        """The file's identity, which a delta names as its base."""
        return self.header.digest

    def _mapped(self) -> Bytes:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(self._fd, self._stat.st_size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return np.frombuffer(mapped, np.uint8)

    def _pread(self, offset: int, length: int) -> Bytes:
        out = np.empty(length, np.uint8)
        self._pread_into(offset, out)
        return out

    def _pread_into(self, offset: int, out: Bytes) -> None:
        view, at = memoryview(out.data), offset
        while view:
            count = os.preadv(self._fd, [view], at)
            if count == 0:
                raise CheckpointError(f"the file ends at {at}, {len(view)} bytes early: truncated while open")
            view, at = view[count:], at + count

    def _bytes(self, offset: int, length: int) -> Bytes:
        if self._map is not None:
            return self._map[offset : offset + length]
        return self._pread(offset, length)

    def _assign_checksums(self, entries: list[Entry], counts: list[tuple[int, int, int]], table: ChecksumTable) -> None:
        data = self._bytes(table.offset, 4 * table.count)
        if crc.extend(0, np.ascontiguousarray(data)) != table.crc:
            raise CheckpointError(f"checksum table is wrong itself (offset {table.offset}, {4 * table.count} bytes)")
        values = list(struct.unpack(f"<{table.count}I", data.tobytes()))
        for entry, (first, main, patch) in zip(entries, counts, strict=True):
            entry.crcs = values[first : first + main]
            entry.patch_crcs = values[first + main : first + main + patch]

    def _check_unchanged(self) -> None:
        if self._fd < 0:
            raise CheckpointError(f"{self.path}: is closed")
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise CheckpointError(f"{self.path}: was changed or truncated while open")

    def entry(self, name: str) -> Entry:
        """The index entry; `CheckpointError` where there is none."""
        found = self.entries.get(name)
        if found is None:
            raise CheckpointError(f"{self.path}: has no {name!r}")
        return found

    def extent(self, entry: Entry, verify: bool = True, patch: bool = False) -> Bytes:
        """The stored bytes of an entry, checked chunk by chunk."""
        self._check_unchanged()
        offset, length = (entry.patch_offset, entry.patch_length) if patch else (entry.offset, entry.length)
        data = self._bytes(offset, length)
        if verify:
            crcs = crc.chunk_crcs(entry.seed(patch), data, offset)
            self.compare(entry, crcs, 0, patch)
        return data

    def read_into(self, entry: Entry, start: int, out: Bytes, verify: bool = True) -> None:
        """Read part of an extent, from `start` in it, into host memory and check it.

        It must start and end with the extent or where a multiple of 1 MiB in the file cuts it. Callable from several
        threads at once.
        """
        with readable(f"reading {self.path}"):
            self._pread_into(entry.offset + start, out)
        if verify:
            at = entry.offset + start
            first = at // crc.CHUNK - entry.offset // crc.CHUNK
            self.compare(entry, crc.chunk_crcs(entry.seed(), out, at, first), first)

    def compare(self, entry: Entry, crcs: list[int], first: int, patch: bool = False) -> None:
        """Raise unless the checksums of an entry's chunks from `first` are those stored; names tensor and offset."""
        stored = (entry.patch_crcs if patch else entry.crcs)[first : first + len(crcs)]
        base, length = (entry.patch_offset, entry.patch_length) if patch else (entry.offset, entry.length)
        for number, (got, want) in enumerate(zip(crcs, stored, strict=True), first):
            if got != want:
                start = base + crc.chunk_start(base, number)
                end = base + min(crc.chunk_start(base, number + 1), length)
                raise CheckpointError(
                    f"{self.path}: tensor {entry.name!r} is damaged: bytes {start} to {end} of the file "
                    "fail their checksum"
                )

    def encoded(self, name: str, verify: bool = True) -> Encoded:
        """A tensor as stored, its parts views of the map; scales and raw-block numbers are checked."""
        entry = self.entry(name)
        extent = self.extent(entry, verify)
        # NumPy gives an empty array strides that torch refuses to view as another dtype.
        held = torch.from_numpy(extent) if extent.size else torch.empty(0, dtype=torch.uint8)
        return self.encoded_from(entry, held, verify)

    def encoded_from(self, entry: Entry, extent: torch.Tensor, verify: bool = True) -> Encoded:
        """As `encoded`, from the extent's bytes wherever they are (uint8, any device)."""
        codes_at, scales_at, structure_at = part_offsets(entry.parts)
        codes, scales, structure = entry.parts
        found = Encoded(
            entry.choice, entry.dtype, entry.shape, extent[codes_at : codes_at + codes],
            scales=extent[scales_at : scales_at + scales].view(torch.float32) if scales else torch.empty(0),
            structure=extent[structure_at : structure_at + structure],
            layout=entry.layout, low=entry.low, high=entry.high, bound=entry.bound,
        )  # fmt: skip
        if scales and not bool(((found.scales >= FP32_MIN_NORMAL) & torch.isfinite(found.scales)).all()):
            raise CheckpointError(f"{self.path}: {entry.name}: a scale is not a positive normal number")
        if entry.patch_count:
            self._read_patch(entry, found, verify)
        return found

    def _read_patch(self, entry: Entry, found: Encoded, verify: bool) -> None:
        data = self.extent(entry, verify, patch=True)
        numbers = data[: 4 * entry.patch_count].copy().view("<u4").astype(np.int64)
        blocks = block_grid(entry.shape, entry.choice.block).blocks
        if bool((np.diff(numbers) <= 0).any()) or numbers[-1] >= blocks:
            raise CheckpointError(f"{self.path}: {entry.name}: raw blocks are repeated, unsorted or out of range")
        found.patch_blocks = torch.from_numpy(numbers)
        found.patch_values = torch.from_numpy(data[4 * entry.patch_count :].copy())

    def tensor(
        self, name: str, device: torch.device | None = None, verify: bool = True, resolve: BaseResolver | None = None
    ) -> torch.Tensor:
        """The (local) tensor in its original dtype and shape; zero-copy for raw ones on the CPU.

        `verify` checks the stored bytes first. `resolve` finds the file that a delta's base digest names.
        """
        entry = self.entry(name)
        if entry.kind is not Kind.TENSOR:
            raise CheckpointError(f"{self.path}: {name!r} is a value, not a tensor")
        if entry.choice.codec is Codec.RAW and entry.length and not entry.patch_count:
            plain = torch.from_numpy(self.extent(entry, verify)).view(entry.dtype).view(entry.shape)
            return plain if device is None else plain.to(device)
        return self.finish(entry, self.encoded(name, verify), device, resolve)

    def finish(
        self, entry: Entry, found: Encoded, device: torch.device | None = None, resolve: BaseResolver | None = None
    ) -> torch.Tensor:
        """Decode what `encoded_from` gave, fetching the base of a delta."""
        base = self._base(entry, device, resolve) if entry.choice.codec is Codec.DELTA4 else None
        try:
            return decode(found, base, device)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {entry.name}: {error}") from error

    def _base(self, entry: Entry, device: torch.device | None, resolve: BaseResolver | None) -> torch.Tensor:
        """The base of a delta in fp32. Chains shorten by one at every step, so they end."""
        if resolve is None:
            raise CheckpointError(f"{self.path}: {entry.name} is a delta; its base {entry.base.hex()[:16]} is missing")
        other = resolve(entry.base)
        base = other.entries.get(entry.name)
        if other.digest != entry.base or base is None:
            raise CheckpointError(f"{self.path}: {entry.name}: {other.path} is not its base")
        if (base.shape, base.dtype, base.chain) != (entry.shape, entry.dtype, entry.chain - 1):
            raise CheckpointError(
                f"{self.path}: {entry.name}: its base in {other.path} has another shape, dtype or place"
            )
        return other.wide(entry.name, device, resolve)

    def wide(self, name: str, device: torch.device | None = None, resolve: BaseResolver | None = None) -> torch.Tensor:
        """A tensor in fp32 before the rounding to its own dtype: what a delta adds to."""
        entry = self.entry(name)
        found = self.encoded(name)
        if entry.choice.codec is Codec.DELTA4:
            found.dtype = torch.float32
        return self.finish(entry, found, device, resolve).float()

    def value(self, name: str) -> Value:
        """A number, text, bool, null, list of these, or bytes; a tensor for tensors."""
        entry = self.entry(name)
        if entry.kind is Kind.TENSOR:
            return self.tensor(name)
        data = self.extent(entry).tobytes()
        if entry.kind is Kind.BYTES:
            return data
        try:
            if len(data) > MAX_LITERAL:
                raise CheckpointError(f"{self.path}: {name}: {len(data)} bytes of text are too many")
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {name}: not a JSON scalar") from error
        if not all(isinstance(item, _SCALARS) for item in (found if isinstance(found, list) else [found])):
            raise CheckpointError(f"{self.path}: {name}: not a JSON scalar or flat list of them")
        return cast("Value", found)

    def verify(self) -> None:
        """Check every stored byte of the file against its checksum."""
        for entry in self.entries.values():
            self.extent(entry)
            if entry.patch_count:
                self.extent(entry, patch=True)

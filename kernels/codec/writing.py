"""Write one checkpoint file. The asynchronous pipeline shares `entry_of` and lays out the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec import crc
from costlab.kernels.codec.codecs import Choice, Encoded, as_bytes, encode
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, readable
from costlab.kernels.codec.layout import (
    DTYPE_CODES,
    INDEX_OFFSET,
    MAX_NDIM,
    NO_BASE,
    PAGE,
    Entry,
    Kind,
    align,
    check_name,
    data_start,
    digest_of,
    extent_length,
    pack_index,
    part_offsets,
    place,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Scalar = bool | int | float | str | None
Value = torch.Tensor | Scalar | list[Scalar] | bytes
Chooser = Callable[[str, tuple[int, ...], torch.dtype], Choice]
MAX_LITERAL = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A committed file: its size in bytes and its identity (BLAKE2b-256 of header and index)."""

    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Box:
    """Where a shard lies in the global tensor."""

    global_shape: tuple[int, ...]
    start: tuple[int, ...]


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` for a name, dtype or rank that the format doesn't have."""
    check_name(name)
    if tensor.dtype not in DTYPE_CODES:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} has no place in the format")
    if tensor.ndim > MAX_NDIM:
        raise CheckpointError(f"{name}: {tensor.ndim} dimensions, at most {MAX_NDIM} are stored")


def entry_of(name: str, found: Encoded, box: Box | None = None, base: bytes = NO_BASE, chain: int = 0) -> Entry:
    """The index entry of a coded tensor, without its place in the file."""
    box = box or Box(found.shape, (0,) * len(found.shape))
    parts = (found.codes.numel(), 4 * found.scales.numel(), found.structure.numel())
    return Entry(
        name, Kind.TENSOR, Choice(found.choice.codec, found.choice.block), found.dtype, found.shape,
        box.global_shape, box.start, parts=parts, layout=found.layout, bound=found.bound,
        low=found.low, high=found.high,
        patch_count=found.patch_blocks.numel(), chain=chain, base=base, length=extent_length(parts),
        patch_length=4 * found.patch_blocks.numel() + found.patch_values.numel(),
    )  # fmt: skip


def literal_entry(name: str, value: Scalar | list[Scalar] | bytes) -> tuple[Entry, Bytes]:
    """Entry and bytes of a value that isn't a tensor."""
    check_name(name)
    kind = Kind.BYTES if isinstance(value, bytes) else Kind.LITERAL
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    if kind is Kind.LITERAL and len(data) > MAX_LITERAL:
        raise CheckpointError(f"{name}: {len(data)} bytes of text; store long values as bytes")
    parts = (len(data), 0, 0)
    shape = (len(data),)
    entry = Entry(name, kind, Choice(), torch.uint8, shape, shape, (0,), parts=parts, length=len(data))
    return entry, np.frombuffer(data, np.uint8)


def extent_bytes(found: Encoded) -> Bytes:
    """Codes, scales and structure as they lie in the extent; no copy where there are only codes."""
    pieces = [as_bytes(t).cpu().numpy() for t in (found.codes, found.scales, found.structure)]
    if not pieces[1].size and not pieces[2].size:
        only: Bytes = pieces[0]
        return only
    parts = (pieces[0].size, pieces[1].size, pieces[2].size)
    extent = np.zeros(extent_length(parts), np.uint8)
    for at, piece in zip(part_offsets(parts), pieces, strict=True):
        extent[at : at + piece.size] = piece
    return extent


def pack_patch(blocks: torch.Tensor, values: torch.Tensor) -> Bytes:
    """Numbers (u32) of the raw blocks, then their values: what `codecs.raw_blocks` gave, as stored."""
    if not blocks.numel():
        return np.empty(0, np.uint8)
    numbers = blocks.numpy().astype("<u4").view(np.uint8)
    raw: Bytes = values.cpu().numpy()
    return np.concatenate([numbers, raw])


def patch_bytes(found: Encoded) -> Bytes:
    """The raw blocks of a coded tensor as stored."""
    return pack_patch(found.patch_blocks, found.patch_values)


class ContainerWriter:
    """Extents one after the other, then the checksum table, then index and header. Raises `CheckpointError`."""

    def __init__(
        self, path: Path, names: Sequence[str], step: int = 0, rank: int = 0, world_size: int = 1, direct: bool = False
    ) -> None:
        if len(set(names)) != len(names):
            raise CheckpointError("two values have the same name")
        for name in names:
            check_name(name)
        self.step, self.rank, self.world_size = step, rank, world_size
        self.entries: list[Entry] = []
        self.cursor = data_start(list(names))
        self._expected = len(names)
        with readable(f"creating {path}"):
            self.file = AtomicFile(path, direct=direct)

    def claim(self, length: int) -> int:
        """Place an extent of `length` bytes after the last one; its offset (0 for none)."""
        if not length:
            return 0
        offset = place(self.cursor, length)
        self.cursor = offset + length
        return offset

    def add(self, entry: Entry, extent: Bytes, patch: Bytes | None = None) -> None:
        """Write one entry whose bytes are on the host."""
        entry.offset = self._put(extent, entry, patch=False)
        if patch is not None and patch.size:
            entry.patch_offset = self._put(patch, entry, patch=True)
        self.entries.append(entry)

    def _put(self, data: Bytes, entry: Entry, patch: bool) -> int:
        offset = self.claim(data.size)
        crcs = crc.chunk_crcs(entry.seed(patch), data, offset)
        if patch:
            entry.patch_crcs = crcs
        else:
            entry.crcs = crcs
        with readable(f"writing {self.file.partial}"):
            self.file.write(data, offset)
        return offset

    def commit(self) -> Written:
        """Sync the data, write table, index and header, sync, rename, sync the directory."""
        if len(self.entries) != self._expected:
            raise CheckpointError(f"{len(self.entries)} entries where {self._expected} were announced")
        header, index, table = pack_index(self.entries, self.cursor, self.step, self.rank, self.world_size)
        size = file_size(header)
        with readable(f"writing {self.file.partial}"):
            self.file.write(np.frombuffer(table, np.uint8), align(self.cursor, PAGE))
            self.file.sync()
            self.file.write(np.frombuffer(index, np.uint8), INDEX_OFFSET)
            self.file.write(np.frombuffer(header, np.uint8), 0)
            self.file.commit(size)
        return Written(size, digest_of(header, index))

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`."""
        self.file.abort()


def file_size(header: bytes) -> int:
    """The size that a packed header states."""
    return int.from_bytes(header[16:24], "little")


def write_container(
    path: Path | str,
    values: Mapping[str, Value],
    step: int = 0,
    choose: Chooser | None = None,
    rank: int = 0,
    world_size: int = 1,
    boxes: Mapping[str, Box] | None = None,
) -> Written:
    """Write tensors (any device), numbers, text and bytes; `choose` picks codecs (default: everything exact).

    The file is durable when this returns. Raises `CheckpointError`; nothing is left behind then.
    """
    writer = ContainerWriter(Path(path), list(values), step, rank, world_size)
    try:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                check_storable(name, value)
                box = (boxes or {}).get(name)
                shape = box.global_shape if box else tuple(value.shape)
                found = encode(value, choose(name, shape, value.dtype) if choose else Choice())
                writer.add(entry_of(name, found, box), extent_bytes(found), patch_bytes(found))
            else:
                writer.add(*literal_entry(name, value))
        return writer.commit()
    finally:
        writer.abort()

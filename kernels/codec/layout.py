"""The checkpoint file, version 1: byte layout and the checks of header and index.

All integers little-endian. Pages are 4 KiB.

| at | what |
|---|---|
| 0 | header, 64 bytes: magic, major, minor, flags, file size, index offset, index length, records, page shift, CRC32C of the index, step, CRC32C of the header with this field zero |
| 4096 | index: 64-byte preamble, fixed records of 384 bytes sorted by name, string table |
| next page | extents: codes, scales and structure of each tensor; raw blocks of those that have some |
| last pages | CRC32C of every chunk of every extent; multiples of 1 MiB in the file cut extents into chunks |

An extent of a page or more starts on a page, a smaller one on 64 bytes, so small tensors share pages.
Everything between extents is zero and shorter than a page. The file's identity (its digest) is BLAKE2b-256 of
header and index, which cover the rest through the checksums.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import math
import re
import struct
import unicodedata
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import torch

from costlab.kernels.codec import crc
from costlab.kernels.codec.blocks import ceil_div
from costlab.kernels.codec.codecs import BLOCKED, PATCHED, SPARSE, Choice, Codec, block_grid
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.sparse import Layout

MAGIC = b"\x89CLK\r\n\x1a\n"
MAJOR, MINOR = 1, 0
PAGE, PAGE_SHIFT, ALIGN = 4096, 12, 64
INDEX_OFFSET = PAGE
HEADER = struct.Struct("<8sHHIQQQIIIQI")
PREAMBLE = struct.Struct("<IIQQQIIII16s")
RECORD = struct.Struct("<IHBBBBBBHHIIIIdQ8Q8Q8Q3Q4QQII32s40s")
MAX_INDEX, MAX_RECORDS, MAX_NAME, MAX_NDIM, MAX_CHAIN = 64 << 20, 1 << 20, 1024, 8, 64
MAX_DIM = 1 << 40
MAX_EXPANSION = 1 << 16
NO_BASE = bytes(32)

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64, 5: torch.int8, 6: torch.uint8,
    7: torch.int16, 8: torch.int32, 9: torch.int64, 10: torch.bool, 11: torch.float8_e4m3fn, 12: torch.float8_e5m2,
    13: torch.complex64, 14: torch.complex128, 15: torch.uint16, 16: torch.uint32, 17: torch.uint64,
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Kind(IntEnum):
    """What an entry is: a tensor; a JSON scalar (number, text, bool, null) or flat list of them; a bytes object."""

    TENSOR = 0
    LITERAL = 1
    BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps a reader holds a file to, whatever it declares. `tensor_bytes` is the decoded size of one tensor."""

    tensor_bytes: int = 1 << 38
    index_bytes: int = MAX_INDEX


@dataclass(slots=True)
class Entry:
    """One record of the index. `parts` are the bytes of codes, scales and structure inside the extent."""

    name: str
    kind: Kind
    choice: Choice
    dtype: torch.dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    parts: tuple[int, int, int] = (0, 0, 0)
    layout: Layout = Layout.DENSE
    bound: float = 0.0
    low: int = 0
    high: int = 0
    patch_count: int = 0
    chain: int = 0
    base: bytes = NO_BASE
    offset: int = 0
    length: int = 0
    patch_offset: int = 0
    patch_length: int = 0
    crcs: list[int] = field(default_factory=list)
    patch_crcs: list[int] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Values in the local shape."""
        return math.prod(self.shape)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self.numel * self.dtype.itemsize

    def seed(self, patch: bool = False) -> bytes:
        """What the chunk checksums of the extent (or of the raw blocks) start from."""
        return self.name.encode() + (b"\0\1" if patch else b"\0\0")

    def part_offsets(self) -> tuple[int, int, int]:
        """Where codes, scales and structure start inside the extent."""
        return part_offsets(self.parts)


@dataclass(frozen=True, slots=True)
class Header:
    """What header and preamble say of the whole file."""

    file_size: int
    step: int
    rank: int
    world_size: int
    digest: bytes


def align(offset: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-offset // to) * to


def part_offsets(parts: tuple[int, int, int]) -> tuple[int, int, int]:
    """Where the three parts start inside an extent: each on 64 bytes."""
    scales = align(parts[0], ALIGN)
    return 0, scales, align(scales + parts[1], ALIGN)


def extent_length(parts: tuple[int, int, int]) -> int:
    """Bytes of an extent: to the end of its last part that isn't empty."""
    return max((at + size for at, size in zip(part_offsets(parts), parts, strict=True) if size), default=0)


def place(cursor: int, length: int) -> int:
    """Where an extent goes that may start at `cursor` or later."""
    return align(cursor, PAGE if length >= PAGE else ALIGN)


_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


# Keeps all rules; nearly every name is of this kind.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.@-][A-Za-z0-9_]+)*", re.ASCII).fullmatch


@lru_cache(1 << 16)
def check_name(name: str) -> None:
    """Raise unless the name is safe to print, to sort and to make part of a path: see `_NAME_RULES`."""
    if len(name) <= MAX_NAME and _PLAIN_NAME(name):
        return
    problem = next((text for text, holds in _NAME_RULES if holds(name)), None)
    if problem:
        raise CheckpointError(f"tensor name {name[:80]!r}: {problem}")


_NAME_RULES = (
    ("is empty", lambda n: not n),
    ("is longer than 1 KiB", lambda n: len(n.encode(errors="replace")) > MAX_NAME),
    ("is not in NFC form", lambda n: unicodedata.normalize("NFC", n) != n),
    ("has a control or format character", lambda n: any(unicodedata.category(c) in _UNPRINTABLE for c in n)),
    ("looks like an absolute path", lambda n: n.startswith(("/", "\\")) or n[1:2] == ":"),
    ("has a parent-directory part", lambda n: ".." in n.replace("\\", "/").split("/")),
)


def index_length(names: list[str]) -> int:
    """Bytes of the index of entries with these names; known before any data is."""
    return PREAMBLE.size + RECORD.size * len(names) + sum(len(n.encode()) for n in names)


def data_start(names: list[str]) -> int:
    """Where the first extent may go."""
    return align(INDEX_OFFSET + index_length(names), PAGE)


def _padded(values: tuple[int, ...]) -> tuple[int, ...]:
    return values + (0,) * (MAX_NDIM - len(values))


def _pack_record(entry: Entry, name_offset: int, crc_first: int) -> bytes:
    return RECORD.pack(
        name_offset, len(entry.name.encode()), entry.kind, len(entry.shape), DTYPE_CODES[entry.dtype],
        entry.choice.codec, 1, entry.layout, *entry.choice.block,
        entry.chain, entry.low, entry.high, entry.patch_count, entry.bound, 0,
        *_padded(entry.shape), *_padded(entry.global_shape), *_padded(entry.start), *entry.parts,
        entry.offset, entry.length, entry.patch_offset, entry.patch_length,
        crc_first, len(entry.crcs), len(entry.patch_crcs), entry.base, bytes(40),
    )  # fmt: skip


def pack_index(
    entries: list[Entry], data_end: int, step: int, rank: int, world_size: int
) -> tuple[bytes, bytes, bytes]:
    """(header, index, checksum table) of a finished file whose extents end at `data_end`; sorts the entries by name."""
    entries.sort(key=lambda e: e.name.encode())
    table_offset = align(data_end, PAGE)
    table, records, strings = b"", [], b""
    crcs: list[int] = []
    for entry in entries:
        records.append(_pack_record(entry, len(strings), len(crcs)))
        strings += entry.name.encode()
        crcs += entry.crcs + entry.patch_crcs
    table = struct.pack(f"<{len(crcs)}I", *crcs)
    preamble = PREAMBLE.pack(
        RECORD.size, len(entries), len(strings), table_offset, len(crcs), crc.of_bytes(table),
        crc.CHUNK.bit_length() - 1, rank, world_size, bytes(16),
    )  # fmt: skip
    index = preamble + b"".join(records) + strings
    return pack_header(index, align(table_offset + len(table), PAGE), len(entries), step), index, table


def pack_header(index: bytes, file_size: int, records: int, step: int) -> bytes:
    """The 64-byte header of an index."""
    fields = (
        MAGIC, MAJOR, MINOR, 0, file_size, INDEX_OFFSET, len(index), records, PAGE_SHIFT, crc.of_bytes(index), step,
    )  # fmt: skip
    return HEADER.pack(*fields, crc.of_bytes(HEADER.pack(*fields, 0)))


def digest_of(header: bytes, index: bytes) -> bytes:
    """The file's identity: BLAKE2b-256 of header and index."""
    return hashlib.blake2b(header + index, digest_size=32).digest()


def index_extent(header: bytes, file_size: int, limits: Limits) -> tuple[int, int]:
    """(length, records) of the index that a header of a file of this size declares; raises where they can't be."""
    if len(header) < HEADER.size:
        raise CheckpointError(f"file of {len(header)} bytes is shorter than the 64-byte header")
    magic, major, _, flags, size, offset, length, records, shift, _, _, own = HEADER.unpack(header)
    if magic != MAGIC:
        hint = " (a Git-LFS pointer, not the file itself)" if header.startswith(b"version https://git-lfs") else ""
        raise CheckpointError(f"not a checkpoint file: bad magic {magic!r}{hint}")
    if crc.of_bytes(header[:-4] + bytes(4)) != own:
        raise CheckpointError("header checksum is wrong (offset 0, 64 bytes)")
    if major != MAJOR or flags:
        raise CheckpointError(f"format {major} with flags {flags:#x} is unknown; this reader knows {MAJOR}, no flags")
    if size != file_size:
        raise CheckpointError(f"the file has {file_size} bytes but its header says {size}: truncated or appended to")
    if offset != INDEX_OFFSET or shift != PAGE_SHIFT:
        raise CheckpointError(f"index at {offset} with pages of 2**{shift} bytes; {INDEX_OFFSET} and 2**12 belong")
    if length > limits.index_bytes or offset + length > file_size:
        raise CheckpointError(f"index of {length} bytes is beyond the file or the limit")
    if records > MAX_RECORDS or PREAMBLE.size + records * RECORD.size > length:
        raise CheckpointError(f"{records} records don't fit an index of {length} bytes")
    return length, records


@dataclass(slots=True)
class ChecksumTable:
    """Where the checksum table lies and what its own checksum is."""

    offset: int
    count: int
    crc: int


def parse_index(
    header: bytes, index: bytes, records: int, limits: Limits
) -> tuple[Header, list[Entry], list[tuple[int, int, int]], ChecksumTable]:
    """Header, entries in file order of names, each entry's (first, main, patch) checksum counts, and the table's place.

    Everything that can be known without the data is checked.
    """
    *_, file_size, _, _, _, _, index_crc, step, _ = HEADER.unpack(header)
    if crc.of_bytes(index) != index_crc:
        raise CheckpointError(f"index checksum is wrong (offset {INDEX_OFFSET}, {len(index)} bytes)")
    size, count, strings, table_at, crcs, table_crc, shift, rank, world, reserved = PREAMBLE.unpack_from(index)
    names_at = PREAMBLE.size + records * RECORD.size
    if size != RECORD.size or count != records or names_at + strings != len(index) or any(reserved):
        raise CheckpointError("index preamble contradicts the header")
    if 1 << shift != crc.CHUNK or rank >= world or crcs * 4 > file_size:
        raise CheckpointError(f"chunks of 2**{shift} bytes, {crcs} checksums, rank {rank} of {world}: impossible")
    entries: list[Entry] = []
    counts: list[tuple[int, int, int]] = []
    position = 0
    for at in range(PREAMBLE.size, names_at, RECORD.size):
        entry, name_offset, crc_counts, name_length = _parse_record(index, at, names_at)
        if name_offset != position or crc_counts[0] != sum(counts[-1] if counts else (0, 0, 0)):
            raise CheckpointError(f"{entry.name}: string or checksum ranges are not consecutive")
        position += name_length
        entries.append(entry)
        counts.append(crc_counts)
        _check_entry(entry, limits)
        if len(entries) > 1 and entries[-2].name.encode() >= entry.name.encode():
            raise CheckpointError(f"{entry.name}: names are repeated or not sorted")
    if position != strings or sum(counts[-1] if counts else (0, 0, 0)) != crcs:
        raise CheckpointError("string or checksum table has bytes that no record owns")
    found = Header(file_size, step, rank, world, digest_of(header, index))
    return found, entries, counts, ChecksumTable(table_at, crcs, table_crc)


def _name(index: bytes, start: int, length: int) -> str:
    try:
        name = index[start : start + length].decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"tensor name at {INDEX_OFFSET + start} is not UTF-8") from error
    if len(name.encode()) != length:
        raise CheckpointError(f"tensor name at {INDEX_OFFSET + start} is outside the string table")
    check_name(name)
    return name


def _parse_record(index: bytes, at: int, names_at: int) -> tuple[Entry, int, tuple[int, int, int], int]:
    fields = RECORD.unpack_from(index, at)
    name_offset, name_length, kind, ndim, dtype, codec, version, layout, height, width = fields[:10]
    chain, low, high, patch_count, bound, reserved = fields[10:16]
    shape, global_shape, start, rest = fields[16:24], fields[24:32], fields[32:40], fields[40:]
    name = _name(index, names_at + name_offset, name_length)
    if ndim > MAX_NDIM or any(shape[ndim:]) or any(global_shape[ndim:]) or any(start[ndim:]):
        raise CheckpointError(f"{name}: {ndim} dimensions, or sizes past the last dimension")
    if reserved or any(rest[-1]) or version != 1:
        raise CheckpointError(f"{name}: codec version {version} or reserved bytes are not those of this format")
    try:
        kinds = Kind(kind), Codec(codec), Layout(layout), DTYPES[dtype]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: unknown kind {kind}, codec {codec}, layout {layout}, dtype {dtype}") from error
    entry = Entry(
        name, kinds[0], Choice(kinds[1], (height, width)), kinds[3], shape[:ndim], global_shape[:ndim], start[:ndim],
        parts=rest[0:3], layout=kinds[2], bound=bound, low=low, high=high, patch_count=patch_count, chain=chain,
        base=rest[10], offset=rest[3], length=rest[4], patch_offset=rest[5], patch_length=rest[6],
    )  # fmt: skip
    return entry, name_offset, (rest[7], rest[8], rest[9]), name_length


def _check_entry(entry: Entry, limits: Limits) -> None:
    problem = _shape_problem(entry, limits) or _codec_problem(entry) or _part_problem(entry)
    if problem:
        raise CheckpointError(f"{entry.name}: {problem}")


def _shape_problem(entry: Entry, limits: Limits) -> str | None:
    sizes = (0, *entry.shape, *entry.global_shape, *entry.start)
    if max(sizes) > MAX_DIM or math.prod([s or 1 for s in entry.global_shape]) > 1 << 62:
        return f"shape {entry.shape} of {entry.global_shape} is beyond the limits"
    whole = entry.shape == entry.global_shape and not any(entry.start)
    if not whole and any(s + n > g for s, n, g in zip(entry.start, entry.shape, entry.global_shape, strict=True)):
        return f"shard {entry.shape} at {entry.start} is outside the global shape {entry.global_shape}"
    if entry.decoded_bytes > min(limits.tensor_bytes, MAX_EXPANSION * entry.length + (1 << 20)):
        return f"{entry.decoded_bytes} decoded bytes from {entry.length} stored ones is beyond the limits"
    scalar = entry.kind is not Kind.TENSOR
    if scalar and (entry.dtype is not torch.uint8 or entry.choice.codec is not Codec.RAW or len(entry.shape) != 1):
        return "a literal must be stored bytes"
    return None


def _codec_problem(entry: Entry) -> str | None:
    codec, (height, width) = entry.choice.codec, entry.choice.block
    delta = codec is Codec.DELTA4
    if codec in BLOCKED and (height == 0) != (width == 0):
        return f"blocks of {height}x{width}"
    if codec not in BLOCKED and (height or width):
        return f"{entry.choice.label} has no blocks"
    if delta != (entry.base != NO_BASE) or delta != (entry.chain > 0) or entry.chain > MAX_CHAIN:
        return f"base and chain length {entry.chain} don't fit codec {entry.choice.label}"
    if codec is Codec.LOG8 and not 0 < entry.low <= entry.high < 0x7F800000:
        return f"log8 range {entry.low:#x}..{entry.high:#x} is not finite and rising"
    if codec is not Codec.LOG8 and (entry.low or entry.high):
        return "a range where the codec has none"
    lossless = codec in (Codec.RAW, Codec.ZSTD)
    if not (entry.bound == 0 if lossless else 0 < entry.bound < math.inf):
        return f"error bound {entry.bound} of codec {entry.choice.label}"
    if not lossless and (entry.dtype.itemsize > 4 or not entry.dtype.is_floating_point or entry.dtype.itemsize < 2):
        return f"codec {entry.choice.label} of {entry.dtype}"
    if entry.layout is not Layout.DENSE and codec not in SPARSE:
        return f"sparse coding of {entry.choice.label}"
    return None


def dense_code_bytes(choice: Choice, numel: int, itemsize: int) -> int:
    """Bytes of the codes without sparse coding; for ZSTD the most there can be."""
    match choice.codec:
        case Codec.RAW | Codec.ZSTD:
            return numel * itemsize
        case Codec.BF16:
            return 2 * numel
        case Codec.INT4 | Codec.DELTA4:
            return ceil_div(numel, 2)
        case _:
            return numel


def scale_bytes(choice: Choice, shape: tuple[int, ...]) -> int:
    """Bytes of the fp32 scales."""
    return 4 * block_grid(shape, choice.block).blocks if choice.codec in BLOCKED else 0


def _part_problem(entry: Entry) -> str | None:
    codes, scales, structure = entry.parts
    if entry.choice.codec is Codec.RAW and entry.layout is Layout.DENSE and not entry.patch_count:
        plain = codes == entry.length == entry.decoded_bytes and not (scales or structure or entry.patch_length)
        if plain:
            return None
    codec, most = entry.choice.codec, dense_code_bytes(entry.choice, entry.numel, entry.dtype.itemsize)
    fixed = entry.layout is Layout.DENSE and codec is not Codec.ZSTD
    if codes > most or (fixed and (codes != most or structure)):
        return f"{codes} bytes of codes and {structure} of structure for {entry.numel} values of {entry.choice.label}"
    if scales != scale_bytes(entry.choice, entry.shape):
        return f"{scales // 4} scales for {entry.choice.label} of {entry.shape}"
    if structure > 8 * entry.numel + (1 << 20) or entry.length != extent_length(entry.parts):
        return f"extent of {entry.length} bytes for parts of {entry.parts}"
    grid = block_grid(entry.shape, entry.choice.block) if codec in PATCHED else None
    blocks, block = (grid.blocks, grid.height * grid.width) if grid else (0, 0)
    if entry.patch_count > blocks or entry.patch_length != entry.patch_count * (4 + block * entry.dtype.itemsize):
        return f"{entry.patch_count} raw blocks in {entry.patch_length} bytes"
    return None


def check_extents(
    entries: list[Entry], counts: list[tuple[int, int, int]], table: ChecksumTable, header: Header, index_bytes: int
) -> list[tuple[int, int]]:
    """Raise unless the extents are packed as `place` packs them; returns the gaps (start, end) between them."""
    extents = []
    for entry, (_, main, patch) in zip(entries, counts, strict=True):
        for name, offset, length, chunks in (
            (entry.name, entry.offset, entry.length, main),
            (f"{entry.name} (raw blocks)", entry.patch_offset, entry.patch_length, patch),
        ):
            if chunks != crc.chunk_count(offset, length):
                raise CheckpointError(f"{name}: {chunks} checksums for {length} bytes")
            if length:
                extents.append((offset, length, name))
            elif offset:
                raise CheckpointError(f"{name}: an offset without bytes")
    extents.append((table.offset, max(4 * table.count, 1), "checksum table"))
    end = align(INDEX_OFFSET + index_bytes, PAGE)
    gaps = [(HEADER.size, INDEX_OFFSET), (INDEX_OFFSET + index_bytes, end)]
    for offset, length, name in sorted(extents):
        if offset < end or offset != place(end, PAGE if name == "checksum table" else length):
            raise CheckpointError(f"{name}: extent at {offset} overlaps, leaves a gap or is misaligned")
        gaps.append((end, offset))
        end = offset + length - (name == "checksum table" and not table.count)
    if align(end, PAGE) != header.file_size:
        raise CheckpointError(f"extents end at {end} but the file has {header.file_size} bytes")
    return [*gaps, (end, header.file_size)]

"""Damaged checkpoint files whose checksums are right again, so that only the checks of meaning are left to refuse."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from costlab.kernels.codec import crc, layout

FIELDS = [
    "name_offset", "name_length", "kind", "ndim", "dtype", "codec", "version", "layout", "height", "width",
    "chain", "low", "high", "patch_count", "bound", "reserved",
    *[f"shape{i}" for i in range(8)], *[f"global{i}" for i in range(8)], *[f"start{i}" for i in range(8)],
    "codes", "scales", "structure", "offset", "length", "patch_offset", "patch_length",
    "crc_first", "crc_main", "crc_patch", "base", "reserved_tail",
]  # fmt: skip
PREAMBLE = ["size", "count", "strings", "table_offset", "crcs", "table_crc", "shift", "rank", "world", "reserved"]
HEADER = ["magic", "major", "minor", "flags", "size", "index_offset", "index_length", "records", "page_shift",
          "index_crc", "step", "crc"]  # fmt: skip


def _edit(packer: struct.Struct, names: list[str], data: bytearray, at: int, changes: dict[str, Any]) -> None:
    fields = list(packer.unpack_from(data, at))
    for name, value in changes.items():
        old = fields[names.index(name)]
        fields[names.index(name)] = value(old) if isinstance(value, Callable) else value  # type: ignore[arg-type]
    packer.pack_into(data, at, *fields)


def header(data: bytes, **changes: Any) -> bytes:
    """With header fields changed and the header's checksum mended."""
    out = bytearray(data)
    _edit(layout.HEADER, HEADER, out, 0, changes)
    out[60:64] = struct.pack("<I", crc.of_bytes(bytes(out[:60]) + bytes(4)))
    return bytes(out)


def reseal(data: bytes) -> bytes:
    """With the index's checksum made right for the index that is there."""
    length = struct.unpack_from("<Q", data, 32)[0]
    return header(data, index_crc=crc.of_bytes(data[layout.INDEX_OFFSET : layout.INDEX_OFFSET + length]))


def preamble(data: bytes, **changes: Any) -> bytes:
    """With preamble fields changed and checksums mended."""
    out = bytearray(data)
    _edit(layout.PREAMBLE, PREAMBLE, out, layout.INDEX_OFFSET, changes)
    return reseal(bytes(out))


def record(data: bytes, number: int, **changes: Any) -> bytes:
    """With fields of one record changed and checksums mended."""
    out = bytearray(data)
    at = layout.INDEX_OFFSET + layout.PREAMBLE.size + number * layout.RECORD.size
    _edit(layout.RECORD, FIELDS, out, at, changes)
    return reseal(bytes(out))


def content(data: bytes, path: Path, name: str, change: Callable[[np.ndarray], None], patch: bool = False) -> bytes:
    """With an extent's bytes changed in place and its chunk checksums, the table's and the index's mended."""
    from costlab.kernels.codec.container import Container

    path.write_bytes(data)
    with Container.open(path) as file:
        entries = list(file.entries.values())
        entry = file.entries[name]
    offset, length = (entry.patch_offset, entry.patch_length) if patch else (entry.offset, entry.length)
    out = np.frombuffer(data, np.uint8).copy()
    extent = out[offset : offset + length]
    change(extent)
    crcs = crc.chunk_crcs(entry.seed(patch), extent, offset)
    if patch:
        entry.patch_crcs = crcs
    else:
        entry.crcs = crcs
    table = b"".join(struct.pack(f"<{len(c)}I", *c) for e in entries for c in (e.crcs, e.patch_crcs))
    table_at = struct.unpack_from("<Q", data, layout.INDEX_OFFSET + 16)[0]
    out[table_at : table_at + len(table)] = np.frombuffer(table, np.uint8)
    return preamble(out.tobytes(), table_crc=crc.of_bytes(table))

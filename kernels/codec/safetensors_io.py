"""The safetensors file format, read and written here (no dependency): an 8-byte header length, a JSON header, the data.

The reader refuses what the format forbids and what it merely tolerates: duplicate names, gaps, misaligned
tensors, names that aren't safe to print. It has no checksums, so a flipped bit in the data can't be seen:
prefer `Container`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costlab.kernels.codec.codecs import as_bytes
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, readable
from costlab.kernels.codec.layout import MAX_DIM, MAX_NDIM, check_name

MAX_HEADER = 100_000_000
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_safetensors(
    path: Path | str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors (any device), widest dtype first so that all are aligned; durable when this returns.

    Raises `CheckpointError` for a dtype that the format doesn't have.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        check_name(name)
        tensor = tensors[name]
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{name}: safetensors has no {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with readable(f"writing {path}"):
        _write(Path(path), struct.pack("<Q", len(text)) + text, [tensors[name] for name in order])


def _write(path: Path, head: bytes, tensors: list[torch.Tensor]) -> None:
    file = AtomicFile(path)
    try:
        file.write(np.frombuffer(head, np.uint8), 0)
        at = len(head)
        for tensor in tensors:
            data = as_bytes(tensor).cpu().numpy()
            file.write(data, at)
            at += data.size
        file.commit(at)
    finally:
        file.abort()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointError("a name occurs twice in the header")
    return found


def _header(data: bytes, size: int) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise CheckpointError("shorter than the 8-byte header length")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MAX_HEADER, size - 8):
        raise CheckpointError(f"header of {length} bytes in a file of {size}: truncated, or not safetensors")
    text = data[8 : 8 + length]
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("header is not JSON") from error
    if not isinstance(header, dict) or text[:1] != b"{":
        raise CheckpointError("header is not a JSON object")
    return header, 8 + length


def _described(name: str, raw: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    check_name(name)
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"} or raw["dtype"] not in DTYPES:
        raise CheckpointError(f"{name}: unknown dtype or fields")
    shape, offsets = raw["shape"], raw["data_offsets"]
    whole = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= MAX_NDIM and len(offsets) == 2
    if not whole or any(type(n) is not int or not 0 <= n <= 1 << 62 for n in (*shape, *offsets)):
        raise CheckpointError(f"{name}: shape or offsets are not small non-negative integers")
    if any(n > MAX_DIM for n in shape):
        raise CheckpointError(f"{name}: shape {shape} is beyond the limits")
    dtype = DTYPES[raw["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{name}: {offsets[1] - offsets[0]} bytes for {dtype} of {shape}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def read_safetensors(path: Path | str) -> dict[str, torch.Tensor]:
    """All tensors, as views of a private map of the file. Raises `CheckpointError` for whatever isn't well-formed."""
    path = Path(path)
    try:
        with readable(f"reading {path}"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header, start = _header(head + file.read(min(length, MAX_HEADER, size)), size)
            flags = mmap.MAP_PRIVATE
            data = np.frombuffer(
                mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8
            )
        return _views(header, data[start:])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _views(header: dict[str, Any], data: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, torch.Tensor]:
    found, spans = {}, []
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, low, high = _described(name, raw)
        spans.append((low, high, name))
        if high > data.size:
            raise CheckpointError(f"{name}: ends at {high} of {data.size} data bytes: truncated")
        piece = torch.from_numpy(data[low:high]) if high > low else torch.empty(0, dtype=torch.uint8)
        if piece.data_ptr() % dtype.itemsize:
            piece = piece.clone()
        found[name] = piece.view(dtype).view(shape)
    end = 0
    for low, high, name in sorted(spans):
        if low != end:
            raise CheckpointError(f"{name}: overlaps another tensor or leaves a gap at {min(low, end)}")
        end = high
    if end != data.size:
        raise CheckpointError(f"{data.size - end} bytes at the end belong to no tensor")
    return found

"""Coding the zeros that are left after quantisation: dense, bitmap or CSR with 16-bit columns, whichever is smallest.

Sizes for n codes, k of them not zero, in r rows: dense n bytes; bitmap ceil(n / 8) + k; CSR-16 4 (r + 1) + 2 k + k.
Bitmap wins above 12.5 % zeros, CSR-16 over bitmap only above about 94 %: dense weights have no zeros to speak of.
The code of zero is 0 in every codec here. Works on the CPU.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from costlab.kernels.codec.blocks import ceil_div
from costlab.kernels.codec.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MAX_COLUMNS = 1 << 16


class Layout(IntEnum):
    """How codes are laid out; the number is what the file records."""

    DENSE = 0
    BITMAP = 1
    CSR16 = 2


def sizes(count: int, nonzero: int, cols: int) -> dict[Layout, int]:
    """Bytes of each layout that can hold `count` codes in rows of `cols`."""
    found = {Layout.DENSE: count, Layout.BITMAP: ceil_div(count, 8) + nonzero}
    if 0 < cols <= MAX_COLUMNS:
        found[Layout.CSR16] = 4 * (ceil_div(count, cols) + 1) + 3 * nonzero
    return found


def pack(codes: Bytes, cols: int) -> tuple[Layout, Bytes, Bytes]:
    """The smallest layout of flat codes read in rows of `cols` (the last may be short): layout, values, structure."""
    nonzero = int(np.count_nonzero(codes))
    by_size = sizes(codes.size, nonzero, cols)
    layout = min(by_size, key=lambda k: (by_size[k], k))
    return layout, *pack_as(layout, codes, cols)


def pack_as(layout: Layout, codes: Bytes, cols: int) -> tuple[Bytes, Bytes]:
    """Values and structure of one layout; dense has no structure."""
    if layout is Layout.DENSE:
        return codes, np.empty(0, np.uint8)
    at = np.flatnonzero(codes)
    if layout is Layout.BITMAP:
        return codes[at], np.packbits(codes != 0, bitorder="little")
    rows = ceil_div(codes.size, cols)
    starts = np.searchsorted(at, np.arange(rows + 1, dtype=np.int64) * cols).astype("<u4")
    columns = (at % cols).astype("<u2")
    return codes[at], np.concatenate([starts.view(np.uint8), columns.view(np.uint8)])


def unpack(layout: Layout, values: Bytes, structure: Bytes, count: int, cols: int) -> Bytes:
    """Flat codes [count]; raises `CheckpointError` unless values and structure describe exactly that many codes."""
    if layout is Layout.DENSE:
        if values.size != count or structure.size:
            raise CheckpointError(f"dense codes: {values.size} bytes where {count} belong")
        return values
    if bool((values == 0).any()):
        raise CheckpointError("sparse codes: a stored value is zero")
    at = (
        _bitmap_positions(values, structure, count)
        if layout is Layout.BITMAP
        else _csr_positions(values, structure, count, cols)
    )
    codes = np.zeros(count, np.uint8)
    codes[at] = values
    return codes


def _bitmap_positions(values: Bytes, structure: Bytes, count: int) -> NDArray[np.int64]:
    if structure.size != ceil_div(count, 8):
        raise CheckpointError(f"bitmap: {structure.size} bytes where {ceil_div(count, 8)} belong")
    bits = np.unpackbits(structure, bitorder="little")
    if bits[count:].any():
        raise CheckpointError("bitmap: bits set past the last value")
    at = np.flatnonzero(bits)
    if at.size != values.size:
        raise CheckpointError(f"bitmap: {at.size} bits set but {values.size} values stored")
    return at


def _csr_positions(values: Bytes, structure: Bytes, count: int, cols: int) -> NDArray[np.int64]:
    rows = ceil_div(count, cols)
    if not 0 < cols <= MAX_COLUMNS or structure.size != 4 * (rows + 1) + 2 * values.size:
        raise CheckpointError(f"CSR: {structure.size} bytes of structure for {rows} rows and {values.size} values")
    starts = structure[: 4 * (rows + 1)].copy().view("<u4").astype(np.int64)
    columns = structure[4 * (rows + 1) :].copy().view("<u2").astype(np.int64)
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != values.size or bool((lengths < 0).any()):
        raise CheckpointError("CSR: row pointers are not a rising sequence from 0 to the number of values")
    at = np.repeat(np.arange(rows, dtype=np.int64), lengths) * cols + columns
    if bool((columns >= cols).any()) or bool((at >= count).any()) or bool((np.diff(at) <= 0).any()):
        raise CheckpointError("CSR: columns are out of range, unsorted or repeated")
    return at

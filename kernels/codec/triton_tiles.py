"""Triton kernels for many tensors in one launch, and the 16x16 codec at the speed of memory.

A table launch replaces hundreds of launches: each program looks up its row of an int64 table on the device
(addresses, sizes) through `owner`, which holds a row number for every program. Three kinds: bytes copied, 16x16
blocks coded, log2-8-bit.

An encoding program holds 16 rows x C columns in registers. Rows are one-dimensional tiles of one or two 16-byte loads
a thread, so that loads, codes and stores share a layout and nothing crosses shared memory. On sm_90
four values are scaled and rounded by one piece of PTX; the result is bit-equal to the definition in `fp8`
everywhere else too, where plain arithmetic does it.
"""

# Triton has no types for its decorator or for what a kernel takes.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc,assignment"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from costlab.kernels.codec.blocks import Grid
from costlab.kernels.codec.triton_blocks import Format

try:
    import triton
    import triton.language as tl

    from costlab.kernels.codec.triton_blocks import _e4m3_bits, _int8_bits
except ImportError:
    triton = None

COPY_BYTES = {4: 32 << 10, 1: 1 << 10}
LOG8_VALUES = 4096


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A decoding program: `rows` of a block's 16, and `spans` times `columns` of them. `streaming`: stores pass by L2's
    most recent lines.
    """

    columns: int
    warps: int
    rows: int = 16
    spans: int = 1
    streaming: bool = False

    @property
    def whole(self) -> int:
        """Columns of a program."""
        return self.columns * self.spans


# By bytes a value, from `checkpoint_bench.py --tune` on an H200. Encoding: columns and warps.
ENCODE_TILE = {4: (1024, 4), 2: (512, 2)}
DECODE_TILE = {
    4: DecodeTile(columns=1024, warps=8, rows=1, spans=4, streaming=True),
    2: DecodeTile(columns=1024, warps=4, rows=4, spans=1, streaming=False),
}
# For widths that those don't divide, such as 2560 and 11008.
NARROW_ENCODE_TILE = {4: (256, 1), 2: (512, 2)}
NARROW_DECODE_TILE = {4: DecodeTile(256, 1), 2: DecodeTile(512, 2)}


@cache
def hopper(device: torch.device) -> bool:
    """Whether the device runs the PTX of these kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def encode_tile(grid: Grid, dtype: torch.dtype) -> tuple[int, int] | None:
    """(columns, warps) of the tiles that the grid is coded in; None where no tile divides it."""
    tiles = (ENCODE_TILE[dtype.itemsize], NARROW_ENCODE_TILE[dtype.itemsize])
    return next((tile for tile in tiles if even(grid, tile[0])), None)


def decode_tile(grid: Grid, dtype: torch.dtype) -> DecodeTile | None:
    """The tile that the grid is decoded in to `dtype`; None where none divides it."""
    tiles = (DECODE_TILE[dtype.itemsize], NARROW_DECODE_TILE[dtype.itemsize])
    return next((tile for tile in tiles if even(grid, tile.whole)), None)


def even(grid: Grid, columns: int) -> bool:
    """Whether 16x16 blocks fill the grid in whole tiles of so many columns."""
    whole = grid.numel == grid.rows * grid.cols and grid.rows % 16 == 0 and grid.cols % columns == 0
    return (grid.height, grid.width) == (16, 16) and whole and grid.cols * 16 < 1 << 31


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the single-tensor kernels take these, where there is a tile: on sm_90, all starting on 16 bytes."""
    return hopper(tensors[0].device) and all(t.data_ptr() % 16 == 0 for t in tensors)


if triton is not None:

    @triton.jit
    def _larger_pair(a, b):
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2
        )

    @triton.jit
    def _four_codes(x, inverse, keep):
        """Four fp32 -> four E4M3 codes: scaled, rounded, 0x80 (negative zero) made 0x00, 0 where keep is 0."""
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, c, d;
            .reg .b16 lo, hi;
            .reg .b32 t, s;
            mul.rn.f32 a, $1, $5;
            mul.rn.f32 b, $2, $6;
            mul.rn.f32 c, $3, $7;
            mul.rn.f32 d, $4, $8;
            cvt.rn.satfinite.e4m3x2.f32 lo, b, a;
            cvt.rn.satfinite.e4m3x2.f32 hi, d, c;
            mov.b32 t, {lo, hi};
            and.b32 s, t, 0x7f7f7f7f;
            add.u32 s, s, 0x7f7f7f7f;
            or.b32 s, s, 0x7f7f7f7f;
            and.b32 s, s, $9;
            and.b32 $0, t, s;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r", [x, inverse, keep], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip

    @triton.jit
    def _four_codes_bf16(x, inverse, keep):
        """As `_four_codes`, from two registers of two bf16."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t, s;
            .reg .b16 lo, hi;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xffff0000;
            shl.b32 c, $2, 16;
            and.b32 d, $2, 0xffff0000;
            mul.rn.f32 a, a, $3;
            mul.rn.f32 b, b, $4;
            mul.rn.f32 c, c, $5;
            mul.rn.f32 d, d, $6;
            cvt.rn.satfinite.e4m3x2.f32 lo, b, a;
            cvt.rn.satfinite.e4m3x2.f32 hi, d, c;
            mov.b32 t, {lo, hi};
            and.b32 s, t, 0x7f7f7f7f;
            add.u32 s, s, 0x7f7f7f7f;
            or.b32 s, s, 0x7f7f7f7f;
            and.b32 s, s, $7;
            and.b32 $0, t, s;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r", [x, inverse, keep], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip

    @triton.jit
    def _encode_tile(
        x_ptr, codes_ptr, scales_ptr, count_ptr, block_row, first, cols, largest,
        C: tl.constexpr, E4M3: tl.constexpr, PTX: tl.constexpr,
    ):  # fmt: skip
        BF16: tl.constexpr = PTX and x_ptr.dtype.element_ty == tl.bfloat16
        start = (block_row * 16).to(tl.int64) * cols + first
        col = tl.arange(0, C)
        rows = ()
        for h in tl.static_range(16):
            rows = rows + (tl.load(x_ptr + start + h * cols + col),)  # noqa: RUF005
        # Bit patterns of magnitudes order like the values, with NaN and infinity on top.
        if BF16:
            top16 = rows[0].to(tl.int16, bitcast=True) & 0x7FFF
            for h in tl.static_range(1, 16):
                top16 = _larger_pair(top16, rows[h].to(tl.int16, bitcast=True) & 0x7FFF)
            top = top16.to(tl.int32) << 16
        else:
            top = rows[0].to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            for h in tl.static_range(1, 16):
                top = tl.maximum(top, rows[h].to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        block = tl.max(tl.reshape(top, (C // 16, 16)), axis=1)
        bad = block >= 0x7F800000
        amax = tl.where(bad, 0, block).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(amax, largest), 1.1754943508222875e-38)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        at = block_row.to(tl.int64) * (cols // 16) + first // 16 + tl.arange(0, C // 16)
        tl.store(scales_ptr + at, scale)
        tl.atomic_add(count_ptr + tl.zeros([C // 16], tl.int32), bad.to(tl.int32), mask=bad, sem="relaxed")
        wide = tl.reshape(tl.broadcast_to(inverse[:, None], (C // 16, 16)), (C,))
        keep = tl.reshape(tl.broadcast_to(tl.where(bad, 0, -1)[:, None], (C // 16, 16)), (C,))
        for h in tl.static_range(16):
            if BF16 and E4M3:
                code = _four_codes_bf16(rows[h], wide, keep)
            elif PTX and E4M3:
                code = _four_codes(rows[h].to(tl.float32), wide, keep)
            else:
                q = tl.where(keep == 0, 0.0, rows[h].to(tl.float32)) * wide
                code = (_e4m3_bits(q, False) if E4M3 else _int8_bits(q)).to(tl.uint8)
            tl.store(codes_ptr + start + h * cols + col, code)

    @triton.jit
    def _encode_one(
        x_ptr, codes_ptr, scales_ptr, count_ptr, cols, largest,
        C: tl.constexpr, E4M3: tl.constexpr, PTX: tl.constexpr,
    ):  # fmt: skip
        per_row = cols // C
        row = tl.program_id(0) // per_row
        first = (tl.program_id(0) % per_row) * C
        _encode_tile(x_ptr, codes_ptr, scales_ptr, count_ptr, row, first, cols, largest, C, E4M3, PTX)

    @triton.jit
    def _encode_many(
        like_ptr, table_ptr, owner_ptr, base_ptr, counters_ptr, largest,
        C: tl.constexpr, E4M3: tl.constexpr, PTX: tl.constexpr,
    ):  # fmt: skip
        line = table_ptr + tl.load(owner_ptr + tl.program_id(0)).to(tl.int64) * 8
        x_ptr = tl.multiple_of(tl.load(line).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
        codes_ptr = base_ptr + tl.multiple_of(tl.load(line + 1), 16)
        scales_ptr = (base_ptr + tl.multiple_of(tl.load(line + 2), 16)).to(tl.pointer_type(tl.float32))
        count_ptr = counters_ptr + tl.load(line + 3)
        cols = tl.multiple_of(tl.load(line + 4).to(tl.int32), 16)
        number = tl.program_id(0) - tl.load(line + 5).to(tl.int32)
        per_row = cols // C
        row, first = number // per_row, (number % per_row) * C
        _encode_tile(x_ptr, codes_ptr, scales_ptr, count_ptr, row, first, cols, largest, C, E4M3, PTX)

    @triton.jit
    def _copy_many(table_ptr, owner_ptr, base_ptr, WORD: tl.constexpr, B: tl.constexpr):
        """WORD 4: addresses and sizes are multiples of 16 bytes. WORD 1: any."""
        line = table_ptr + tl.load(owner_ptr + tl.program_id(0)).to(tl.int64) * 8
        kind: tl.constexpr = tl.int32 if WORD == 4 else tl.uint8
        source = tl.load(line).to(tl.pointer_type(kind))
        target = (base_ptr + tl.load(line + 1)).to(tl.pointer_type(kind))
        first = (tl.program_id(0) - tl.load(line + 5)) * (B // WORD)
        left = tl.minimum(tl.load(line + 2) // WORD - first, B // WORD).to(tl.int32)
        source, target = source + first, target + first
        if WORD == 4:
            source, target, left = tl.multiple_of(source, 16), tl.multiple_of(target, 16), tl.multiple_of(left, 4)
        at = tl.arange(0, B // WORD)
        tl.store(target + at, tl.load(source + at, mask=at < left, other=0), mask=at < left)

    @triton.jit
    def _log8_line(like_ptr, table_ptr, owner_ptr, counters_ptr, B: tl.constexpr):
        """Bit patterns and mask of a program's values, its counters and where its codes go in the arena.

        The number of values is a multiple of 16, so that loads are wide.
        """
        line = table_ptr + tl.load(owner_ptr + tl.program_id(0)).to(tl.int64) * 8
        first = (tl.program_id(0) - tl.load(line + 5)) * B
        x_ptr = tl.load(line).to(tl.pointer_type(like_ptr.dtype.element_ty)) + first
        left = tl.multiple_of(tl.minimum(tl.load(line + 4) - first, B).to(tl.int32), 16)
        mask = tl.arange(0, B) < left
        x = tl.load(tl.multiple_of(x_ptr, 16) + tl.arange(0, B), mask=mask, other=0.0)
        target = tl.multiple_of(tl.load(line + 1) + first, 16)
        return x.to(tl.float32).to(tl.int32, bitcast=True), mask, counters_ptr + tl.load(line + 3), target

    @triton.jit
    def _log8_range_many(like_ptr, table_ptr, owner_ptr, counters_ptr, B: tl.constexpr):
        bits, _, range_ptr, _ = _log8_line(like_ptr, table_ptr, owner_ptr, counters_ptr, B)
        wrong = (bits >= 0x7F800000) | ((bits < 0) & (bits != -2147483648))
        usable = tl.where(wrong, 0, tl.maximum(bits, 0))
        tl.atomic_min(range_ptr, tl.min(tl.where(usable > 0, usable, 0x7F7FFFFF), axis=0), sem="relaxed")
        tl.atomic_max(range_ptr + 1, tl.max(usable, axis=0), sem="relaxed")
        found = tl.sum(wrong.to(tl.int32), axis=0)
        if found > 0:
            tl.atomic_add(range_ptr + 2, found, sem="relaxed")

    @triton.jit
    def _log8_encode_many(like_ptr, table_ptr, owner_ptr, base_ptr, counters_ptr, B: tl.constexpr):
        bits, mask, range_ptr, target = _log8_line(like_ptr, table_ptr, owner_ptr, counters_ptr, B)
        low = tl.load(range_ptr)
        high = tl.maximum(tl.load(range_ptr + 1), low + 1)
        one = tl.full([1], 1.0, tl.float32)
        inverse = tl.div_rn(one * 254.0, one * (high - low).to(tl.float32))
        usable = tl.where((bits > 0) & (bits < 0x7F800000), bits, 0)
        step = (tl.maximum(usable, low) - low).to(tl.float32) * inverse
        rounded = (step + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(usable > 0, tl.minimum(rounded, 254) + 1, 0)
        tl.store(base_ptr + target + tl.arange(0, B), code.to(tl.uint8), mask=mask)

    @triton.jit
    def _four_values(codes, scale):
        """Four E4M3 codes in a word -> four fp32."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 p, q, a, b, c, d;
            .reg .b32 h, l;
            .reg .f32 e, f, g, i;
            mov.b32 {p, q}, $4;
            cvt.rn.f16x2.e4m3x2 l, p;
            cvt.rn.f16x2.e4m3x2 h, q;
            mov.b32 {a, b}, l;
            mov.b32 {c, d}, h;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.f32.f16 g, c;
            cvt.f32.f16 i, d;
            mul.rn.f32 $0, e, $5;
            mul.rn.f32 $1, f, $5;
            mul.rn.f32 $2, g, $5;
            mul.rn.f32 $3, i, $5;
            }""",
            "=r,=r,=r,=r,r,r", [codes, scale],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip

    def _eight_values_ptx(kind: str) -> str:
        """PTX for eight E4M3 codes in 64 bits -> four registers of two bf16 or f16."""
        lines = [
            "{ .reg .b32 v, w, t; .reg .b16 p0, p1, p2, p3, a, b; .reg .f32 f, g;",
            "mov.b64 {v, w}, $4; mov.b32 {p0, p1}, v; mov.b32 {p2, p3}, w;",
        ]
        lines += [
            f"cvt.rn.f16x2.e4m3x2 t, p{i}; mov.b32 {{a, b}}, t; cvt.f32.f16 f, a; cvt.f32.f16 g, b; "
            f"mul.rn.f32 f, f, $5; mul.rn.f32 g, g, $5; cvt.rn.{kind}x2.f32 ${i}, g, f;"
            for i in range(4)
        ]
        return "\n".join([*lines, "}"])

    _BF16_PTX = tl.constexpr(_eight_values_ptx("bf16"))
    _F16_PTX = tl.constexpr(_eight_values_ptx("f16"))

    @triton.jit
    def _eight_values(codes, scale, PTX: tl.constexpr):
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,l,r", [codes, scale],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def _decode_one(
        codes_ptr, scales_ptr, out_ptr, cols, C: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr,
        STREAM: tl.constexpr,
    ):  # fmt: skip
        """ROWS rows x SPANS times C columns; a thread takes 4 (fp32) or 8 codes at a time, one 16-byte store."""
        HALF: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
        EACH: tl.constexpr = 8 if HALF else 4
        WORDS: tl.constexpr = C * 4 // EACH
        per_row = cols // (C * SPANS)
        row = tl.program_id(0) // per_row * ROWS
        start = row.to(tl.int64) * cols + (tl.program_id(0) % per_row) * (C * SPANS)
        scale_at = (row // 16).to(tl.int64) * (cols // 16) + (tl.program_id(0) % per_row) * (C * SPANS // 16)
        word = tl.arange(0, C // EACH)
        for span in tl.static_range(SPANS):
            scale = tl.load(scales_ptr + scale_at + span * (C // 16) + word * EACH // 16)
            for h in tl.static_range(ROWS):
                at = start + h * cols + span * C
                if HALF:
                    found = tl.load((codes_ptr + at).to(tl.pointer_type(tl.int64)) + word)
                    if out_ptr.dtype.element_ty == tl.bfloat16:
                        a, b, c, d = _eight_values(found, scale, _BF16_PTX)
                    else:
                        a, b, c, d = _eight_values(found, scale, _F16_PTX)
                    target = (out_ptr + at).to(tl.pointer_type(tl.int32))
                else:
                    found = tl.load((codes_ptr + at).to(tl.pointer_type(tl.int32)) + word)
                    a, b, c, d = _four_values(found, scale)
                    target = out_ptr + at
                values = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (WORDS,))
                tl.store(target + tl.arange(0, WORDS), values, cache_modifier=STREAM)


def encode_tiles(
    x: torch.Tensor, grid: Grid, codes: torch.Tensor, scales: torch.Tensor, bad_count: torch.Tensor, fmt: Format,
    tile: tuple[int, int],
) -> None:  # fmt: skip
    """As `triton_blocks.encode_into` for a grid that is `even`; `tile` is (columns, warps)."""
    columns, warps = tile
    _encode_one[(grid.rows // 16 * (grid.cols // columns),)](
        x, codes, scales, bad_count, grid.cols, 448.0 if fmt == "e4m3" else 127.0,
        C=columns, E4M3=fmt == "e4m3", PTX=hopper(x.device), num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def decode_tiles(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, out: torch.Tensor, tile: DecodeTile) -> None:
    """E4M3 as `triton_blocks.decode_into` for a grid that is `even`, on sm_90."""
    programs = grid.rows // tile.rows * (grid.cols // tile.whole)
    _decode_one[(programs,)](
        codes, scales, out, grid.cols, C=tile.columns, ROWS=tile.rows, SPANS=tile.spans,
        STREAM=".cs" if tile.streaming else "", num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def copy_many(table: torch.Tensor, owner: torch.Tensor, programs: int, base: torch.Tensor, word: int) -> None:
    """Copy the rows (address, offset in `base`, bytes); with `word` 4 all are multiples of 16, with 1 they are any."""
    _copy_many[(programs,)](table, owner, base, WORD=word, B=COPY_BYTES[word], num_warps=4)


def encode_many(
    like: torch.Tensor, table: torch.Tensor, owner: torch.Tensor, programs: int, base: torch.Tensor,
    counters: torch.Tensor, fmt: Format, tile: tuple[int, int],
) -> None:  # fmt: skip
    """Code the rows (address, offsets of codes and scales in `base`, counter, columns) of tensors of `like`'s dtype."""
    columns, warps = tile
    _encode_many[(programs,)](
        like, table, owner, base, counters, 448.0 if fmt == "e4m3" else 127.0,
        C=columns, E4M3=fmt == "e4m3", PTX=hopper(like.device), num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def log8_many(
    like: torch.Tensor, table: torch.Tensor, owner: torch.Tensor, programs: int, base: torch.Tensor,
    counters: torch.Tensor,
) -> None:  # fmt: skip
    """Code the rows (address, offset of codes in `base`, 0, counter, values); counters start at (0x7F7FFFFF, 0, 0)."""
    _log8_range_many[(programs,)](like, table, owner, counters, B=LOG8_VALUES)
    _log8_encode_many[(programs,)](like, table, owner, base, counters, B=LOG8_VALUES, enable_fp_fusion=False)

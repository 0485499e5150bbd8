"""Triton encode and decode of 8-bit block codecs (FP8 E4M3 and INT8) and of log2-8-bit.

One program handles one row of blocks over a tile of columns, so that loads are wide; the definition is in
`fp8`, `integer` and `log8`, and the result is bit-equal to theirs. `usable` says when the codecs choose these
kernels: for CUDA tensors. The `*_into` functions also run under Triton's interpreter (TRITON_INTERPRET=1 before
the import). The interpreter truncates when it narrows fp32, and GPUs before sm_89 have no fp8 cast, so there
the rounding is done in integer arithmetic. 16x16 blocks that fill a tensor go to `triton_tiles` on sm_90.
"""

# Triton has no types for its decorator or for what a kernel takes.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal

import torch

from costlab.kernels.codec.blocks import Grid, ceil_div

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Format = Literal["e4m3", "int8"]
BLOCK_SIZES = ((16, 16), (128, 128), (1, 32))
_FLAT = 1024


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable(x: torch.Tensor, grid: Grid) -> bool:
    """Whether the block kernels serve this tensor: on a CUDA device, not empty, and one of `BLOCK_SIZES`."""
    return triton is not None and x.is_cuda and grid.numel > 0 and (grid.height, grid.width) in BLOCK_SIZES


def usable_flat(x: torch.Tensor) -> bool:
    """Whether the elementwise log2-8-bit kernels serve this tensor."""
    return triton is not None and x.is_cuda and x.numel() > 0


@cache
def _hardware_cast(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


if triton is not None:

    @triton.jit
    def _e4m3_bits(q, HARDWARE: tl.constexpr):
        """fp32 q -> E4M3 code as int32: nearest, ties to even, saturating at 448, no negative zero."""
        if HARDWARE:
            # |q| is at most 448 and a rounding, which rounds to 448: nothing to clamp.
            code = q.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
            return tl.where(code == 0x80, 0, code)
        bits = q.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # 2**14 has the spacing 2**-9 of E4M3's subnormals, so adding it rounds to them.
        subnormal = (tl.abs(q) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 126))
        return tl.where((bits < 0) & (code > 0), code | 0x80, code)

    @triton.jit
    def _int8_bits(q):
        """fp32 -> two's complement of the nearest integer (ties to even) within +-127, as int32."""
        clamped = tl.minimum(tl.maximum(q, -127.0), 127.0)
        # 1.5 * 2**23 has spacing 1, so the sum's low bits are the rounded integer.
        return ((clamped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000) & 0xFF

    @triton.jit
    def _narrow(value, out_ptr, INTERPRETED: tl.constexpr):
        """fp32 -> the element type of `out_ptr`, to nearest even; the interpreter truncates to bf16, so not there."""
        if INTERPRETED and out_ptr.dtype.element_ty == tl.bfloat16:
            bits = value.to(tl.int32, bitcast=True)
            value = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
        return value.to(out_ptr.dtype.element_ty)

    @triton.jit
    def _tile(rows, cols, numel, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr):
        """Start of the program's blocks, offsets [H, N, W] from it and mask; offsets and mask [N] of the scales."""
        per_row = tl.cdiv(cols, W * N)
        block_row = tl.program_id(0) // per_row
        first = (tl.program_id(0) % per_row) * N
        start = (block_row * H).to(tl.int64) * cols
        row = tl.arange(0, H)[:, None, None]
        col = (first + tl.arange(0, N)[None, :, None]) * W + tl.arange(0, W)[None, None, :]
        # 32-bit offsets inside a tile: 64-bit ones cost as much as the rounding does.
        offset = row.to(tl.int64) * cols + col if WIDE else row * cols + col
        mask = (block_row * H + row < rows) & (col < cols) & (start + offset < numel)
        grid_cols = tl.cdiv(cols, W)
        scale = first + tl.arange(0, N)
        return start, offset, mask, block_row.to(tl.int64) * grid_cols + scale, scale < grid_cols

    @triton.jit
    def _encode_kernel(
        x_ptr, codes_ptr, scales_ptr, count_ptr, rows, cols, numel, largest,
        H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
        E4M3: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
    ):  # fmt: skip
        start, offset, mask, scale_at, scale_mask = _tile(rows, cols, numel, H, W, N, WIDE)
        if EVEN:
            x = tl.load(x_ptr + start + offset).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + offset, mask=mask, other=0.0).to(tl.float32)
        # Bit patterns of magnitudes order like the values, with NaN and infinity on top, which fmax would drop.
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.max(tl.max(magnitude, axis=2), axis=0)
        bad = top >= 0x7F800000
        amax = tl.where(bad, 0, top).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(amax, largest), 1.1754943508222875e-38)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        found = tl.sum((bad & scale_mask).to(tl.int32), axis=0)
        if found > 0:
            tl.atomic_add(count_ptr, found)
            x = tl.where(bad[None, :, None], 0.0, x)
        q = x * inverse[None, :, None]
        code = _e4m3_bits(q, HARDWARE) if E4M3 else _int8_bits(q)
        if EVEN:
            tl.store(codes_ptr + start + offset, code.to(tl.uint8))
            tl.store(scales_ptr + scale_at, scale)
        else:
            tl.store(codes_ptr + start + offset, code.to(tl.uint8), mask=mask)
            tl.store(scales_ptr + scale_at, scale, mask=scale_mask)

    @triton.jit
    def _decode_kernel(
        codes_ptr, scales_ptr, out_ptr, rows, cols, numel,
        H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
        E4M3: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr, INTERPRETED: tl.constexpr,
    ):  # fmt: skip
        start, offset, mask, scale_at, scale_mask = _tile(rows, cols, numel, H, W, N, WIDE)
        if EVEN:
            code = tl.load(codes_ptr + start + offset)
            scale = tl.load(scales_ptr + scale_at)
        else:
            code = tl.load(codes_ptr + start + offset, mask=mask, other=0)
            scale = tl.load(scales_ptr + scale_at, mask=scale_mask, other=1.0)
        if E4M3:
            if HARDWARE:
                value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                wide = code.to(tl.int32)
                magnitude = wide & 0x7F
                normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
                value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
                value = tl.where(wide >= 0x80, -value, value)
                value = tl.where(magnitude == 0x7F, float("nan"), value)
        else:
            value = code.to(tl.int8, bitcast=True).to(tl.float32)
        result = _narrow(value * scale[None, :, None], out_ptr, INTERPRETED)
        if EVEN:
            tl.store(out_ptr + start + offset, result)
        else:
            tl.store(out_ptr + start + offset, result, mask=mask)

    @triton.jit
    def _log8_range_kernel(x_ptr, range_ptr, numel, B: tl.constexpr):
        """range[0] = least positive bit pattern, range[1] = greatest bit pattern, range[2] = values not in [0, inf)."""
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        mask = at < numel
        bits = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        wrong = (bits >= 0x7F800000) | ((bits < 0) & (bits != -2147483648))
        usable_bits = tl.where(wrong, 0, tl.maximum(bits, 0))
        tl.atomic_min(range_ptr, tl.min(tl.where(usable_bits > 0, usable_bits, 0x7F7FFFFF), axis=0))
        tl.atomic_max(range_ptr + 1, tl.max(usable_bits, axis=0))
        found = tl.sum(wrong.to(tl.int32), axis=0)
        if found > 0:
            tl.atomic_add(range_ptr + 2, found)

    @triton.jit
    def _log8_encode_kernel(x_ptr, codes_ptr, range_ptr, numel, B: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        mask = at < numel
        bits = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        low = tl.load(range_ptr)
        high = tl.maximum(tl.load(range_ptr + 1), low + 1)
        inverse = tl.div_rn(
            tl.full([1], 254.0, tl.float32), tl.full([1], 1.0, tl.float32) * (high - low).to(tl.float32)
        )
        usable_bits = tl.where((bits > 0) & (bits < 0x7F800000), bits, 0)
        step = (tl.maximum(usable_bits, low) - low).to(tl.float32) * inverse
        rounded = (step + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(usable_bits > 0, tl.minimum(rounded, 254) + 1, 0)
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=mask)

    @triton.jit
    def _log8_decode_kernel(codes_ptr, out_ptr, table_ptr, numel, B: tl.constexpr, INTERPRETED: tl.constexpr):

        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        mask = at < numel
        code = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32)
        tl.store(out_ptr + at, _narrow(tl.load(table_ptr + code), out_ptr, INTERPRETED), mask=mask)


def _launch(grid: Grid) -> tuple[tuple[int], dict[str, Any]]:
    """Launch grid and constants: about 4096 to 16384 values a program."""
    height, width = grid.height, grid.width
    blocks = {(16, 16): 16, (128, 128): 1, (1, 32): 64}[(height, width)]
    programs = grid.block_rows * ceil_div(grid.cols, width * blocks)
    even = grid.rows % height == 0 and grid.cols % (width * blocks) == 0 and grid.numel == grid.rows * grid.cols
    warps = 8 if height == 128 else 4
    wide = grid.cols * height >= 1 << 31
    return (programs,), {"H": height, "W": width, "N": blocks, "WIDE": wide, "EVEN": even, "num_warps": warps}


def encode_into(
    x: torch.Tensor, grid: Grid, codes: torch.Tensor, scales: torch.Tensor, bad_count: torch.Tensor, fmt: Format
) -> None:
    """Encode contiguous `x` into `codes` (uint8 [numel]) and `scales` (fp32 [blocks]) on the current stream.

    `bad_count` (int32 [1]) is increased by the number of blocks with a non-finite value. Nothing is synchronised.
    """
    from costlab.kernels.codec import triton_tiles

    tile = triton_tiles.encode_tile(grid, x.dtype)
    if tile is not None and triton_tiles.serves(x, codes, scales):
        triton_tiles.encode_tiles(x, grid, codes, scales, bad_count, fmt, tile)
        return
    where, constants = _launch(grid)
    largest = 448.0 if fmt == "e4m3" else 127.0
    # Contracting the product into the rounding sum would skip one of the two roundings the codec is defined by.
    _encode_kernel[where](
        x, codes, scales, bad_count, grid.rows, grid.cols, grid.numel, largest,
        E4M3=fmt == "e4m3", HARDWARE=_hardware_cast(x.device), enable_fp_fusion=False, **constants,
    )  # fmt: skip


def decode_into(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, out: torch.Tensor, fmt: Format) -> None:
    """Decode into contiguous `out` [numel] of the original dtype, on the current stream."""
    from costlab.kernels.codec import triton_tiles

    tile = triton_tiles.decode_tile(grid, out.dtype)
    if fmt == "e4m3" and tile is not None and triton_tiles.serves(codes, scales, out):
        triton_tiles.decode_tiles(codes, scales, grid, out, tile)
        return
    where, constants = _launch(grid)
    _decode_kernel[where](
        codes, scales, out, grid.rows, grid.cols, grid.numel,
        E4M3=fmt == "e4m3", HARDWARE=_hardware_cast(codes.device), INTERPRETED=INTERPRETED,
        enable_fp_fusion=False, **constants,
    )  # fmt: skip


def log8_encode_into(x: torch.Tensor, codes: torch.Tensor, value_range: torch.Tensor) -> None:
    """Encode contiguous `x`; `value_range` int32 [3] gets least positive bits, greatest bits, count of unfit values."""
    value_range[:1].fill_(0x7F7FFFFF)
    value_range[1:].zero_()
    where = (ceil_div(x.numel(), _FLAT * 4),)
    _log8_range_kernel[where](x, value_range, x.numel(), B=_FLAT * 4)
    _log8_encode_kernel[where](x, codes, value_range, x.numel(), B=_FLAT * 4, enable_fp_fusion=False)


def log8_decode_into(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Decode by the 256-entry fp32 `table`, which the host computes once a tensor."""
    where = (ceil_div(codes.numel(), _FLAT * 4),)
    _log8_decode_kernel[where](codes, out, table, codes.numel(), B=_FLAT * 4, INTERPRETED=INTERPRETED)

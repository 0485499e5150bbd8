"""INT8 and INT4 with one fp32 scale a block.

Encode, for a block with finite values x: `scale = max(max|x| / m, 2**-126)` with m = 127 or 7, `code = rint(x *
(1 / scale))` limited to +-m; reciprocal and product rounded to nearest, rint to even. Decode: `code * scale` in
fp32, rounded to the original dtype. Non-finite blocks as in `fp8`. Error bound: |value - x| <= (0.5/m + 2**-20)
* max|x| of the block.

INT8 codes are two's complement bytes (-128 never occurs). INT4 packs two codes a byte, the earlier value in the
low nibble, two's complement (-8 never occurs); an odd count ends with a zero nibble. Sizes (16x16): 8.125 b and
4.125 b a value.
"""

from __future__ import annotations

import torch

from costlab.kernels.codec import triton_blocks
from costlab.kernels.codec.blocks import Block, Grid, block_scales, from_blocks, grid_of, scaled, to_blocks
from costlab.kernels.codec.fp8 import bad_blocks

INT8_MAX, INT4_MAX = 127, 7


def encode_torch(x: torch.Tensor, block: Block, largest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int8 [numel] (not packed), scales fp32 [blocks], mask of blocks to keep raw [blocks]; any device."""
    grid = grid_of(tuple(x.shape), block)
    if grid.numel == 0:
        empty = torch.empty(0, device=x.device)
        return empty.to(torch.int8), empty, empty.to(torch.bool)
    blocks = to_blocks(x.reshape(-1), grid)
    scales, bad = block_scales(blocks, largest)
    codes = scaled(blocks, scales, bad).round_().clamp_(-largest, largest).to(torch.int8)
    return from_blocks(codes, grid), scales.view(-1), bad.view(-1)


def encode8(x: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """INT8 codes as uint8 [numel], scales, mask of raw blocks; Triton on CUDA, bit-equal to `encode_torch`."""
    grid = grid_of(tuple(x.shape), block)
    if not triton_blocks.usable(x, grid):
        codes, scales, bad = encode_torch(x, block, INT8_MAX)
        return codes.view(torch.uint8), scales, bad
    out = torch.empty(grid.numel, dtype=torch.uint8, device=x.device)
    scales = torch.empty(grid.blocks, dtype=torch.float32, device=x.device)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    triton_blocks.encode_into(x.contiguous(), grid, out, scales, count, "int8")
    return out, scales, bad_blocks(x, grid) if int(count) else torch.zeros_like(scales, dtype=torch.bool)


def decode8(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Flat values of `dtype` from INT8 codes (uint8 [numel]) and scales."""
    if triton_blocks.usable(codes, grid):
        out = torch.empty(grid.numel, dtype=dtype, device=codes.device)
        triton_blocks.decode_into(codes, scales, grid, out, "int8")
        return out
    return decode_torch(codes.view(torch.int8), scales, grid, dtype)


def decode_torch(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Flat values of `dtype` [numel] from int8 codes [numel] and scales [blocks]; any device."""
    if grid.numel == 0:
        return torch.empty(0, dtype=dtype, device=codes.device)
    values = to_blocks(codes.reshape(-1), grid).float() * scales.view(grid.block_rows, 1, grid.block_cols, 1)
    return from_blocks(values, grid).to(dtype)


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes in [-7, 7], [n] -> uint8 [(n + 1) // 2]."""
    if codes.numel() % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(torch.uint8).view(-1, 2) & 0xF
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack4(packed: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [(count + 1) // 2] -> int8 codes [count]."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=1).view(-1)[:count].view(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)

"""FP8 E4M3 with one fp32 scale a block: 16x16 (default), 128x128 and 1x32 for interchange, or one block for the tensor.

Encode, for a block with finite values x (fp32, bf16 or fp16, widened exactly to fp32):
    scale = max(max|x| / 448, 2**-126)       division rounded to nearest
    code  = e4m3(x * (1 / scale))            reciprocal and product rounded to nearest; e4m3 as in `rounding`
Decode: `value = e4m3_value(code) * scale` in fp32, rounded to nearest to the original dtype.

A block with a NaN or an infinity has code 0 everywhere and the scale 2**-126; its values are kept raw, bit for
bit, beside the codes. Error bound: |value - x| <= (16/448 + 2**-20) * max|x| of the block.

Sizes: 8 bits a value + 32 bits a block: 8.125 b (16x16), 8.002 b (128x128), 9 b (1x32 with fp32 scales).
CUDA tensors go through Triton, everything else through torch; the two are bit-equal.
"""

from __future__ import annotations

import torch

from costlab.kernels.codec import triton_blocks
from costlab.kernels.codec.blocks import Block, Grid, block_scales, from_blocks, grid_of, scaled, to_blocks
from costlab.kernels.codec.rounding import E4M3_MAX, e4m3_decode, e4m3_encode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK: Block = (16, 16)
INTERCHANGE_BLOCKS: tuple[Block, ...] = ((16, 16), (128, 128), (1, 32))


def encode_torch(x: torch.Tensor, block: Block = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [numel], scales fp32 [blocks] and the mask of blocks to keep raw, bool [blocks]; any device."""
    grid = grid_of(tuple(x.shape), block)
    if grid.numel == 0:
        empty = torch.empty(0, device=x.device)
        return empty.to(torch.uint8), empty, empty.to(torch.bool)
    blocks = to_blocks(x.reshape(-1), grid)
    scales, bad = block_scales(blocks, E4M3_MAX)
    codes = e4m3_encode(scaled(blocks, scales, bad))
    return from_blocks(codes, grid), scales.view(-1), bad.view(-1)


def decode_torch(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Flat values of `dtype` [numel] from codes [numel] and scales [blocks]; any device."""
    if grid.numel == 0:
        return torch.empty(0, dtype=dtype, device=codes.device)
    values = e4m3_decode(to_blocks(codes.reshape(-1), grid))
    values = values * scales.view(grid.block_rows, 1, grid.block_cols, 1)
    return from_blocks(values, grid).to(dtype)


def encode(x: torch.Tensor, block: Block = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `encode_torch`, by Triton where the tensor is on a CUDA device and the block size has a kernel."""
    grid = grid_of(tuple(x.shape), block)
    if not triton_blocks.usable(x, grid):
        return encode_torch(x, block)
    codes = torch.empty(grid.numel, dtype=torch.uint8, device=x.device)
    scales = torch.empty(grid.blocks, dtype=torch.float32, device=x.device)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    triton_blocks.encode_into(x.contiguous(), grid, codes, scales, count, "e4m3")
    return codes, scales, bad_blocks(x, grid) if int(count) else torch.zeros_like(scales, dtype=torch.bool)


def decode(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """As `decode_torch`, by Triton where the codes are on a CUDA device and the block size has a kernel."""
    if not triton_blocks.usable(codes, grid):
        return decode_torch(codes, scales, grid, dtype)
    out = torch.empty(grid.numel, dtype=dtype, device=codes.device)
    triton_blocks.decode_into(codes, scales, grid, out, "e4m3")
    return out


def bad_blocks(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mask, bool [blocks], of the blocks that hold a NaN or an infinity."""
    blocks = to_blocks(x.reshape(-1), grid)
    return (~torch.isfinite(blocks)).any(dim=3).any(dim=1).view(-1)

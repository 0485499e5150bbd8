"""How a tensor of any shape is cut into scaled blocks, and the per-block scale.

A tensor with at least two dimensions, whose last is at least as wide as a block and whose other dimensions
multiply to at least a block's height, is a matrix [product of the leading dimensions, last dimension]. Every
other tensor is read flat, in rows of the block's width, so that a block holds `height x width` consecutive
values. Edge blocks are smaller. The rule depends on shape and block only, so a decoder needs nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Block = tuple[int, int]
FP32_MIN_NORMAL = 2.0**-126


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for non-negative integers."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor's blocks: `rows x cols` values (the last row may be short when flat) in `height x width` blocks."""

    rows: int
    cols: int
    numel: int
    height: int
    width: int

    @property
    def block_rows(self) -> int:
        """Blocks from top to bottom."""
        return ceil_div(self.rows, self.height)

    @property
    def block_cols(self) -> int:
        """Blocks from left to right."""
        return ceil_div(self.cols, self.width)

    @property
    def blocks(self) -> int:
        """Number of blocks, which is the number of scales."""
        return self.block_rows * self.block_cols


def grid_of(shape: tuple[int, ...], block: Block) -> Grid:
    """The block grid of a tensor of this shape."""
    height, width = block
    numel = math.prod(shape)
    if len(shape) >= 2 and shape[-1] >= width and math.prod(shape[:-1]) >= height:
        return Grid(math.prod(shape[:-1]), shape[-1], numel, height, width)
    return Grid(ceil_div(numel, width), width, numel, height, width)


def to_blocks(flat: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A flat tensor of `grid.numel` values -> [block_rows, height, block_cols, width], missing edge values 0."""
    full_rows, full_cols = grid.block_rows * grid.height, grid.block_cols * grid.width
    if grid.numel != grid.rows * grid.cols:
        flat = torch.nn.functional.pad(flat, (0, grid.rows * grid.cols - grid.numel))
    matrix = flat.view(grid.rows, grid.cols)
    if (full_rows, full_cols) != (grid.rows, grid.cols):
        matrix = torch.nn.functional.pad(matrix, (0, full_cols - grid.cols, 0, full_rows - grid.rows))
    return matrix.view(grid.block_rows, grid.height, grid.block_cols, grid.width)


def from_blocks(blocks: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The inverse of `to_blocks`: a contiguous flat tensor of `grid.numel` values."""
    full_rows, full_cols = grid.block_rows * grid.height, grid.block_cols * grid.width
    matrix = blocks.reshape(full_rows, full_cols)[: grid.rows, : grid.cols]
    return matrix.reshape(-1)[: grid.numel]


def block_scales(blocks: torch.Tensor, largest_code: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 scales [block_rows, block_cols] and a bool mask of the blocks that hold a non-finite value.

    `scale = max(amax / largest_code, 2**-126)`, the division rounded to nearest (IEEE). The floor keeps a scale
    from being zero or subnormal; a non-finite block gets the floor and is kept raw by the caller.
    """
    amax = blocks.abs().amax(dim=(1, 3)).float()
    bad = ~torch.isfinite(amax)
    scales = (amax / largest_code).clamp_min(FP32_MIN_NORMAL)
    return torch.where(bad, torch.full_like(scales, FP32_MIN_NORMAL), scales), bad


def scaled(blocks: torch.Tensor, scales: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """Blocks times the reciprocal of their scale, 0 in the bad blocks, fp32.

    The reciprocal `1 / scale` is rounded to nearest once a block and multiplied (rounded to nearest) once a value: this
    pair of roundings is part of the codec's definition, so that every device gives the same codes.
    """
    inverse = scales.reciprocal()[:, None, :, None]
    return torch.where(bad[:, None, :, None], torch.zeros((), device=blocks.device), blocks.float()) * inverse

"""The Triton kernels that RMSNorm and LayerNorm share, forward and backward, with or without the residual addition.

A row is normalised within one program, statistics in fp32. The backward is persistent: each program walks over many row
tiles, keeps the weight's (and bias's) gradient in fp32 registers and stores one row of partial sums, which `column_sum`
adds up. With saved h, rstd (and mean m), xhat = (h - m) rstd, g = weight dy and N columns:

    dh = rstd (g - xhat sum(g xhat)/N [- sum(g)/N with CENTER]) + dh_out
    dweight = sum_rows dy xhat,   dbias = sum_rows dy
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from costlab.kernels.fused.column_sum import column_sum
from costlab.kernels.fused.launch import Tile, cdiv, jit, power_of_2, programs, tl, wrap_triton

TILES = {
    "forward": Tile(elements=4096, warps=8),
    "backward": Tile(elements=8192, warps=8, per_sm=1, stages=3),
}


@jit
def _norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, offset_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, rows, cols, eps,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.arange(0, B)
    inside = col < cols
    mask = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    h = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if OFFSET:
            h += tl.load(offset_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        # The statistics are those of the rounded sum, as the next layer and the backward see it.
        kept = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, kept, mask=mask)
        h = kept.to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        mean = tl.sum(h, axis=1) / cols
        tl.store(mean_ptr + row, mean, mask=row < rows)
        h = tl.where(mask, h - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / cols + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = h * rstd[:, None] * weight[None, :]
    if BIAS:
        y += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, dh_out_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dh_ptr, partial_ptr, rows, cols,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, CENTER: tl.constexpr, BIAS: tl.constexpr, SUM_DH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, B)
    inside = col < cols
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([R, B], tl.float32)
    dbias = tl.zeros([R, B], tl.float32)
    dh_sum = tl.zeros([R, B], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0), num_stages=STAGES):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            h = h - mean[:, None]
        xhat = h * rstd[:, None]
        g = dy * weight[None, :]
        dh = g - xhat * (tl.sum(g * xhat, axis=1) / cols)[:, None]
        if CENTER:
            dh -= (tl.sum(g, axis=1) / cols)[:, None]
        dh *= rstd[:, None]
        if ADD:
            dh += tl.load(dh_out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        dweight += dy * xhat
        if BIAS:
            dbias += dy
        if SUM_DH:
            dh_sum += tl.where(mask, dh, 0.0)
    out = partial_ptr + tl.program_id(0) * (1 + BIAS + SUM_DH) * cols + col
    tl.store(out, tl.sum(dweight, axis=0), mask=inside)
    if BIAS:
        tl.store(out + cols, tl.sum(dbias, axis=0), mask=inside)
    if SUM_DH:
        tl.store(out + (1 + BIAS) * cols, tl.sum(dh_sum, axis=0), mask=inside)


@cache
def _forward_shape(tile: Tile, cols: int) -> tuple[int, int, int]:
    """Columns and rows of a tile, warps."""
    block = power_of_2(cols)
    return block, tile.rows(block), tile.warps_for(block)


@cache
def _backward_shape(tile: Tile, cols: int, device: torch.device, size: int) -> tuple[int, int, int, int]:
    """Columns and rows of a tile, stages, warps; `size` is the bytes of one value of all tensors that are read."""
    block = power_of_2(cols)
    return block, *tile.buffered(block, device, size), tile.warps_for(block)


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h, mean, rstd of contiguous x [rows, n]; h means nothing without a residual, mean without `center`.

    With `offset` [n], h = x + residual + offset.
    """
    rows, cols = x.shape
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype)
    h = y if residual is None else torch.empty_like(y)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if center else rstd
    block, r, warps = _forward_shape(TILES["forward"], int(cols))
    wrap_triton(_norm_forward_kernel)[(cdiv(rows, r),)](
        x, x if residual is None else residual, weight if offset is None else offset,
        weight, weight if bias is None else bias, y, h, mean, rstd,
        rows, cols, eps,
        R=r, B=block, ADD=residual is not None, OFFSET=offset is not None, CENTER=center, BIAS=bias is not None,
        num_warps=warps,
    )  # fmt: skip
    return y, h, mean, rstd


def launch_backward(
    dy: Tensor,
    dh_out: Tensor | None,
    h: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    bias: bool,
    center: bool,
    sum_dh: bool = False,
) -> tuple[Tensor, Tensor]:
    """dh [rows, n] in h's dtype; [1 + bias + sum_dh, n] in the weight's: dweight, dbias, sum of dh over rows."""
    rows, cols = h.shape
    size = h.element_size() + dy.element_size() + (h if dh_out is None else dh_out).element_size()
    tile = TILES["backward"]
    block, r, stages, warps = _backward_shape(tile, int(cols), h.device, size)
    count = programs(h.device, tile.per_sm, cdiv(rows, r))
    sums = 1 + int(bias) + int(sum_dh)
    dh = torch.empty_like(h)
    partial = h.new_empty((count, sums * cols), dtype=torch.float32)
    wrap_triton(_norm_backward_kernel)[(count,)](
        dy, dy if dh_out is None else dh_out, h, weight, mean, rstd, dh, partial, rows, cols,
        R=r, B=block, ADD=dh_out is not None, CENTER=center, BIAS=bias, SUM_DH=sum_dh, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return dh, column_sum(partial, weight.dtype).view(sums, cols)

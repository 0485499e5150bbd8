"""Training-mode batch norm followed by ReLU, channels-last, for the convolution - batch norm - ReLU chain.

    mean, var over every row,   z = (x - mean) * rsqrt(var + eps) * weight + bias + shortcut,   y = max(z, 0)

where the shortcut is a residual block's other branch, or absent.

(Ioffe & Szegedy 2015, arXiv 1502.03167.)

With dz = dy where z > 0 else 0, xhat = (x - mean) * rstd and M rows:

    dbias = sum dz,   dweight = sum dz xhat,   dx = weight rstd (dz - dbias/M - xhat dweight/M),   dshortcut = dz

Shapes: x, shortcut [batch, channels, height, width] dense in torch.channels_last (or [rows, channels]), channels <=
4096; weight, bias, mean, var [channels]. Dtypes: fp32, bf16, fp16; weight and bias share one, which may be another, and
so may the shortcut have; y has x's. Numerics: sums in fp32 of x less the channel's first value, so that a large mean
does not cancel; z's sign is recomputed in the backward instead of saving a mask or y; with a shortcut it is read from
y, which the next convolution keeps anyway. Fixed order of addition. Other layouts, CPU tensors (outside Triton's
interpreter), other dtypes and wider tensors take the eager reference.

Traffic, in tensors: forward reads 2 (one for the statistics) and writes 1; backward reads 4 (two for the sums) and
writes 1. A shortcut adds one read forward, two reads (of y) and one write backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused.column_sum import column_sum
from costlab.kernels.fused.launch import INTERPRETED, Tile, cdiv, jit, power_of_2, programs, tl, usable, wrap_triton
from costlab.kernels.fused.op import fused_op

MAX_CHANNELS = 4096
TILES = {
    "statistics": Tile(elements=8192, warps=4, per_sm=2, stages=3),
    "normalise": Tile(elements=2048, warps=4),
    "sums": Tile(elements=4096, warps=4, per_sm=2, stages=3),
    "gradient": Tile(elements=4096, warps=4),
}


def _channel_shape(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def batch_norm_relu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Eager (y, mean, unbiased variance) of relu(batch_norm(x) + shortcut), training mode, fp32 (fp64 for fp64)."""
    wide, shape = _wide(x), _channel_shape(x)
    over = [d for d in range(x.dim()) if d != 1]
    rows = x.numel() // max(x.shape[1], 1)
    mean = wide.mean(over)
    var = (wide - mean.view(shape)).square().mean(over)
    z = (wide - mean.view(shape)) * torch.rsqrt(var + eps).view(shape) * weight.view(shape) + bias.view(shape)
    z = z if shortcut is None else z + _wide(shortcut)
    return torch.relu(z).to(x.dtype), mean, var * rows / max(rows - 1, 1)


@jit
def _statistics_kernel(x_ptr, partial_ptr, rows, cols, R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    col = tl.arange(0, B)
    inside = col < cols
    pivot = tl.load(x_ptr + col, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([R, B], tl.float32)
    squares = tl.zeros([R, B], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0), num_stages=STAGES):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        shifted = tl.where(mask, x - pivot[None, :], 0.0)
        total += shifted
        squares += shifted * shifted
    out = partial_ptr + tl.program_id(0) * 2 * cols + col
    tl.store(out, tl.sum(total, axis=0), mask=inside)
    tl.store(out + cols, tl.sum(squares, axis=0), mask=inside)


@jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    x_ptr, partial_ptr, mean_ptr, rstd_ptr, var_ptr, count, rows, cols, eps, R: tl.constexpr, B: tl.constexpr
):
    col = tl.program_id(0) * B + tl.arange(0, B)
    inside = col < cols
    total = tl.zeros([R, B], tl.float32)
    squares = tl.zeros([R, B], tl.float32)
    for first in range(0, count, R):
        row = first + tl.arange(0, R)
        mask = (row < count)[:, None] & inside[None, :]
        at = partial_ptr + row[:, None] * 2 * cols + col[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        squares += tl.load(at + cols, mask=mask, other=0.0)
    n = rows.to(tl.float32)
    shift = tl.sum(total, axis=0) / n
    var = tl.maximum(tl.sum(squares, axis=0) / n - shift * shift, 0.0)
    tl.store(mean_ptr + col, tl.load(x_ptr + col, mask=inside, other=0.0).to(tl.float32) + shift, mask=inside)
    tl.store(rstd_ptr + col, tl.rsqrt(var + eps), mask=inside)
    tl.store(var_ptr + col, var * (n / tl.maximum(n - 1.0, 1.0)), mask=inside)


@jit
def _channel(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, cols, B: tl.constexpr):  # type: ignore[no-untyped-def]
    col = tl.arange(0, B)
    inside = col < cols
    mean = tl.load(mean_ptr + col, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + col, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    return col, inside, mean[None, :], rstd[None, :], weight[None, :], bias[None, :]


@jit
def _normalise_kernel(  # type: ignore[no-untyped-def]
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shortcut_ptr, y_ptr, rows, cols,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    col, inside, mean, rstd, weight, bias = _channel(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, cols, B)
    # From the last row back: the pass before this one ended there, so the L2 cache still holds those rows.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)
    mask = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    z = (x - mean) * rstd * weight + bias
    if ADD:
        z += tl.load(shortcut_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # A comparison, not a maximum: NaN must stay NaN, as in eager.
    tl.store(y_ptr + at, tl.where(z <= 0.0, 0.0, z).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, partial_ptr, rows, cols,
    R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    col, inside, mean, rstd, weight, bias = _channel(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, cols, B)
    plain = tl.zeros([R, B], tl.float32)
    scaled = tl.zeros([R, B], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0), num_stages=STAGES):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        xhat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        z = xhat * weight + bias
        if ADD:
            z = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dz = tl.where(z <= 0.0, 0.0, dy)
        plain += dz
        scaled += dz * xhat
    out = partial_ptr + tl.program_id(0) * 2 * cols + col
    tl.store(out, tl.sum(plain, axis=0), mask=inside)
    tl.store(out + cols, tl.sum(scaled, axis=0), mask=inside)


@jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, sums_ptr, dx_ptr, dshortcut_ptr, rows, cols,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    col, inside, mean, rstd, weight, bias = _channel(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, cols, B)
    n = rows.to(tl.float32)
    plain = (tl.load(sums_ptr + col, mask=inside, other=0.0) / n)[None, :]
    scaled = (tl.load(sums_ptr + cols + col, mask=inside, other=0.0) / n)[None, :]
    # From the last row back: the pass before this one ended there, so the L2 cache still holds those rows.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)
    mask = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    xhat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    z = xhat * weight + bias
    if ADD:
        z = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dz = tl.where(z <= 0.0, 0.0, dy)
    if ADD:
        tl.store(dshortcut_ptr + at, dz.to(dshortcut_ptr.dtype.element_ty), mask=mask)
    dx = (dz - plain - xhat * scaled) * (rstd * weight)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def channels_last(x: Tensor) -> bool:
    """Whether memory holds x as dense [rows, channels]."""
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() == 2 and x.is_contiguous()


def _fits(x: Tensor, *others: Tensor, beside: Tensor | None = None) -> bool:
    """Whether the kernels take x, and a tensor `beside` it that lies in memory as x does."""
    if beside is not None and not (usable(x, beside) and beside.shape == x.shape and channels_last(beside)):
        return False
    return usable(x, *others) and channels_last(x) and 0 < x.shape[1] <= MAX_CHANNELS and x.numel() > x.shape[1]


@fused_op("costlab::batch_norm_relu")
def _batch_norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, mean, rstd, unbiased variance."""
    if not _fits(x, weight, bias, beside=shortcut):
        y, mean, var = batch_norm_relu_reference(x, weight, bias, eps, shortcut)
        rows = x.numel() // max(x.shape[1], 1)
        return y, mean, torch.rsqrt(var * max(rows - 1, 1) / rows + eps), var
    cols = x.shape[1]
    rows = x.numel() // cols
    block = power_of_2(cols)
    tile = TILES["statistics"]
    r, stages = tile.buffered(block, x.device, x.element_size())
    count = programs(x.device, tile.per_sm, cdiv(rows, r))
    partial = torch.empty((count, 2 * cols), dtype=torch.float32, device=x.device)
    wrap_triton(_statistics_kernel)[(count,)](x, partial, rows, cols, R=r, B=block, STAGES=stages, num_warps=tile.warps)
    mean, rstd, var = (torch.empty(cols, dtype=torch.float32, device=x.device) for _ in range(3))
    wrap_triton(_finish_kernel)[(cdiv(cols, 16),)](
        x, partial, mean, rstd, var, count, rows, cols, eps, R=16 if INTERPRETED else 128, B=16, num_warps=4
    )
    y = torch.empty_like(x)
    tile = TILES["normalise"]
    wrap_triton(_normalise_kernel)[(cdiv(rows, tile.rows(block)),)](
        x, mean, rstd, weight, bias, x if shortcut is None else shortcut, y, rows, cols,
        R=tile.rows(block), B=block, ADD=shortcut is not None, num_warps=tile.warps,
    )  # fmt: skip
    return y, mean, rstd, var


@fused_op("costlab::batch_norm_relu_backward")
def _batch_norm_relu_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, [2, channels] in the statistics' dtype: dbias, dweight, and the shortcut's gradient: empty without y."""
    if not (_fits(x, dy, weight, bias, beside=y) and channels_last(dy)):
        return _reference_backward(dy, x, y, weight, bias, mean, rstd)
    cols = x.shape[1]
    rows = x.numel() // cols
    block = power_of_2(cols)
    tile = TILES["sums"]
    r, stages = tile.buffered(
        block, x.device, x.element_size() + dy.element_size() + (y.element_size() if y is not None else 0)
    )
    count = programs(x.device, tile.per_sm, cdiv(rows, r))
    partial = torch.empty((count, 2 * cols), dtype=torch.float32, device=x.device)
    wrap_triton(_sums_kernel)[(count,)](
        dy, x, x if y is None else y, mean, rstd, weight, bias, partial, rows, cols,
        R=r, B=block, STAGES=stages, ADD=y is not None, num_warps=tile.warps,
    )  # fmt: skip
    sums = column_sum(partial, torch.float32).view(2, cols)
    dx, dshortcut = torch.empty_like(x), x.new_empty(0) if y is None else torch.empty_like(x)
    tile = TILES["gradient"]
    wrap_triton(_gradient_kernel)[(cdiv(rows, tile.rows(block)),)](
        dy, x, x if y is None else y, mean, rstd, weight, bias, sums, dx, dx if y is None else dshortcut, rows, cols,
        R=tile.rows(block), B=block, ADD=y is not None, num_warps=tile.warps,
    )  # fmt: skip
    return dx, sums, dshortcut


def _reference_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _channel_shape(x)
    over = [d for d in range(x.dim()) if d != 1]
    xhat = (_wide(x) - mean.view(shape)) * rstd.view(shape)
    z = xhat * weight.view(shape) + bias.view(shape) if y is None else y
    dz = torch.where(z <= 0, 0.0, _wide(dy))
    rows = max(x.numel() // max(x.shape[1], 1), 1)
    plain, scaled = dz.sum(over), (dz * xhat).sum(over)
    dx = (dz - plain.view(shape) / rows - xhat * scaled.view(shape) / rows) * (rstd * weight).view(shape)
    return dx.to(x.dtype), torch.stack((plain, scaled)), x.new_empty(0) if y is None else dz.to(x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, shortcut, _ = inputs
    ctx.save_for_backward(x, None if shortcut is None else output[0], weight, bias, output[1], output[2])
    ctx.shortcut_dtype = None if shortcut is None else shortcut.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dy: Tensor, *_statistics: None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
    x, y, weight, bias, mean, rstd = ctx.saved_tensors
    layout = torch.channels_last if channels_last(x) and x.dim() == 4 else torch.contiguous_format
    dx, sums, dz = _batch_norm_relu_backward(dy.contiguous(memory_format=layout), x, y, weight, bias, mean, rstd)
    return dx, sums[1].to(weight.dtype), sums[0].to(bias.dtype), None if y is None else dz.to(ctx.shortcut_dtype), None


_batch_norm_relu.register_autograd(_backward, setup_context=_save)


def batch_norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, unbiased variance) of relu(batch_norm(x) + shortcut) over the rows; only y is differentiable.

    Raises ValueError for a shortcut of another shape.
    """
    if shortcut is not None and shortcut.shape != x.shape:
        raise ValueError(f"the shortcut is {tuple(shortcut.shape)}, the norm's input {tuple(x.shape)}")
    y, mean, _, var = _batch_norm_relu(x, weight.contiguous(), bias.contiguous(), shortcut, eps)
    return y, mean, var

"""LayerNorm, alone and with the residual addition in front of it.

    h = x + residual,   y = (h - mean(h)) * rsqrt(var(h) + eps) * weight + bias      (Ba et al. 2016, arXiv 1607.06450)

with the biased variance. Shapes: x, residual [..., n], weight and bias [n], n <= 16384; y and h as x. Dtypes: fp32,
bf16, fp16; h has the promoted dtype of x and residual and y has h's; weight and bias share one, which may be another.
Numerics: two-pass statistics of the rounded h in registers, all arithmetic and the parameter gradients in fp32, one
rounding per output. Gradients add in a fixed order. Strided inputs are copied. CPU tensors (outside Triton's
interpreter), other dtypes and wider rows take the eager reference.

Traffic with the residual: forward reads 2 and writes 2 tensors, backward reads 3 and writes 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused.launch import MAX_COLUMNS, as_rows, usable
from costlab.kernels.fused.norm_kernels import launch_backward, launch_forward
from costlab.kernels.fused.op import fused_op


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Eager LayerNorm over the last dimension, in fp32 (fp64 for fp64 inputs), returned in x's dtype."""
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias
    return y.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Eager y, h of h = x + residual and y = LayerNorm(h)."""
    h = x + residual
    return layer_norm_reference(h, weight, bias, eps), h


def fits(x: Tensor, *others: Tensor) -> bool:
    """Whether the Triton kernels take these tensors; x is [rows, n]."""
    return usable(x, *others) and 0 < x.shape[-1] <= MAX_COLUMNS and x.numel() > 0


def reference_statistics(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(var + eps) of every row, as the kernels save them."""
    wide = _wide(h)
    mean = wide.mean(-1)
    return mean, torch.rsqrt((wide - mean[:, None]).pow(2).mean(-1) + eps)


def reference_backward(
    dy: Tensor, dh_out: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dh and [dweight, dbias] by the formula of `norm_kernels`, eagerly."""
    wide = _wide(dy)
    xhat, g = (_wide(h) - mean[:, None]) * rstd[:, None], wide * _wide(weight)
    dh = (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd[:, None]
    if dh_out is not None:
        dh = dh + dh_out
    return dh.to(h.dtype), torch.stack(((wide * xhat).sum(0), wide.sum(0))).to(weight.dtype)


@fused_op("costlab::layer_norm")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not fits(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps), *reference_statistics(x, eps)
    y, _, mean, rstd = launch_forward(x, None, weight, bias, eps, center=True)
    return y, mean, rstd


@fused_op("costlab::add_layer_norm")
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not fits(x, residual, weight, bias):
        y, h = add_layer_norm_reference(x, residual, weight, bias, eps)
        return y, h, *reference_statistics(h, eps)
    return launch_forward(x, residual, weight, bias, eps, center=True)


@fused_op("costlab::layer_norm_backward")
def _layer_norm_backward(
    dy: Tensor, dh_out: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    if not fits(h, dy, weight):
        return reference_backward(dy, dh_out, h, weight, mean, rstd)
    return launch_backward(dy, dh_out, h, weight, mean, rstd, bias=True, center=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dy: Tensor, *_statistics: None) -> tuple[Tensor, Tensor, Tensor, None]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, sums = _layer_norm_backward(dy.contiguous(), None, x, weight, mean, rstd)
    return dx, sums[0], sums[1], None


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(output[1], inputs[2], *output[2:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _add_backward(ctx: Any, dy: Tensor | None, dh_out: Tensor | None, *_statistics: None) -> tuple[Tensor | None, ...]:
    h, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy.contiguous()
    dh_out = None if dh_out is None else dh_out.contiguous()
    dh, sums = _layer_norm_backward(dy, dh_out, h, weight, mean, rstd)
    of_x, of_residual = ctx.dtypes
    if of_x == of_residual:
        return dh, dh, sums[0], sums[1], None
    return dh.to(of_x), dh.to(of_residual), sums[0], sums[1], None


_layer_norm.register_autograd(_backward, setup_context=_save)
_add_layer_norm.register_autograd(_add_backward, setup_context=_add_save)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of x [..., n] with weight and bias [n]; differentiable, same dtype and shape as x."""
    y: Tensor = _layer_norm(as_rows(x), weight.contiguous(), bias.contiguous(), eps)[0]
    return y.view(x.shape)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, h) with h = x + residual and y = LayerNorm(h); x and residual of one shape [..., n]; differentiable.

    Raises ValueError if the shapes of x and residual differ (there is no broadcasting).
    """
    if x.shape != residual.shape:
        raise ValueError(f"x and residual differ in shape: {tuple(x.shape)} and {tuple(residual.shape)}")
    rows = as_rows(x)
    y, h, *_ = _add_layer_norm(rows, as_rows(residual), weight.contiguous(), bias.contiguous(), eps)
    return (y, h) if rows is x else (y.view(x.shape), h.view(x.shape))

"""RMSNorm, alone and with the residual addition in front of it.

    h = x + residual,   y = h * rsqrt(mean(h^2) + eps) * weight          (Zhang & Sennrich 2019, arXiv 1910.07467)

Shapes: x, residual [..., n], weight [n], n <= 16384; y and h as x. Dtypes: fp32, bf16, fp16; h has the promoted dtype
of x and residual and y has h's; the weight may have another. Numerics: statistics, products and the weight gradient in
fp32, one rounding per output; h is rounded before the statistics are taken. y is not rounded between the normalisation
and the product with the weight, as some models do; the difference is one rounding of y. Gradients add in a fixed order.
Strided inputs are copied. CPU tensors (outside Triton's interpreter), other dtypes and wider rows take the eager
reference.

Traffic with the residual: forward reads 2 and writes 2 tensors, backward reads 3 and writes 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused.launch import MAX_COLUMNS, as_rows, usable
from costlab.kernels.fused.norm_kernels import launch_backward, launch_forward
from costlab.kernels.fused.norm_linear import remember
from costlab.kernels.fused.op import fused_op


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Eager RMSNorm over the last dimension, in fp32 (fp64 for fp64 inputs), returned in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Eager y, h of h = x + residual and y = RMSNorm(h)."""
    h = x + residual
    return rms_norm_reference(h, weight, eps), h


def _fits(x: Tensor, *others: Tensor) -> bool:
    return usable(x, *others) and 0 < x.shape[-1] <= MAX_COLUMNS and x.numel() > 0


def _reference_backward(
    dy: Tensor, dh_out: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    xhat, g = h.to(wide) * rstd[:, None], dy.to(wide) * weight.to(wide)
    dh = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd[:, None]
    if dh_out is not None:
        dh = dh + dh_out
    return dh.to(h.dtype), (dy.to(wide) * xhat).sum(0, keepdim=True).to(weight.dtype)


def _reference_rstd(h: Tensor, eps: float) -> Tensor:
    wide = h if h.dtype == torch.float64 else h.float()
    return torch.rsqrt(wide.pow(2).mean(-1) + eps)


@fused_op("costlab::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _fits(x, weight):
        return rms_norm_reference(x, weight, eps), _reference_rstd(x, eps)
    y, _, _, rstd = launch_forward(x, None, weight, None, eps, center=False)
    return y, rstd


@fused_op("costlab::add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not _fits(x, residual, weight):
        y, h = add_rms_norm_reference(x, residual, weight, eps)
        return y, h, _reference_rstd(h, eps)
    y, h, _, rstd = launch_forward(x, residual, weight, None, eps, center=False)
    return y, h, rstd


@fused_op("costlab::rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, dh_out: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    if not _fits(h, dy, weight):
        return _reference_backward(dy, dh_out, h, weight, rstd)
    return launch_backward(dy, dh_out, h, weight, rstd, rstd, bias=False, center=False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _rstd: None) -> tuple[Tensor, Tensor, None]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(dy.contiguous(), None, x, weight, rstd)
    return dx, dweight[0], None


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _ = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _add_backward(ctx: Any, dy: Tensor | None, dh_out: Tensor | None, _rstd: None) -> tuple[Tensor | None, ...]:
    h, weight, rstd = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy.contiguous()
    dh, dweight = _rms_norm_backward(dy, None if dh_out is None else dh_out.contiguous(), h, weight, rstd)
    of_x, of_residual = ctx.dtypes
    if of_x == of_residual:
        return dh, dh, dweight[0], None
    return dh.to(of_x), dh.to(of_residual), dweight[0], None


_rms_norm.register_autograd(_backward, setup_context=_save)
_add_rms_norm.register_autograd(_add_backward, setup_context=_add_save)


def rms_norm(x: Tensor, weight: Tensor, eps: float, note: bool = False) -> Tensor:
    """RMSNorm of x [..., n] with weight [n]; differentiable, same dtype and shape as x.

    With `note` the output says how to compute it again, see `norm_linear`.
    """
    rows, weight = as_rows(x), weight.contiguous()
    y: Tensor
    y, rstd = _rms_norm(rows, weight, eps)
    if note:  # on a view: Dynamo follows attributes of those, not of an op's own outputs
        return remember(y.view(x.shape), rows, rstd, weight, eps)
    return y if rows is x else y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, note: bool = False) -> tuple[Tensor, Tensor]:
    """(y, h) with h = x + residual and y = RMSNorm(h); x and residual of one shape [..., n], weight [n].

    With `note` y says how to compute it again, see `norm_linear`. Raises ValueError if the shapes of x and residual
    differ (there is no broadcasting).
    """
    if x.shape != residual.shape:
        raise ValueError(f"x and residual differ in shape: {tuple(x.shape)} and {tuple(residual.shape)}")
    weight = weight.contiguous()
    rows = as_rows(x)
    y, h, rstd = _add_rms_norm(rows, as_rows(residual), weight, eps)
    whole = y if rows is x and not note else y.view(x.shape)
    return remember(whole, h, rstd, weight, eps) if note else whole, h if rows is x else h.view(x.shape)

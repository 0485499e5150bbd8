"""Linear layers behind an RMSNorm that do not keep the norm's output for the backward: it is computed again.

    y = RMSNorm(h),   out = y @ weight.T
    backward: y again from h and rstd,   dweight = dout.T @ y,   dy = dout @ weight

A Linear keeps its input for its weight's gradient, and the norm in front keeps its own: two tensors of one size, where
one and a vector do. The norm leaves a note on its output (`remember`) that says how to compute it again, and a Linear
that finds the note keeps that instead (as in "recompute the cheap", Korthikanti et al. 2022, arXiv 2205.05198). The
note is left only where the graph shows that nothing but such Linears uses the output and that nothing changes it
(`rewrite.norm_linear`).

Shapes: y, h [rows, n], rstd [rows] fp32, norm_weight [n], weight [m, n], out [rows, m]. Dtypes: fp32, bf16, fp16; y, h
and weight share one. Numerics: y is computed again by the formula and in the precision of the norm's kernel; the
products are the library's. Traffic: one more read of h and write of y for each Linear (in a compiled graph: for each
norm).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from costlab.kernels.fused.launch import MAX_COLUMNS, is_direct, usable
from costlab.kernels.fused.norm_kernels import launch_forward
from costlab.kernels.fused.op import fused_op

Note = tuple[Tensor, Tensor, Tensor, float]
_NOTE = "_costlab_norm"


def remember(y: Tensor, h: Tensor, rstd: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """y [..., n] with the note that it is the RMSNorm of h [rows, n]."""
    setattr(y, _NOTE, (h, rstd, norm_weight, eps))
    return y


def note_of(y: Tensor) -> Note | None:
    """What `remember` left on y."""
    note: Note | None = getattr(y, _NOTE, None)
    return note


def _again(h: Tensor, rstd: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    # Traced, as plain operations: they are merged over the Linears and fused, and the partitioner may move them.
    if is_direct() and usable(h, norm_weight) and 0 < h.shape[1] <= MAX_COLUMNS and h.numel() > 0:
        return launch_forward(h, None, norm_weight, None, eps, center=False)[0]
    return (h.to(rstd.dtype) * rstd[:, None] * norm_weight.to(rstd.dtype)).to(h.dtype)


@fused_op("costlab::norm_linear")
def _norm_linear(  # what the norm was computed from is for `_save`
    y: Tensor,
    h: Tensor,  # noqa: ARG001
    rstd: Tensor,  # noqa: ARG001
    norm_weight: Tensor,  # noqa: ARG001
    weight: Tensor,
    eps: float,  # noqa: ARG001
) -> Tensor:
    return y @ weight.t()


@fused_op("costlab::norm_linear_backward")
def _norm_linear_backward(
    dout: Tensor, h: Tensor, rstd: Tensor, norm_weight: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return dout @ weight, dout.t() @ _again(h, rstd, norm_weight, eps)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dy, dweight = _norm_linear_backward(dout.contiguous(), *ctx.saved_tensors, ctx.eps)
    return dy, None, None, None, dweight, None


_norm_linear.register_autograd(_backward, setup_context=_save)


def norm_linear(y: Tensor, weight: Tensor, note: Note) -> Tensor:
    """y @ weight.T [..., m] for a y [..., n] with its note; differentiable in y and weight.

    The gradient of what the note holds goes through y.
    """
    h, rstd, norm_weight, eps = note
    out: Tensor = _norm_linear(y.reshape(-1, y.shape[-1]), h.detach(), rstd.detach(), norm_weight.detach(), weight, eps)
    return out.view(*y.shape[:-1], weight.shape[0])

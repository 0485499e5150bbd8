"""Gated activations of a transformer's MLP, alone and joined to the projection behind them.

    y = act(gate) * up,   out = y @ weight.T,   act one of "silu" (SwiGLU), "gelu" (erf), "gelu_tanh"

(Shazeer 2020, arXiv 2002.05202; Hendrycks & Gimpel 2016, arXiv 1606.08415.)

Shapes: gate, up [..., n], weight [m, n], out [..., m]. Dtypes: fp32, bf16, fp16; gate and up share one. Numerics: the
activation and its derivative in fp32, one rounding per output; tanh(z) is computed as 2 sigmoid(2z) - 1. Only gate and
up are saved: act(gate) is recomputed in the backward, and `gated_linear` also recomputes y there, for the weight's
gradient, before the gradient of y is computed: at most two tensors of gate's size exist beside gate and up. Rows may
be strided (two halves of one projection), columns that are strided are copied. CPU tensors (outside Triton's
interpreter) and other dtypes take the eager reference.

Traffic: forward reads 2 and writes 1 tensor, backward reads 3 and writes 2 (and the forward's once more with y).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from costlab.kernels.fused.launch import Tile, autocast, cdiv, jit, power_of_2, tl, usable, wrap_triton
from costlab.kernels.fused.op import fused_op

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
TILES = {"forward": Tile(elements=2048, warps=8), "backward": Tile(elements=4096, warps=8)}


def activation(name: str, x: Tensor) -> Tensor:
    """The named activation, eagerly. Raises ValueError for a name that is not in `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation '{name}'; there are: {', '.join(ACTIVATIONS)}")
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def gated_reference(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    """Eager act(gate) * up in fp32 (fp64 for fp64 inputs), returned in gate's dtype."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (activation(act, gate.to(wide)) * up.to(wide)).to(gate.dtype)


@jit
def activate(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(x) and its derivative for fp32 x; ACT is an index into `ACTIVATIONS`."""
    if ACT == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@jit
def _tile(cols, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    across = tl.cdiv(cols, B)
    row = (tl.program_id(0) // across) * R + tl.arange(0, R)
    col = (tl.program_id(0) % across) * B + tl.arange(0, B)
    return row.to(tl.int64)[:, None], col[None, :]


@jit
def _gated_forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, y_ptr, rows, cols, gate_stride, up_stride, R: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr
):
    row, col = _tile(cols, R, B)
    mask = (row < rows) & (col < cols)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(gate, ACT)
    tl.store(y_ptr + row * cols + col, (value * up).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, rows, cols, gate_stride, up_stride,
    R: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr, REUSE: tl.constexpr,
):  # fmt: skip
    """With REUSE, dup_ptr holds dy and is overwritten by the gradient of up."""
    row, col = _tile(cols, R, B)
    mask = (row < rows) & (col < cols)
    at = row * cols + col
    if REUSE:
        dy = tl.load(dup_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate(gate, ACT)
    tl.store(dgate_ptr + at, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + at, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)


def _shape(tile: Tile, rows: int, cols: int) -> tuple[tuple[int], dict[str, int]]:
    block = min(power_of_2(cols), tile.elements)
    r = tile.rows(block)
    return (cdiv(rows, r) * cdiv(cols, block),), {"R": r, "B": block, "num_warps": tile.warps}


def _forward(gate: Tensor, up: Tensor, act: int) -> Tensor:
    rows, cols = gate.shape
    y: Tensor = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    grid, constants = _shape(TILES["forward"], rows, cols)
    wrap_triton(_gated_forward_kernel)[grid](
        gate, up, y, rows, cols, gate.stride(0), up.stride(0), ACT=act, **constants
    )  # fmt: skip
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, act: int, reuse: bool) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; with `reuse` the latter is put where dy was."""
    rows, cols = gate.shape
    dgate = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    dup = dy if reuse else torch.empty_like(dgate)
    grid, constants = _shape(TILES["backward"], rows, cols)
    wrap_triton(_gated_backward_kernel)[grid](
        gate if reuse else dy, gate, up, dgate, dup, rows, cols, gate.stride(0), up.stride(0),
        ACT=act, REUSE=reuse, **constants,
    )  # fmt: skip
    return dgate, dup


def _fits(gate: Tensor, *others: Tensor) -> bool:
    return usable(gate, *others) and gate.numel() > 0


def _reference_gradients(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    x, dy = gate.to(wide), dy.to(wide)
    name = ACTIVATIONS[act]
    if name == "silu":
        slope = torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))
    else:
        slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh" if act == 2 else "none")
    return (dy * up.to(wide) * slope).to(gate.dtype), (dy * activation(name, x)).to(up.dtype)


@fused_op("costlab::gated")
def _gated(gate: Tensor, up: Tensor, act: int) -> Tensor:
    if not _fits(gate, up):
        return gated_reference(gate, up, ACTIVATIONS[act])
    return _forward(gate, up, act)


@fused_op("costlab::gated_backward")
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    if not _fits(gate, up, dy):
        return _reference_gradients(dy, gate, up, act)
    return _backward(dy, gate, up, act, reuse=False)


@fused_op("costlab::gated_linear")
def _gated_linear(gate: Tensor, up: Tensor, weight: Tensor, act: int) -> Tensor:
    y = _forward(gate, up, act) if _fits(gate, up) else gated_reference(gate, up, ACTIVATIONS[act])
    return y @ weight.t()


@fused_op("costlab::gated_linear_backward")
def _gated_linear_backward(
    dout: Tensor, gate: Tensor, up: Tensor, weight: Tensor, act: int
) -> tuple[Tensor, Tensor, Tensor]:
    # The weight's gradient first: y is gone before dy is there, and the gradient of up takes dy's place.
    y = _forward(gate, up, act) if _fits(gate, up) else gated_reference(gate, up, ACTIVATIONS[act])
    dweight = dout.t() @ y
    del y
    dy = dout @ weight
    if _fits(gate, up, dy):
        dgate, dup = _backward(dy, gate, up, act, reuse=True)
    else:
        dgate, dup = _reference_gradients(dy, gate, up, act)
    return dgate, dup, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def _gated_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    dgate, dup = _gated_backward(dy.contiguous(), *ctx.saved_tensors, ctx.act)
    return dgate, dup, None


def _gated_linear_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dgate, dup, dweight = _gated_linear_backward(dout.contiguous(), *ctx.saved_tensors, ctx.act)
    return dgate, dup, dweight, None


_gated.register_autograd(_gated_gradient, setup_context=_save)
_gated_linear.register_autograd(_gated_linear_gradient, setup_context=_save)


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n] with unit column stride, sharing memory where the strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _index(act: str) -> int:
    if act not in ACTIVATIONS:
        raise ValueError(f"no activation '{act}'; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(act)


def gated(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    """act(gate) * up, same shape and dtype as gate; differentiable. Raises ValueError on unlike shapes or dtypes."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate and up differ: {tuple(gate.shape)} {gate.dtype}, {tuple(up.shape)} {up.dtype}")
    y: Tensor = _gated(_rows(gate), _rows(up), _index(act))
    return y.view(gate.shape)


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, act: str = "silu") -> Tensor:
    """(act(gate) * up) @ weight.T for weight [m, n]: [..., m]; differentiable; saves gate and up only.

    Under autocast all three are taken in autocast's dtype. Raises ValueError on unlike shapes or dtypes.
    """
    gate, up, weight = autocast(gate, up, weight)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate and up differ: {tuple(gate.shape)} {gate.dtype}, {tuple(up.shape)} {up.dtype}")
    out: Tensor = _gated_linear(_rows(gate), _rows(up), weight, _index(act))
    return out.view(*gate.shape[:-1], weight.shape[0])

"""The calls a rewritten module makes instead of its own operations, each with its guard and its unfused form.

Guards are on what a graph does not tell: device, dtype, shape, layout, mode. Where one does not hold, the step does
what the module did before. Under torch.compile a guard is decided once a trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.kernels.fused.batch_norm_relu import MAX_CHANNELS, batch_norm_relu, channels_last
from costlab.kernels.fused.ffn_layer_norm import ffn_layer_norm
from costlab.kernels.fused.gated import activation, gated, gated_linear
from costlab.kernels.fused.launch import MAX_COLUMNS, usable
from costlab.kernels.fused.layer_norm import add_layer_norm
from costlab.kernels.fused.matching import eps_of
from costlab.kernels.fused.norm_linear import norm_linear, note_of
from costlab.kernels.fused.rms_norm import add_rms_norm, rms_norm
from costlab.kernels.fused.rope import MAX_HEAD_DIM, rope


def _alike(*tensors: Any) -> bool:
    """Whether all are plain tensors that the kernels take, of one device and dtype."""
    if not all(isinstance(t, Tensor) for t in tensors):
        return False
    return usable(*tensors) and all(t.dtype == tensors[0].dtype for t in tensors)


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype in which a Linear would multiply these: autocast's, or their common one; None if it would refuse."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype if x.dtype == weight.dtype else None


def _autocast(x: Tensor) -> bool:
    """Whether autocast is on, under which LayerNorm returns fp32 whatever it is given."""
    return torch.is_autocast_enabled(x.device.type)


def norm_fits(x: Any, weight: Tensor) -> bool:
    """Whether the RMSNorm kernel takes x and gives the dtype that any way of writing RMSNorm would."""
    return _alike(x, weight) and x.dim() > 0 and x.shape[-1] == weight.shape[0] <= MAX_COLUMNS


def rms_norm_forward(self: Any, x: Tensor) -> Tensor:
    """Forward of a recognised RMSNorm module; `_costlab_unfused` is its class before."""
    if norm_fits(x, self.weight):
        return rms_norm(x, self.weight, eps_of(self) or 0.0)
    unfused: Tensor = self._costlab_unfused.forward(self, x)
    return unfused


def norm_noted(norm: Any, x: Tensor) -> Tensor:
    """norm(x) for a recognised RMSNorm, with a note for the Linears behind it (`norm_linear`)."""
    if norm_fits(x, norm.weight):
        return rms_norm(x, norm.weight, eps_of(norm) or 0.0, note=True)
    unfused: Tensor = norm(x)
    return unfused


def linear_forward(self: Any, x: Tensor) -> Tensor:
    """Forward of a Linear without bias behind a norm: without the norm's output in memory if a note came with it."""
    note = note_of(x)
    if note is not None and torch.is_grad_enabled() and _product_dtype(x, self.weight) == x.dtype == self.weight.dtype:
        return norm_linear(x, self.weight, note)
    unfused: Tensor = self._costlab_unfused.forward(self, x)
    return unfused


def add_norm_noted(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`add_norm`, the first output with a note for the Linears behind it."""
    return add_norm(norm, x, residual, note=True)


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor, note: bool = False) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) for a recognised RMSNorm or LayerNorm."""
    weight: Any = norm.weight
    bias: Any = getattr(norm, "bias", None)
    same = _alike(x, residual, weight) and x.shape == residual.shape and norm_fits(x, weight)
    if same and bias is not None and _alike(weight, bias) and not _autocast(x):
        return add_layer_norm(x, residual, weight, bias, eps_of(norm) or 0.0)
    if same and bias is None:
        return add_rms_norm(x, residual, weight, eps_of(norm) or 0.0, note)
    h = x + residual
    return norm(h), h


def gate_linear(linear: nn.Module, gate: Tensor, up: Tensor, act: str) -> Tensor:
    """linear(act(gate) * up) for a Linear without bias."""
    weight: Any = linear.weight
    if _alike(gate, up) and gate.shape == up.shape and usable(gate, weight):
        if _product_dtype(gate, weight) == gate.dtype:
            return gated_linear(gate, up, weight, act)
        unfused: Tensor = linear(gated(gate, up, act))
        return unfused
    out: Tensor = linear(activation(act, gate) * up)
    return out


def gate_only(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up."""
    if _alike(gate, up) and gate.shape == up.shape:
        return gated(gate, up, act)
    return activation(act, gate) * up


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both rotated by the halves convention in fp32, cast back to their dtypes."""
    fits = (
        _alike(q, k)
        and _alike(cos, sin)
        and q.dim() == 4
        and k.dim() == 4
        and cos.dim() == 2
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:]
        and cos.shape == sin.shape == (q.shape[2], q.shape[3] // 2)
        and q.shape[3] <= MAX_HEAD_DIM
        and not (cos.requires_grad or sin.requires_grad)
    )
    if fits:
        return rope(q, k, cos, sin)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def norm_add_relu(norm: Any, x: Tensor, shortcut: Tensor) -> Tensor:
    """relu(norm(x) + shortcut) for a BatchNorm2d."""
    fused = _norm_relu(norm, x, shortcut)
    return F.relu(norm(x) + shortcut) if fused is None else fused


def norm_iadd_relu(norm: Any, x: Tensor, shortcut: Tensor) -> Tensor:
    """As `norm_add_relu`, with the dtype and shape of `norm(x)`, to which the module added in place."""
    fused = _norm_relu(norm, x, shortcut)
    return F.relu(norm(x).add_(shortcut)) if fused is None else fused


def norm_relu(norm: Any, x: Tensor) -> Tensor:
    """relu(norm(x)) for a BatchNorm2d."""
    fused = _norm_relu(norm, x, None)
    return F.relu(norm(x)) if fused is None else fused


def _norm_relu(norm: Any, x: Tensor, shortcut: Tensor | None) -> Tensor | None:
    """The fused kernel's result, running statistics updated; None where a guard does not hold."""
    tracked = norm.running_mean is not None
    fits = (
        norm.training
        and (norm.momentum is not None or not tracked)
        and usable(x, norm.weight, norm.bias)
        and norm.weight.dtype == norm.bias.dtype
        and x.dim() == 4
        and channels_last(x)
        and x.shape[1] <= MAX_CHANNELS
        and x.numel() > x.shape[1]
        and (shortcut is None or (_alike(x, shortcut) and shortcut.shape == x.shape and channels_last(shortcut)))
    )
    if not fits:
        return None
    y, mean, var = batch_norm_relu(x, norm.weight, norm.bias, norm.eps, shortcut)
    if tracked:
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_(var.to(norm.running_var.dtype), norm.momentum)
    return y


def feed_forward_norm(first: nn.Module, second: nn.Module, norm: nn.Module, x: Tensor, form: str) -> Tensor:
    """norm(x + second(gelu(first(x)))) for Linears with bias and a LayerNorm."""
    parameters: list[Any] = [first.weight, first.bias, second.weight, second.bias, norm.weight, norm.bias]
    if _alike(x, *parameters) and not _autocast(x) and x.shape[-1] == parameters[4].shape[0] <= MAX_COLUMNS:
        w1, b1, w2, b2, weight, bias = parameters
        return ffn_layer_norm(x, w1, b1, w2, b2, weight, bias, eps_of(norm) or 0.0, form)
    out: Tensor = norm(x + second(F.gelu(first(x), approximate=form)))
    return out

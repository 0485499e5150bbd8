"""The fused kernels by name: what each replaces and under which guards, and their application to a model.

    from costlab.kernels.fused.registry import apply
    replaced = apply(model)              # before torch.compile and before fully_shard

`apply` works on any model: modules are recognised by what they compute (`matching`), their classes are exchanged for
subclasses with another forward, and parameters, names, hooks and state dicts stay as they are. Where a guard does not
hold at run time the step does what the module did before (`steps`). Modules that were passed over, with the reason, go
to `findings`. A rewritten forward holds the attributes that Python read when it was traced: change them before `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from costlab.kernels.fused import matching as match
from costlab.kernels.fused import rewrite, steps
from costlab.kernels.fused.launch import autocast, usable
from costlab.kernels.fused.linear_cross_entropy import linear_cross_entropy

Loss = Callable[[nn.Module, Any], Tensor]
_MARK = match.MARK


@dataclass(frozen=True)
class FusedKernel:
    """One kernel: what it replaces, its guards beyond the common ones, the rule that finds it in a graph."""

    name: str
    replaces: str
    guards: str
    rule: rewrite.Rule | None = None


COMMON_GUARDS = "CUDA tensors on one device, fp32, bf16 or fp16, one dtype for the operands and their parameters"
# The order is the order of application: a larger pattern before those it contains.
KERNELS = {
    kernel.name: kernel
    for kernel in (
        FusedKernel(
            "ffn_layer_norm",
            "LayerNorm(x + Linear(gelu(Linear(x)))) with biases (post-norm feed-forward block)",
            "rows of at most 16384, no autocast",
            rewrite.feed_forward_norm,
        ),
        FusedKernel(
            "add_norm",
            "RMSNorm or LayerNorm of a sum of two tensors, the sum kept",
            "rows of at most 16384, equal shapes; LayerNorm: no autocast",
            rewrite.add_norm,
        ),
        FusedKernel(
            "norm_linear",
            "RMSNorm read by Linears without bias only: they compute its output again instead of keeping it",
            "the Linears multiply in the norm's dtype",
            rewrite.norm_linear,
        ),
        FusedKernel(
            "gated_linear",
            "act(a) * b with SiLU or GELU, and the Linear without bias behind it; the product is recomputed for it",
            "equal shapes; joined to the Linear only if it multiplies in the operands' dtype",
            rewrite.gated_linear,
        ),
        FusedKernel(
            "rope",
            "rotary embedding (halves convention) of q and k by the same fp32-computed cos and sin",
            "q, k [batch, heads, seq, head_dim], cos and sin [seq, head_dim / 2] without gradient, head_dim <= 1024",
            rewrite.rope,
        ),
        FusedKernel(
            "batch_norm_relu",
            "ReLU of BatchNorm2d in training mode, or of its sum with a residual branch",
            "channels-last, at most 4096 channels, momentum given",
            rewrite.batch_norm_relu,
        ),
        FusedKernel("rms_norm", "a module that computes x / rms(x) * weight", "rows of at most 16384"),
        FusedKernel(
            "linear_cross_entropy",
            "last Linear without bias and mean cross-entropy of its output, by `fused_loss`",
            "the model's output is the Linear's",
        ),
    )
}


@match.traces_kept()
def apply(
    model: nn.Module,
    names: Iterable[str] | None = None,
    findings: list[str] | None = None,
    wanted: Callable[[str, str], bool] | None = None,
) -> list[str]:
    """Put fused kernels into the model, in place; return "kernel: module" for each replacement, in module order.

    `names` chooses among `KERNELS` (all by default; "linear_cross_entropy" is done by `fused_loss` and nothing here),
    `wanted(kernel, module FQN)` among the places. `findings` receives why modules were passed over. Raises ValueError
    for an unknown name; anything else that goes wrong in a module leaves that module as it was.
    """
    chosen = list(KERNELS) if names is None else list(names)
    unknown = [name for name in chosen if name not in KERNELS]
    if unknown:
        raise ValueError(f"no fused kernel {', '.join(unknown)}; there are: {', '.join(KERNELS)}")
    notes: list[str] = [] if findings is None else findings
    if any(hasattr(m, "unshard") and hasattr(m, "reshard") for m in model.modules()):
        notes.append("the model is already sharded: apply fused kernels before fully_shard")
        return []
    norms = {m: match.is_rms_norm(m) for m in model.modules() if not hasattr(m, _MARK)}
    done: list[str] = []
    inlined: set[nn.Module] = set()
    for fqn, module in list(model.named_modules()):
        if hasattr(module, _MARK) or module in inlined:
            continue
        where = fqn or type(module).__name__
        if norms.get(module):
            if "rms_norm" in chosen and (wanted is None or wanted("rms_norm", where)):
                rewrite.exchange(module, "rms_norm", steps.rms_norm_forward)
                done.append(f"rms_norm: {where}")
            continue
        if any(True for _ in module.children()):
            here = [name for name in chosen if wanted is None or wanted(name, where)]
            done += [f"{name}: {where}" for name in (_rewrite(module, here, norms, notes, where) if here else ())]
            inlined |= match.inlined(module) if hasattr(module, _MARK) else set()
    return done


def _rewrite(
    module: nn.Module, chosen: list[str], norms: dict[nn.Module, bool], notes: list[str], where: str
) -> list[str]:
    """Apply the chosen rules to one module; the names of those that found something, once for each find."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is nn.Module.forward:
        return []
    try:
        traced = match.trace(module)
        found = []
        for kernel in KERNELS.values():
            if kernel.rule is not None and kernel.name in chosen:
                found += [kernel.name] * kernel.rule(traced, module, norms)
                traced.graph.eliminate_dead_code()
        if found:
            traced = rewrite.finish(traced)
    except match.NotTraceable as reason:
        notes.append(f"{where} is left as it is: {reason}")
        return []
    except Exception as error:  # a rule that fails must not take the model with it
        notes.append(f"{where} is left as it is: the rewrite failed with {type(error).__name__}: {error}")
        return []
    if found:
        rewrite.exchange(module, traced.code, _forward_of(traced))
    return found


def _forward_of(traced: fx.GraphModule) -> Callable[..., Any]:
    forward: Callable[..., Any] = type(traced).forward
    return forward


def restore(model: nn.Module) -> int:
    """Undo `apply` and `fused_loss` on the model, in place; the number of modules restored."""
    count = 0
    for module in model.modules():
        unfused = getattr(type(module), _MARK, None)
        if unfused is not None:
            module.__class__ = unfused
            count += 1
    return count


def _head_forward(self: Any, x: Tensor) -> Tensor:
    """Forward of the last Linear: the loss where targets were left for it, logits elsewhere."""
    targets = self._costlab_targets
    if targets is None:
        logits: Tensor = self._costlab_unfused.forward(self, x)
        return logits
    x, weight = autocast(x, self.weight)
    return linear_cross_entropy(x, weight.to(x.dtype), targets)


def _head_of(model: nn.Module) -> str:
    """Name of the Linear without bias whose output is the model's. Raises NotTraceable if there is none."""
    graph = match.trace(model).graph
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    head = match.called(result, model)
    if head is None or not match.is_linear(head, False) or len(result.users) != 1:
        raise match.NotTraceable("its output is not that of a Linear without bias")
    return str(result.target)


def fused_loss(model: nn.Module, loss: Loss, batch: Any, findings: list[str] | None = None) -> Loss | None:
    """A loss for `loss(model, (inputs, targets))` that never holds all logits, or None with the reason in `findings`.

    It serves models whose output is that of a Linear without bias, and losses that are the mean cross-entropy of that
    output, which is checked: on the first item of `batch`, in evaluation mode, loss and gradient of the Linear must
    agree (to 1e-3, or 2e-2 in 16 bits). The Linear is changed in place; without targets it still returns logits. Call
    it before `fully_shard`.
    """
    notes: list[str] = [] if findings is None else findings
    if any(p.is_meta for p in model.parameters()):
        notes.append("the loss is left as it is: the model is on the meta device, where nothing can be compared")
        return None
    try:
        name = _head_of(model)
        inputs, targets = batch
        head = model.get_submodule(name)
        rewrite.exchange(head, "linear_cross_entropy", _head_forward)
    except (match.NotTraceable, TypeError, ValueError) as reason:
        notes.append(f"the loss is left as it is: {reason}")
        return None

    def fused(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        last = _submodule(model, name)
        object.__setattr__(last, "_costlab_targets", targets)
        try:
            value: Tensor = model(inputs)
        finally:
            object.__delattr__(last, "_costlab_targets")
        return value

    difference = _disagreement(model, head, loss, fused, (inputs[:1], targets[:1]))
    if difference is None:
        return fused
    head.__class__ = getattr(type(head), _MARK)
    notes.append(f"the loss is left as it is: {difference}")
    return None


def _submodule(model: nn.Module, name: str) -> nn.Module:
    """The model's module of that name; in a wrapper such as DDP, that of the model which it holds as `module`."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise
        return _submodule(inner, name)


def _disagreement(model: nn.Module, head: Any, loss: Loss, fused: Loss, batch: Any) -> str | None:
    """Why the fused loss is not the given one, or None if both agree on the batch.

    The gradient is compared too: with small logits, label smoothing hardly shows in the value.
    """
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        values = loss(model, batch), fused(model, batch)
        pairs = [(value, *torch.autograd.grad(value, head.weight)) for value in values]
    except Exception as error:  # the user's loss or model may refuse the batch in any way
        return f"it could not be tried: {type(error).__name__}: {error}"
    finally:
        for module, training in modes:
            module.training = training
    wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    tolerance = 1e-3 if wide and not torch.is_autocast_enabled(head.weight.device.type) else 2e-2
    for expected, value in zip(*pairs, strict=True):
        same = expected.shape == value.shape
        if not same or not (value - expected).float().norm() <= tolerance * expected.float().norm():
            return "it is not the mean cross-entropy of the model's output"
    return None


def guards(name: str) -> str:
    """The run-time guards of a kernel in words."""
    return f"{COMMON_GUARDS}; {KERNELS[name].guards}"


def available(device: torch.device) -> bool:
    """Whether kernels run on this device at all; elsewhere every step takes its unfused path."""
    return usable(torch.empty(0, device=device))

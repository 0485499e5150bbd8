"""FLOPs of a training step by counting a forward pass, module by module."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from costlab.probes.workloads.base import Workload, batch_beside

ALL_TRAIN = "3 x FLOPs of the forward pass as counted by torch.utils.flop_counter"
SOME_TRAIN = (
    "FLOPs of the forward pass as counted by torch.utils.flop_counter, once more for the gradients of inputs from the "
    "first module on that trains, and once more for the gradients of weights that train"
)


class Counted(NamedTuple):
    """FLOPs of one batch, forward and backward, how they came about, and the modules that are not called once."""

    flops: float | None  # None where nothing was counted
    how: str
    calls: dict[str, int]  # by FQN; "" is the model


def count_flops(workload: Workload, device: torch.device) -> Counted:
    """Count one batch of a rank that trains on `device`, where the model need not be yet.

    One forward pass without gradients is run; the model's buffers and the random numbers are put back. What the user's
    model or loss raises is raised.
    """
    model = workload.model
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        buffers = [b.detach().clone() for b in model.buffers()]
        with FlopCounterMode(display=False) as counter, _watched(model, counter) as watch:
            workload.loss(model, batch_beside(workload))
        for buffer, saved in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(saved)  # counting must not move batch-norm statistics
    total = 3.0 * counter.get_total_flops()
    calls = {name: watch.calls[m] for name, m in model.named_modules() if watch.calls[m] != 1}
    if all(p.requires_grad for p in model.parameters()):
        return Counted(total or None, ALL_TRAIN, calls)
    return Counted((total - watch.spared) or None, SOME_TRAIN, calls)


@dataclass
class _Watch:
    """Calls of every module, and what a backward pass of twice the forward pass would have that this one has not.

    A module's own FLOPs are those between its call and its return, without the calls of other modules. Where its
    weights are frozen it computes no gradient of them; before the first module that trains none of its input either.
    """

    counter: FlopCounterMode
    spared: float = 0.0
    calls: Counter[nn.Module] = field(default_factory=Counter)
    training: bool = False  # some module that has returned trains
    open: list[tuple[int, int, bool]] = field(default_factory=list)  # FLOPs at the call, those of its calls, `training`

    def enter(self, module: nn.Module, _args: Any) -> None:
        """A module is called."""
        self.calls[module] += 1
        self.open.append((self.counter.get_total_flops(), 0, self.training))

    def leave(self, module: nn.Module, _args: Any, _out: Any) -> None:
        """A module returns."""
        at_call, inner, trained = self.open.pop()
        whole = self.counter.get_total_flops() - at_call
        weights = [p.requires_grad for p in module.parameters(recurse=False)]
        self.training = self.training or any(weights)
        if not self.training:
            self.spared += 2.0 * (whole - inner)
        elif weights and not any(weights):
            self.spared += (1.0 if trained else 2.0) * (whole - inner)
        if self.open:
            at_outer, sum_outer, outer_trained = self.open[-1]
            self.open[-1] = (at_outer, sum_outer + whole, outer_trained)


@contextlib.contextmanager
def _watched(model: nn.Module, counter: FlopCounterMode) -> Iterator[_Watch]:
    """Watch the calls inside."""
    watch = _Watch(counter)
    hooks = [m.register_forward_pre_hook(watch.enter, prepend=True) for m in model.modules()]
    hooks += [m.register_forward_hook(watch.leave, always_call=True) for m in model.modules()]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()

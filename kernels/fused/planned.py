"""Applies a plan to a model: modules are swapped, the loss is exchanged, and the rest is left to the pattern pass.

from costlab import kernels
applied = kernels.apply(model, "plan.json")      # before torch.compile and before fully_shard
loss = applied.fused_loss(loss, batch) or loss   # where the plan has the loss
...
applied.record.sites                             # what torch.compile has put in, once it has run
applied.undo()

A graph that torch finds in its caches was rewritten when it was compiled: it holds the kernels, and adds no site.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costlab.kernels.fused import plan as plans
from costlab.kernels.fused import registry
from costlab.kernels.fused.patterns.engine import PARAMETER, Frame, Record, Site
from costlab.kernels.fused.patterns.guards import Limits
from costlab.kernels.fused.patterns.inductor import Unsupported, install
from costlab.kernels.fused.patterns.matches import Match
from costlab.kernels.fused.plan import Plan, PlanError, Rewrite, any_index, covers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Applied:
    """A plan in force on a model."""

    model: nn.Module
    plan: Plan
    swapped: list[str] = field(default_factory=list)  # "kernel: module"
    findings: list[str] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    idle: bool = False  # whether the kernels cannot run here, so that nothing was put in
    _remove: Callable[[], None] | None = field(default=None, repr=False)

    def fused_loss(self, loss: registry.Loss, batch: Any) -> registry.Loss | None:
        """The loss without logits, where the plan has it and model and loss allow it; else None with a finding."""
        if self.idle or not any(r.how == "loss" for r in self.plan.kept()):
            return None
        return registry.fused_loss(self.model, loss, batch, self.findings)

    def undo(self) -> None:
        """The model and torch.compile as they were; graphs that are compiled already stay compiled."""
        registry.restore(self.model)
        if self._remove is not None:
            self._remove()
            self._remove = None


def apply(model: nn.Module, plan: Plan | str | Path, *, reference: bool = False) -> Applied:
    """Put the plan's rewrites into force on the model, in place. Raises PlanError for a plan that cannot be used.

    Nothing is put in where the kernels cannot run; the findings say so. `reference` puts the operators' eager
    references in all the same, which is of use only to test a rewrite without a GPU.
    """
    found = plan if isinstance(plan, Plan) else plans.read(plan)
    applied = Applied(model, found)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not (registry.available(device) or reference):
        applied.findings.append(f"Triton kernels are not available on {device.type}: the plan changes nothing here")
        applied.idle = True
        return applied
    here = environment(device)
    if found.key and found.key != plans.environment_key(here):
        differs = [k for k in sorted({*here, *found.environment}) if here.get(k) != found.environment.get(k)]
        applied.findings.append(
            f"the plan was measured elsewhere ({', '.join(differs)} differ): its savings are not this machine's"
        )
    kept = found.kept()
    _swap(applied, [r for r in kept if r.how == "module"])
    patterns = [r for r in kept if r.how == "pattern"]
    if patterns:
        try:
            wanted = Wanted(model, patterns, reference)
            applied._remove = install(wanted, applied.record, plans.encode(found).hex())
        except Unsupported as reason:
            applied.findings.append(str(reason))
    return applied


def _swap(applied: Applied, rewrites: list[Rewrite]) -> None:
    def wanted(kernel: str, fqn: str) -> bool:
        return any(r.kernel == kernel and covers(r.where, fqn) for r in rewrites)

    names = {r.kernel for r in rewrites}
    if names:
        chosen = [name for name in registry.KERNELS if name in names]
        applied.swapped = registry.apply(applied.model, chosen, applied.findings, wanted)
    for rewrite in rewrites:
        if not any(_of(rewrite, entry) for entry in applied.swapped):
            applied.findings.append(f"{rewrite.name} is in the plan and fits nothing in this model")


def _of(rewrite: Rewrite, entry: str) -> bool:
    kernel, _, fqn = entry.partition(": ")
    return kernel == rewrite.kernel and covers(rewrite.where, fqn)


class Wanted:
    """Says for a match of the pattern rules whether the plan has it, and in which limits."""

    def __init__(self, model: nn.Module, rewrites: list[Rewrite], reference: bool = False) -> None:
        self.rewrites, self.reference = rewrites, reference
        self._owners = Owners(model)

    def __call__(self, match: Match, site: Site) -> Limits | str:
        """Limits of the plan's rewrite that names this place, or why it is left alone."""
        places = self._owners.of(site)
        if places is None:
            return "it is not of the model that the plan was applied to"
        for rewrite in self.rewrites:
            if rewrite.kernel == match.kernel and any(covers(rewrite.where, place) for place in places):
                if not rewrite.guards.dynamic and not isinstance(match.rows, int):
                    return "the plan serves known shapes only"
                return limits_of(rewrite, self.reference)
        return "not in the plan"


def limits_of(rewrite: Rewrite, reference: bool = False) -> Limits:
    """A rewrite's guards as limits."""
    guards = rewrite.guards
    kinds = tuple(_DTYPES[name] for name in guards.dtypes)
    more = {"dtypes": kinds} if kinds else {}
    return Limits(guards.rows_min, guards.rows_max, guards.columns_max, reference=reference, **more)


class Owners:
    """Finds the modules of a model that a site may belong to: a compiled block knows only paths relative to itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[tuple[Frame, str], list[str] | None] = {}

    def of(self, site: Site) -> list[str] | None:
        """FQNs with "*" for indices, None if the site's frame is not of this model."""
        model = self._model()
        if model is None:
            return None
        key = (site.frame, site.owner)
        if key not in self._known:
            self._known[key] = _places(model, *key)
        return self._known[key]


def _places(model: nn.Module, frame: Frame, owner: str) -> list[str] | None:
    """Every module that has the frame's modules at their paths may be the frame; a frame without any is the model."""
    if not frame:
        return [any_index(owner)]
    roots = [name for name, root in model.named_modules() if all(_is(root, path, kind) for path, kind in frame)]
    return sorted({any_index(f"{name}.{owner}".strip(".")) for name in roots}) or None


def _is(root: nn.Module, path: str, kind: str) -> bool:
    if kind == PARAMETER:
        return path in root._parameters
    try:
        module = root.get_submodule(path) if path else root
    except AttributeError:
        return False
    return kind in (type(module).__name__, getattr(type(module), registry._MARK, type(module)).__name__)


def environment(device: torch.device) -> dict[str, str]:
    """What a plan's savings depend on: versions and the device's name."""
    try:
        import triton

        found = str(triton.__version__)
    except ImportError:
        found = ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": str(torch.__version__), "triton": found, "cuda": str(torch.version.cuda or ""), "device": name}


__all__ = ["Applied", "Owners", "PlanError", "Wanted", "any_index", "apply", "environment", "limits_of"]

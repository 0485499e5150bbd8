"""Fusion status of every layer, phase and kernel of a joined trace. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from costlab.probes.fusion import fqn
from costlab.probes.fusion.eager import optimizer_verdict
from costlab.probes.fusion.leaves import Leaf
from costlab.probes.fusion.rates import BROKEN_FLOOR, BROKEN_RATE, COMPLETE_RATE, Tally, status, statuses, total
from costlab.probes.records import FusionStatus

Verdict = tuple[FusionStatus, str]  # status, cause
_SEVERITY: dict[FusionStatus, int] = {"unknown": 0, "complete": 1, "partial": 2, "broken": 3}


def worst(found: Iterable[FusionStatus]) -> FusionStatus:
    """The most severe; "unknown" only where nothing else is known."""
    return max(found, key=_SEVERITY.__getitem__, default="unknown")


def levels(layer: str) -> list[str]:
    """The layer and the modules around it, the model itself ("") only for its own operators."""
    return [p for p in fqn.ancestors(layer) if p or not layer]


class Verdicts:
    """Judges one rank's joined trace.

    `judged` is false where no verdict is possible: an unsupported trace, or a run that was never meant to be compiled.
    """

    def __init__(
        self, own: Mapping[str, Mapping[str, Tally]], leaves: Iterable[Leaf], steps: int, *, judged: bool
    ) -> None:
        self._own = own
        self._steps = steps
        self._judged = judged
        self._leaves: dict[str, dict[str, list[Leaf]]] = defaultdict(lambda: defaultdict(list))
        for leaf in leaves:
            if leaf.placed:
                self._leaves[leaf.phase][leaf.layer].append(leaf)
        self._floor = BROKEN_FLOOR * total(t for layers in own.values() for t in layers.values()).actual
        self._floor_us = BROKEN_FLOOR * sum(
            x.us for layers in self._leaves.values() for found in layers.values() for x in found
        )
        self._phases = {phase: self._phase(phase) for phase in {*own, *self._leaves}}

    def layer(self, phase: str, path: str) -> FusionStatus:
        """Verdict on a layer with everything inside it; on "" only what the model itself owns."""
        return self._phases.get(phase, {}).get(path, "unknown")

    def phase(self, phase: str) -> FusionStatus:
        """Verdict on a phase: by its rate, and never complete with a broken layer inside."""
        found = list(self._phases.get(phase, {}).values())
        return self._rolled(total(self._own.get(phase, {}).values()), found)

    def step(self) -> FusionStatus:
        """Verdict on the step."""
        found = [v for verdicts in self._phases.values() for v in verdicts.values()]
        return self._rolled(total(t for layers in self._own.values() for t in layers.values()), found)

    def _rolled(self, tally: Tally, inside: list[FusionStatus]) -> FusionStatus:
        known = [v for v in inside if v != "unknown"]
        if not known:
            return "unknown"
        verdict = status(tally, self._floor)
        if verdict == "complete" and (tally.rate is None or "broken" in known):
            return "partial" if "broken" in known else worst(known)
        return verdict

    def _phase(self, phase: str) -> dict[str, FusionStatus]:
        own = self._own.get(phase, {})
        verdicts: dict[str, FusionStatus] = {}
        for layer in {*own, *self._leaves.get(phase, {})}:
            for path in levels(layer):
                verdicts.setdefault(path, "unknown")
        traced = statuses(own, self._floor)
        inside: dict[str, set[FusionStatus]] = defaultdict(set)
        for path in sorted(verdicts, key=fqn.natural, reverse=True):
            mine = status(own[path], self._floor) if not path and path in own else traced.get(path)
            found = [v for v in (mine, self._outside(phase, path)) if v is not None]
            if mine is None or "broken" in inside[path]:
                found += ["partial" if v == "broken" else v for v in inside[path]]
            verdicts[path] = worst(found)
            above = fqn.parent(path)
            if above:
                inside[above] |= inside[path] | {verdicts[path]}
        return verdicts

    def _outside(self, phase: str, layer: str) -> FusionStatus | None:
        """Verdict on what a layer itself launches outside the kernels that the trace knows; None for nothing."""
        leaves = [x for x in self._leaves.get(phase, {}).get(layer, ()) if x.kernel is None]
        if not leaves or not self._judged or all(x.stray for x in leaves):
            return "unknown" if leaves else None
        found = self.uncompiled(phase, layer)
        return found[0] if found is not None else "complete"

    def uncompiled(self, phase: str, layer: str) -> Verdict | None:
        """(status, cause) of a layer's eager work; None where nothing in it could be fused.

        It takes two operators to fuse: one alone is as good as compiled.
        """
        eager = [x for x in self._leaves.get(phase, {}).get(layer, ()) if x.kernel is None and not x.stray]
        if not eager or not self._judged:
            return None
        if layer == "optimizer":
            return optimizer_verdict({n for x in eager for n in (x.name, *x.operators)})
        fusible = [x for x in eager if x.fusible]
        if sum(x.launches for x in fusible) < 2 * self._steps:
            return None
        heavy = sum(x.us for x in fusible) > self._floor_us
        return ("broken" if heavy else "partial"), "uncompiled"

    def kernel(self, leaf: Leaf) -> Verdict:
        """(status, cause) of one kernel span."""
        if leaf.kernel is None:
            return self._outside_kernel(leaf)
        actual, lost = leaf.kernel.actual, leaf.kernel.addressable_lost
        rate = 1 - lost / actual if actual else None
        wasted = leaf.kind in ("layout_copy", "device_copy") or (rate is not None and rate < BROKEN_RATE)
        if wasted and actual * leaf.calls(self._steps) > self._floor:
            return "broken", leaf.kernel.main_cause
        return ("complete" if rate is None or rate >= COMPLETE_RATE else "partial"), leaf.kernel.main_cause

    def _outside_kernel(self, leaf: Leaf) -> Verdict:
        if leaf.stray or not self._judged:
            return "unknown", ""
        found = self.uncompiled(leaf.phase, leaf.layer)
        if found is not None and (leaf.fusible or leaf.layer == "optimizer"):
            return found
        return "complete", ""


@cache
def path_of(phase: str, layer: str | None = None) -> str:
    """Where a phase or layer span is in the tree."""
    return f"step/{phase}" if layer is None else f"step/{phase}/layer:{layer}"

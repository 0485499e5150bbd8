"""Fusion rate and status per layer, class, phase and step, summed over all invocations of shared graphs. Torch-free.

rate = 1 - addressable lost bytes / actual bytes of fusible kernels; strict rate counts structural losses too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from costlab.probes.fusion import fqn
from costlab.probes.fusion.model import GraphSpan, LayerTraffic
from costlab.probes.records import FusionStatus

COMPLETE_RATE = 0.95
BROKEN_RATE = 0.5
MINOR = 0.01  # share of a layer's traffic below which an addressable cause does not hide a structural one
BROKEN_FLOOR = 0.01  # share of the step's traffic below which a layer is not called broken


@dataclass(slots=True, frozen=True)
class Instance:
    """One module that a graph runs for: `base` is what the graph's relative paths hang on; `calls` per step."""

    graph: GraphSpan
    base: str
    phase: str
    calls: float


@dataclass(slots=True)
class Tally:
    """Traffic per step of a layer or of anything above it, in bytes."""

    read: float = 0.0
    written: float = 0.0
    addressable: float = 0.0
    structural: float = 0.0
    causes: Counter[tuple[bool, str]] = field(default_factory=Counter)  # (addressable, cause) -> bytes
    hard: set[str] = field(default_factory=set)  # causes that break this layer itself
    operators: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        """Add another's traffic; what breaks a layer breaks that layer only and is not added."""
        self.read += other.read
        self.written += other.written
        self.addressable += other.addressable
        self.structural += other.structural
        self.causes.update(other.causes)
        self.operators += other.operators
        return self

    @property
    def actual(self) -> float:
        """Bytes moved by fusible kernels."""
        return self.read + self.written

    @property
    def rate(self) -> float | None:
        """None where nothing is moved that could be fused."""
        return min(max(1 - self.addressable / self.actual, 0.0), 1.0) if self.actual else None

    @property
    def strict_rate(self) -> float | None:
        """As `rate`, with structural losses counted as lost."""
        lost = self.addressable + self.structural
        return min(max(1 - lost / self.actual, 0.0), 1.0) if self.actual else None

    @property
    def main_cause(self) -> str:
        """What breaks the layer, else the cause that loses most; addressable ones of a hundredth or more come first."""
        if self.hard:
            return min(self.hard)
        floor = MINOR * self.actual
        ranked = sorted(self.causes.items(), key=lambda item: (not item[0][0] or item[1] < floor, -item[1], item[0][1]))
        return ranked[0][0][1] if ranked else ""


def add_layer(tally: Tally, traffic: LayerTraffic, calls: float) -> None:
    """Add one graph's traffic of a layer, `calls` times."""
    tally.read += traffic.read * calls
    tally.written += traffic.written * calls
    tally.operators += traffic.ops + traffic.fallback + traffic.extern
    for item in traffic.lost:
        if item.addressable:
            tally.addressable += item.bytes * calls
        else:
            tally.structural += item.bytes * calls
        tally.causes[item.addressable, item.cause] += round(item.bytes * calls)


def per_layer(instances: Iterable[Instance]) -> dict[str, dict[str, Tally]]:
    """phase -> layer FQN -> its own traffic, without what is inside it."""
    phases: dict[str, dict[str, Tally]] = defaultdict(lambda: defaultdict(Tally))
    for instance in instances:
        layers = phases[instance.phase]
        for relative, traffic in instance.graph.layers.items():
            add_layer(layers[fqn.join(instance.base, relative)], traffic, instance.calls)
        for relative, causes in instance.graph.hard.items():
            layers[fqn.join(instance.base, relative)].hard.update(causes)
    return {phase: dict(layers) for phase, layers in phases.items()}


def inclusive(own: Mapping[str, Tally]) -> dict[str, Tally]:
    """Layer FQN -> traffic of the layer and everything inside it, for every ancestor of every layer, "" included."""
    whole: dict[str, Tally] = {}
    for layer, tally in own.items():
        for path in fqn.ancestors(layer):
            whole.setdefault(path, Tally()).__iadd__(tally)
        whole[layer].hard |= tally.hard
    return whole


def by_class(own: Mapping[str, Tally], classes: Mapping[str, str]) -> dict[str, Tally]:
    """Layer class -> own traffic of its layers; classes sum to the step."""
    sums: dict[str, Tally] = {}
    for layer, tally in own.items():
        sums.setdefault(classes.get(layer, "other"), Tally()).__iadd__(tally)
    return sums


def total(tallies: Iterable[Tally]) -> Tally:
    """Sum of several."""
    result = Tally()
    for tally in tallies:
        result += tally
    return result


def status(tally: Tally, floor: float) -> FusionStatus:
    """Verdict on a layer's own traffic and that of everything inside it.

    Broken: it is cut over several graphs, copies between devices, or moves at least twice the bytes it should. That
    verdict needs more traffic than `floor`, a hundredth of the step's. Complete: at least 0.95, or nothing to fuse.
    """
    rate = tally.rate
    if (tally.hard or (rate is not None and rate < BROKEN_RATE)) and tally.actual > floor:
        return "broken"
    return "complete" if rate is None or rate >= COMPLETE_RATE else "partial"


def statuses(own: Mapping[str, Tally], floor: float) -> dict[str, FusionStatus]:
    """Verdict for every layer and every ancestor; one with a broken layer inside is never complete."""
    whole = inclusive(own)
    verdicts = {layer: status(tally, floor) for layer, tally in whole.items()}
    for layer in [layer for layer, verdict in verdicts.items() if verdict == "broken"]:
        for above in fqn.ancestors(layer):
            if verdicts[above] == "complete":
                verdicts[above] = "partial"
    return verdicts


def static_instances(graphs: Iterable[GraphSpan], blocks: Iterable[str]) -> list[Instance]:
    """Instances of every live graph when no launch tells: one call for each block that the graph serves."""
    live = [g for g in graphs if not g.superseded]
    names = sorted(set(blocks), key=fqn.natural)
    found = []
    for graph in live:
        rivals = {g.root for g in live if g.phase == graph.phase and fqn.pattern(g.root) == fqn.pattern(graph.root)}
        for base in bases(graph.root, names):
            if serving_root(base, rivals) == graph.root:
                found.append(Instance(graph, base, "forward" if graph.phase == "inference" else graph.phase, 1.0))
    return found


def bases(root: str, blocks: Iterable[str]) -> list[str]:
    """The blocks that a graph compiled for `root` may serve: those alike, if `root` is one of them."""
    alike = [b for b in blocks if fqn.pattern(b) == fqn.pattern(root)]
    return alike if root in alike else [root]


def serving_root(base: str, roots: Iterable[str]) -> str:
    """Which of several compiles of a block's code serves `base`: the last one that came before it."""
    ordered = sorted(roots, key=fqn.natural)
    before = [r for r in ordered if fqn.natural(r) <= fqn.natural(base)]
    return before[-1] if before else ordered[0]

"""Kernel spans in the making: launches summed into what they are launches of, and how often each graph ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from costlab.probes.fusion import fqn
from costlab.probes.fusion.eager import place
from costlab.probes.fusion.matching import Match, is_generated
from costlab.probes.fusion.model import GraphSpan, KernelSpan
from costlab.probes.fusion.rates import Instance, static_instances

PHASES = ("forward", "backward", "optimizer", "other")


@dataclass(slots=True)
class Leaf:
    """One kernel span: a scheduled kernel of a graph for one module, or an operator outside any graph."""

    phase: str
    layer: str
    name: str
    kind: str
    kernel: KernelSpan | None = None
    identity: str = ""  # tells leaves of one layer apart
    compile_id: str = ""
    placed: bool = True  # whether its layer is known
    stray: bool = False  # launched by a compiled graph, but of no kernel that the trace knows
    fusible: bool = False  # eager work that a compiler would fuse
    us: float = 0.0  # all profiled steps
    launches: int = 0
    scheduled: float = 0.0  # calls per step of its graph
    operators: set[str] = field(default_factory=set)

    def calls(self, steps: int) -> float:
        """How often it runs per step: as its graph does, else as measured."""
        return self.scheduled or self.launches / steps


LeafKey = tuple[str, str, str]


def collect(
    graphs: Sequence[GraphSpan], matches: Iterable[Match], instances: Iterable[Instance]
) -> dict[LeafKey, Leaf]:
    """(phase, layer, identity) -> leaf, of all launches and of scheduled kernels that were not launched."""
    leaves: dict[LeafKey, Leaf] = {}
    for match in matches:
        fresh = leaf_of(graphs, match)
        leaf = leaves.setdefault((fresh.phase, fresh.layer, fresh.identity), fresh)
        leaf.us += match.launch.dur
        leaf.launches += not match.alias
        leaf.operators.update(o for o in (match.launch.op,) if o)
        if leaf.kind == "extern" and not leaf.us - match.launch.dur:
            leaf.name = match.name  # the library's kernel; the schedule only knows the call
    position = {id(g): i for i, g in enumerate(graphs)}
    for instance in instances:
        for k, kernel in enumerate(instance.graph.kernels):
            if kernel.kind == "nop":
                continue
            fresh = _scheduled(graphs, position[id(instance.graph)], k, instance.phase, instance.base)
            leaf = leaves.setdefault((fresh.phase, fresh.layer, fresh.identity), fresh)
            leaf.scheduled += instance.calls
    return leaves


def leaf_of(graphs: Sequence[GraphSpan], match: Match) -> Leaf:
    """An empty leaf for what a launch belongs to."""
    phase = match.phase if match.phase in PHASES else "other"
    if match.graph is not None and match.kernel is not None:
        return _scheduled(graphs, match.graph, match.kernel, phase, match.base)
    launch = match.launch
    if match.graph is not None or launch.compiled:
        layer = match.base or launch.frame or launch.layer
        kind = "collective" if launch.category == "communication" else _generated_kind(match)
        placed = match.graph is not None or bool(layer) or kind == "collective"
        return Leaf(phase, layer, match.name, kind, identity=f"stray:{match.name}", placed=placed, stray=True)
    where = place(launch)
    identity = f"eager:{where.kind}:{match.name}"
    return Leaf(phase, where.layer, match.name, where.kind, identity=identity, fusible=where.fusible)


def _scheduled(graphs: Sequence[GraphSpan], graph: int, index: int, phase: str, base: str) -> Leaf:
    kernel = graphs[graph].kernels[index]
    name = kernel.name or (kernel.ops[0] if kernel.ops else kernel.kind)
    compile_id = graphs[graph].compile_id
    identity = f"{compile_id}:{graph}:{index}:{name}"
    layer = fqn.join(base, kernel.layer)
    return Leaf(phase, layer, name, kernel.kind, kernel=kernel, identity=identity, compile_id=compile_id)


def _generated_kind(match: Match) -> str:
    """Kind of a launch that no span names, as far as its name tells."""
    if not is_generated(match.name):
        return "extern"
    prefix = match.name.split("_")[1:2]
    return {"poi": "pointwise", "red": "reduction", "per": "reduction", "tem": "template", "for": "foreach"}.get(
        prefix[0] if prefix else "", "pointwise"
    )


def instances_of(
    graphs: Sequence[GraphSpan], matches: Sequence[Match], steps: int, blocks: Iterable[str]
) -> list[Instance]:
    """How often each graph ran for each module per step: as measured, and as compiled where nothing was measured.

    A graph none of whose kernels was seen counts once per block it serves, unless another compile of the same code
    was seen, which then ran instead.
    """
    counts: dict[tuple[int, str, str], Counter[int]] = defaultdict(Counter)
    for match in matches:
        if match.graph is not None and match.kernel is not None and not match.alias:
            phase = match.phase if match.phase in PHASES else "other"
            counts[match.graph, match.base, phase][match.kernel] += 1
    found = [
        Instance(graphs[g], base, phase, _runs(graphs[g], kernels) / steps)
        for (g, base, phase), kernels in counts.items()
    ]
    seen = {(fqn.pattern(graphs[g].root), graphs[g].phase) for g, _, _ in counts}
    unseen = [g for g in graphs if (fqn.pattern(g.root), g.phase) not in seen]
    return found + static_instances(unseen, blocks)


def _runs(graph: GraphSpan, kernels: Counter[int]) -> float:
    """Runs of a graph from launches of its kernels; a library call may launch several kernels, a loop launches one."""
    loops = [n for k, n in kernels.items() if graph.kernels[k].kind in ("pointwise", "reduction", "layout_copy")]
    return float(median(loops)) if loops else float(min(kernels.values()))

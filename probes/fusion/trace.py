"""Judges the recorded graphs: `GraphFacts` in, `FusionTrace` out. Torch-free, runs after the compile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from costlab.probes.fusion import fqn
from costlab.probes.fusion.antipatterns import detect, from_breaks, from_recompiles
from costlab.probes.fusion.facts import FxNode, GraphFacts, SchedKernel
from costlab.probes.fusion.launches import LaunchGroup, launch_groups
from costlab.probes.fusion.ledger import main_cause
from costlab.probes.fusion.model import FusionTrace, GraphBreak, GraphSpan, KernelSpan, LayerTraffic, Lost
from costlab.probes.fusion.ownership import resolve_layers
from costlab.probes.fusion.structure import BARRIERS, PARTICIPANTS
from costlab.probes.fusion.traffic import TrafficModel


def build(graphs: Sequence[GraphFacts], breaks: Sequence[GraphBreak], errors: Counter[str]) -> FusionTrace:
    """The trace of all graphs. A graph that cannot be judged is left out and counted in `errors`."""
    trace = FusionTrace(supported=True, breaks=list(breaks))
    for facts in graphs:
        try:
            resolve_layers(facts)
            model = TrafficModel(facts).run()
            span = graph_span(facts, model)
            found = detect(facts, model)
        except Exception as error:  # one odd graph must not cost the others
            errors[f"analyse: {type(error).__name__}: {error}"[:200]] += 1
            continue
        trace.graphs.append(span)
        trace.antipatterns += found
        trace.module_types.update(_module_types(facts))
    mark_superseded(trace.graphs)
    mark_breaks(trace.graphs, trace.breaks)
    trace.antipatterns += from_breaks(trace.breaks, trace.graphs) + from_recompiles(trace.graphs)
    return trace


def graph_span(facts: GraphFacts, model: TrafficModel) -> GraphSpan:
    """One graph with its kernels, its layers' traffic and what breaks them."""
    return GraphSpan(
        compile_id=facts.compile_id,
        phase=facts.phase,
        root=facts.root,
        root_class=facts.root_class,
        kernels=[_kernel_span(facts, model, g) for g in launch_groups(facts)],
        layers=_layers(facts, model),
        nodes_before=facts.nodes_before,
        nodes_after=facts.nodes_after,
        hook_seconds=facts.hook_seconds,
        hard=model.ledger.hard_causes(),
        resumed_at=facts.resumed_at,
    )


def _kernel_span(facts: GraphFacts, model: TrafficModel, group: LaunchGroup) -> KernelSpan:
    kernels = [facts.kernels[k] for k in group.kernels]
    members = sorted((n for k in group.kernels for n in model.structure.members(k)), key=lambda n: -n.nbytes)
    weights: Counter[str] = Counter()
    for node in members:
        weights[node.layer] += max(1, node.nbytes)
    charges = [model.ledger.kernels[k] for k in group.kernels if k in model.ledger.kernels]
    causes: Counter[str] = Counter()
    for charge in charges:
        causes.update(charge.causes)
    return KernelSpan(
        name=group.names[0] if group.names else "",
        kind=_kind([model.kinds[k] for k in group.kernels]),
        layer=weights.most_common(1)[0][0] if weights else _inherited_layer(facts, model, kernels[0]),
        layers=sorted(weights),
        ops=list(dict.fromkeys(n.target for n in members)),
        source=next((n.source for n in members if n.source), ""),
        bytes_read=sum(k.bytes_read for k in kernels),
        bytes_written=sum(k.bytes_written for k in kernels),
        flops=sum(n.flops for n in members),
        device=kernels[0].device,
        aliases=group.names[1:],
        actual=sum(c.actual for c in charges),
        addressable_lost=sum(c.addressable for c in charges),
        structural_lost=sum(c.structural for c in charges),
        main_cause=main_cause(causes),
    )


def _kind(kinds: Sequence[str]) -> str:
    """Kind of several loop nests in one function: a copy only if all are, a reduction if one is."""
    if len(set(kinds)) == 1:
        return kinds[0]
    return next((k for k in ("template", "foreach", "reduction", "pointwise") if k in kinds), kinds[0])


def _inherited_layer(facts: GraphFacts, model: TrafficModel, kernel: SchedKernel) -> str:
    """Layer of a kernel that owns no operator: of the charged copy, else of the operators it inherited."""
    if kernel.index in model.copy_layers:
        return model.copy_layers[kernel.index]
    origins = [facts.nodes[o] for op in kernel.ops for o in facts.ops[op].origins if o in facts.nodes]
    layers = Counter(n.layer for n in origins if n.op == "call_function")
    return layers.most_common(1)[0][0] if layers else ""


def _layers(facts: GraphFacts, model: TrafficModel) -> dict[str, LayerTraffic]:
    layers: dict[str, LayerTraffic] = {}
    for node in facts.nodes.values():
        klass = model.klass[node.name]
        if klass not in (*PARTICIPANTS, *BARRIERS):
            continue
        layer = layers.setdefault(node.layer, LayerTraffic(node.layer))
        layer.module_class = layer.module_class or _class_at(node)
        layer.ops += klass == "fusible"
        layer.fallback += klass == "fallback"
        layer.extern += klass in BARRIERS
    for name, charge in model.ledger.layers.items():
        layer = layers.setdefault(name, LayerTraffic(name))
        layer.read, layer.written, layer.actual = charge.read, charge.written, charge.actual
    lost: dict[str, list[Lost]] = defaultdict(list)
    for item in model.ledger.lost:
        lost[item.layer].append(item)
    for name, items in lost.items():
        layers[name].lost = _merged(items)
    for node in _crossing(facts, model):
        layers[node.layer].crossing += node.nbytes
    return layers


def _class_at(node: FxNode) -> str:
    return node.module_class if node.module not in ("", "?") else ""


def _merged(items: Iterable[Lost]) -> list[Lost]:
    """Losses of the same pair together: a read and the write it causes are one finding."""
    merged: dict[tuple[str, ...], Lost] = {}
    for item in items:
        key = (
            item.cause,
            str(item.addressable),
            item.producer,
            item.consumer,
            item.producer_source,
            item.consumer_source,
        )
        known = merged.get(key)
        if known is None:
            merged[key] = replace(item)
        else:
            known.bytes += item.bytes
            known.producer_kernel = known.producer_kernel or item.producer_kernel
            known.consumer_kernel = known.consumer_kernel or item.consumer_kernel
    return sorted(merged.values(), key=lambda x: -x.bytes)


def _crossing(facts: GraphFacts, model: TrafficModel) -> list[FxNode]:
    """Fusible results that the user's code receives."""
    if facts.phase == "backward":
        return []
    names = dict.fromkeys(model.structure.own.base(o) for o in facts.user_outputs)
    return [facts.nodes[n] for n in names if n in facts.nodes and model.klass[n] in PARTICIPANTS]


def _module_types(facts: GraphFacts) -> dict[str, str]:
    types = {fqn.join(facts.root, n.layer): n.module_class for n in facts.nodes.values() if _class_at(n)}
    if facts.root_class:
        types[facts.root] = facts.root_class
    return types


def frame_of(graph: GraphSpan) -> str:
    """The compiled frame of a graph, the same for all its recompiles."""
    return graph.compile_id.rpartition("/")[0]


def mark_superseded(graphs: Sequence[GraphSpan]) -> None:
    """Keep the newest compile of each (frame, root, phase); the older ones ran for other shapes or guards."""
    newest: dict[tuple[str, str, str], str] = {}
    for graph in graphs:
        newest[frame_of(graph), graph.root, graph.phase] = graph.compile_id
    for graph in graphs:
        latest = newest[frame_of(graph), graph.root, graph.phase]
        graph.superseded = bool(graph.compile_id) and graph.compile_id != latest


def mark_breaks(graphs: Sequence[GraphSpan], breaks: Sequence[GraphBreak]) -> None:
    """Charge what crosses a graph break inside one module's frame, and say where the frame was cut.

    A module's frame is cut when a graph continues it after a break and another graph of the same phase came before.
    What the earlier piece hands over was written and is read again: twice its bytes, charged to the layer that made it.
    """
    for phase in ("forward", "inference"):
        by_root: dict[str, list[GraphSpan]] = defaultdict(list)
        for graph in graphs:
            if graph.phase == phase and not graph.superseded:
                by_root[graph.root].append(graph)
        for root, pieces in by_root.items():
            places = [g.resumed_at for g in pieces if g.resumed_at]
            if len(pieces) > 1 and places:
                for piece in pieces[:-1]:
                    _cut(piece, _reason(places, breaks, root))
                for piece in pieces:
                    piece.hard.setdefault("", []).append("graph_break")
    _cut_backward(graphs)


def _cut_backward(graphs: Sequence[GraphSpan]) -> None:
    """A frame cut in forward is cut in backward too."""
    cut = {g.root for g in graphs if g.phase == "forward" and "graph_break" in g.hard.get("", ())}
    for root in cut:
        pieces = [g for g in graphs if g.phase == "backward" and g.root == root and not g.superseded]
        if len(pieces) > 1:
            for piece in pieces:
                piece.hard.setdefault("", []).append("graph_break")


def _reason(places: Sequence[str], breaks: Sequence[GraphBreak], root: str) -> tuple[str, str]:
    """(reason, file.py:line) of the break that cut a frame at one of `places`."""
    for item in breaks:
        if not item.skipped and any(p in item.frames for p in places):
            item.layer = item.layer or root
            return item.reason, item.source
    return "the frame was cut here", places[0]


def _cut(piece: GraphSpan, why: tuple[str, str]) -> None:
    reason, source = why
    for layer in piece.layers.values():
        nbytes = 2 * layer.crossing
        if not nbytes:
            continue
        layer.lost.append(
            Lost(
                layer=layer.layer,
                cause="graph_break",
                addressable=True,
                bytes=nbytes,
                reason=reason.strip().splitlines()[0],
                culprit_source=source,
            )
        )

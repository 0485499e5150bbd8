"""Code in the user's model that costs fusion: found in its graphs, their kernels and its graph breaks. Torch-free.

What the compiler fuses away costs nothing and is not reported: `bytes` is modelled traffic that the mend removes, per
call of the graph; it is 0 where the cost is not traffic (a recompile, many small launches).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costlab.probes.fusion import fqn
from costlab.probes.fusion.facts import FxNode, GraphFacts
from costlab.probes.fusion.model import AntiPattern, GraphBreak, GraphSpan
from costlab.probes.fusion.traffic import TrafficModel
from costlab.probes.sources import OWN_BUCKETS, OWN_HOOKS

LOOP_LENGTH = 8  # equal operators on as many inputs from one line count as a loop over parameters


@dataclass(frozen=True, slots=True)
class Kind:
    """An anti-pattern in words."""

    text: str
    mend: str


KINDS: dict[str, Kind] = {
    "cross_device": Kind(
        "an operand on another device is copied inside the compiled region",
        "move it once, outside the step; create it on the model's device",
    ),
    "hidden_copy": Kind(
        "a tensor is copied only to change its layout",
        "produce the layout the consumer needs, or drop .contiguous() and .reshape() after a transpose",
    ),
    "non_contiguous": Kind(
        "the same data is read in two orders, so producer and consumer cannot share a loop",
        "keep one memory order through the layer: drop the flip, transpose or strided slice",
    ),
    "library_rng": Kind(
        "random numbers are drawn by the library, which cuts the fused region",
        "leave torch._inductor.config.fallback_random off",
    ),
    "mutation": Kind(
        "a tensor is written in place, which orders the kernels around it",
        "compute out of place and assign once at the end of the layer",
    ),
    "dtype_ping_pong": Kind(
        "a tensor is converted between element types in a kernel of its own",
        "stay in one dtype between matrix products",
    ),
    "opaque_op": Kind(
        "a custom operator hides its arithmetic, and tensors go to memory and back around it",
        "write it in PyTorch, or as a Triton kernel registered with torch.library.triton_op",
    ),
    "op_without_fake": Kind(
        "a custom operator has no fake (meta) implementation, so the graph breaks there",
        "register one with torch.library.register_fake",
    ),
    "item": Kind(
        "a tensor's value is read on the host (.item(), .tolist(), float())",
        "keep the value on the device, or move the read out of the layer",
    ),
    "data_dependent": Kind(
        "control flow depends on a tensor's value",
        "use torch.where or torch.cond, or decide outside the compiled region",
    ),
    "print": Kind("printing or logging inside the compiled region", "remove it, or print outside the step"),
    "sharding_hook": Kind(
        "the model is sharded inside what is compiled, and the hooks between its layers cut the graph",
        "compile the layers before sharding them (--compile block)",
    ),
    "bucket_cut": Kind(
        "DDP cuts the graph at its buckets, so that reducing one overlaps the backward of the next",
        "intended; blocks that are compiled one by one (--compile block) are not cut",
    ),
    "graph_break": Kind("the compiler cannot trace this line", "replace the call, or move it out of the layer"),
    "per_parameter_loop": Kind(
        "one small kernel runs per tensor of a list", "use torch._foreach_* functions or a fused optimizer"
    ),
    "recompile": Kind(
        "a shape or a guard changed and the code was compiled again",
        "pad or bucket the sizes, or mark the dimension dynamic",
    ),
}
_BY_CAUSE = {
    "device_copy": "cross_device",
    "device_mismatch": "cross_device",
    "layout_copy": "hidden_copy",
    "layout_mismatch": "non_contiguous",
    "rng_fallback": "library_rng",
    "mutation": "mutation",
    "dtype_copy": "dtype_ping_pong",
    "opaque_op": "opaque_op",
}
_BY_REASON: tuple[tuple[str, str], ...] = (
    (OWN_HOOKS, "sharding_hook"),
    (OWN_BUCKETS, "bucket_cut"),
    (r"fake (impl|kernel|tensor)|meta kernel|register_fake|operator does not support", "op_without_fake"),
    (r"\.item\(\)|Tensor\.item|\.tolist|_local_scalar_dense|capture_scalar_outputs", "item"),
    (r"data.dependent|branching|generic_jump|dynamic shape operator", "data_dependent"),
    (r"\bprint\b|logging|reorderable", "print"),
)


def detect(facts: GraphFacts, model: TrafficModel) -> list[AntiPattern]:
    """Anti-patterns of one graph, largest first."""
    found: list[AntiPattern] = []
    for item in model.ledger.lost:
        kind = _BY_CAUSE.get(item.cause)
        if kind is None or not item.addressable:
            continue
        source = item.culprit_source or item.consumer_source or item.producer_source
        operators = item.culprit or item.consumer or item.producer
        layer = fqn.join(facts.root, item.layer)
        found.append(_pattern(kind, layer, source, item.bytes, facts.phase, operators, item.reason))
    found += _lone_write_backs(facts, model)
    found += _parameter_loops(facts, model)
    return merge(found)


def _pattern(
    kind: str, layer: str, source: str, nbytes: int = 0, phase: str = "", ops: str = "", detail: str = ""
) -> AntiPattern:
    words = KINDS[kind]
    text = f"{words.text}: {detail}" if detail else words.text
    return AntiPattern(kind, layer, source, text, words.mend, nbytes, "forward" if phase == "inference" else phase, ops)


def merge(found: Iterable[AntiPattern]) -> list[AntiPattern]:
    """One entry per kind, layer, line and phase; bytes and counts added, the text of the largest kept."""
    groups: dict[tuple[str, str, str, str], list[AntiPattern]] = defaultdict(list)
    for item in found:
        groups[item.kind, item.layer, item.source, item.phase].append(item)
    merged = []
    for items in groups.values():
        first = max(items, key=lambda x: x.bytes)
        first.bytes = sum(x.bytes for x in items)
        first.count = sum(x.count for x in items)
        merged.append(first)
    return sorted(merged, key=lambda x: (-x.bytes, x.kind, x.layer, x.source))


def _lone_write_backs(facts: GraphFacts, model: TrafficModel) -> list[AntiPattern]:
    """In-place writes to a graph input that became a kernel of their own; fused into their producer they are free."""
    found = []
    for kernel in facts.kernels:
        members = model.structure.members(kernel.index)
        if members and all(n.packet == "copy_" for n in members):
            charge = model.ledger.kernels.get(kernel.index)
            nbytes = charge.actual if charge else 0
            first = members[0]
            source = first.source or _producer_source(facts, first)
            layer = fqn.join(facts.root, first.layer)
            found.append(
                _pattern("mutation", layer, source, nbytes, facts.phase, first.target, "copies into its input")
            )
    return found


def _producer_source(facts: GraphFacts, node: FxNode) -> str:
    return next((facts.nodes[i].source for i in reversed(node.inputs) if facts.nodes[i].source), "")


def _parameter_loops(facts: GraphFacts, model: TrafficModel) -> list[AntiPattern]:
    """The same operator, from one line, on many different graph inputs, in as many kernels."""
    groups: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for node in facts.nodes.values():
        kernel = model.structure.own.kernel(node.name)
        if model.klass[node.name] != "fusible" or kernel is None or not node.source:
            continue
        for name in node.inputs[:1]:
            base = model.structure.own.base(name)
            if facts.nodes[base].op == "placeholder":
                groups[node.target, node.layer, node.source][base] = kernel
    return [
        _loop(facts, key, inputs)
        for key, inputs in groups.items()
        if len(inputs) >= LOOP_LENGTH and len(set(inputs.values())) >= LOOP_LENGTH
    ]


def _loop(facts: GraphFacts, key: tuple[str, str, str], inputs: dict[str, int]) -> AntiPattern:
    target, layer, source = key
    kernels = len(set(inputs.values()))
    detail = f"{target} on {len(inputs)} tensors in {kernels} kernels"
    item = _pattern("per_parameter_loop", fqn.join(facts.root, layer), source, 0, facts.phase, target, detail)
    item.count = kernels
    return item


def break_kind(reason: str) -> str:
    """Which anti-pattern a graph break is, by the tracer's words."""
    return next((kind for pattern, kind in _BY_REASON if re.search(pattern, reason, re.IGNORECASE)), "graph_break")


def from_breaks(breaks: Sequence[GraphBreak], graphs: Sequence[GraphSpan]) -> list[AntiPattern]:
    """Graph breaks as anti-patterns, with twice the bytes that cross them."""
    crossing: dict[str, int] = defaultdict(int)
    for graph in graphs:
        for layer in graph.layers.values():
            for item in layer.lost:
                if item.cause == "graph_break":
                    crossing[item.culprit_source] += item.bytes
    found = []
    for broken in breaks:
        words = broken.reason.strip().splitlines()
        nbytes = crossing.get(broken.source, 0)
        kind = break_kind(broken.reason)
        found.append(_pattern(kind, broken.layer, broken.source, nbytes, "forward", "", words[0] if words else ""))
        found[-1].count = broken.count
    return merge(found)


def from_recompiles(graphs: Sequence[GraphSpan]) -> list[AntiPattern]:
    """Code that was compiled more than once for the same module."""
    compiles: dict[str, set[str]] = defaultdict(set)
    for graph in graphs:
        if graph.phase != "backward" and any(g.superseded for g in graphs if g.root == graph.root):
            compiles[graph.root].add(graph.compile_id)
    found = []
    for root, ids in compiles.items():
        if len(ids) > 1:
            item = _pattern("recompile", root, "", 0, "forward", "", f"compiled {len(ids)} times")
            item.count = len(ids) - 1
            found.append(item)
    return found

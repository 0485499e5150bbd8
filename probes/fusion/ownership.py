"""Who does what in one graph: the operation that computes each FX node, its class, and its layer. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import PurePath

from costlab.probes.fusion import fqn
from costlab.probes.fusion.facts import FxNode, GraphFacts, SchedOp

HEAVY = frozenset({"mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_grouped_mm", "convolution"})
_HEAVY_PARTS = ("conv", "attention", "_mm", "mkldnn", "linear", "rnn", "lstm", "gru_")
GENERATORS = frozenset(
    {"full", "empty", "iota", "arange", "scalar_tensor", "zeros", "ones", "empty_strided", "full_like", "new_zeros"}
    | {"inductor_seed", "inductor_seeds"}
)
COPIES = frozenset({"clone", "contiguous", "cat"})
CASTS = frozenset({"convert_element_type", "_to_copy"})
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/torch/")


def is_heavy(node: FxNode) -> bool:
    """A matrix product, convolution, attention or recurrent layer: work that no loop fuses across."""
    return node.packet in HEAVY or any(part in node.packet for part in _HEAVY_PARTS) or node.flops > 0


def is_random(node: FxNode) -> bool:
    """Draws random numbers."""
    return any(word in node.packet for word in ("rand", "seed", "dropout", "bernoulli", "multinomial", "exponential"))


@lru_cache(maxsize=65536)
def source_line(stack: str) -> str:
    """`file.py:line` of the innermost line that is not torch's own, "" without a stack."""
    frames = _FRAME.findall(stack)
    if not frames:
        return ""
    users = [f for f in frames if not _LIBRARY.search(f[0])]
    path, line = (users or frames)[-1]
    return f"{PurePath(path).name}:{line}"


def resolve_layers(facts: GraphFacts) -> None:
    """Set `layer` and `source` of every node.

    Nodes that autograd and decompositions add carry no module: they take the layer of what reads them, else of what
    they read. Graph inputs belong to no layer.
    """
    unknown = []
    for node in facts.nodes.values():
        node.source = source_line(node.stack)
        node.layer = "" if node.module == "?" else fqn.from_source(node.module)
        if node.module == "?" and node.op == "call_function":
            unknown.append(node)
    if not unknown:
        return
    users: dict[str, list[str]] = {}
    for node in facts.nodes.values():
        for name in node.inputs:
            users.setdefault(name, []).append(node.name)
    pending = {n.name for n in unknown}
    for node in (*reversed(unknown), *unknown):
        if node.name in pending:
            near = _known(users.get(node.name, ()), facts, pending) or _known(node.inputs, facts, pending)
            if near is not None:
                node.layer, node.source = near.layer, node.source or near.source
                pending.discard(node.name)


def _known(names: Iterable[str], facts: GraphFacts, pending: set[str]) -> FxNode | None:
    for name in names:
        node = facts.nodes.get(name)
        if node is not None and node.op == "call_function" and name not in pending:
            return node
    return None


class Ownership:
    """Owner operation, class and base tensor of every FX node of a graph.

    Classes: fusible (a loop computes it), fallback (the library computes it, one operation of many), extern (matrix
    product, convolution, attention, user Triton kernel), collective, view, generator, folded (computed nowhere).
    """

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.nodes = facts.nodes
        self.owner = self._owners()
        self.klass: dict[str, str] = {}
        for node in self.nodes.values():
            self.klass[node.name] = self._classify(node) if node.op == "call_function" else "input"
        for node in self.nodes.values():
            for name in node.writes if self.klass[node.name] in ("extern", "fallback") else ():
                self.klass[name] = self.klass[node.name]
                if node.name in self.owner:
                    self.owner[name] = self.owner[node.name]

    def _owners(self) -> dict[str, SchedOp]:
        """Origins are inherited downstream: library calls own their exact node, loops what is first seen in them."""
        owner: dict[str, SchedOp] = {}
        loops = []
        for op in self.facts.ops.values():
            if op.role in ("extern", "template"):
                exact = (op.origin,) if op.origin else tuple(o for o in op.origins if not self._is_view(o))[:1]
                for name in exact:
                    owner.setdefault(name, op)
            elif op.role == "loop":
                loops.append(op)
        for op in loops:
            for name in op.origins:
                node = self.nodes.get(name)
                if node is None or (not op.reads and node.packet not in GENERATORS and not is_random(node)):
                    continue  # a fill inherits the operators around it and computes none of them
                owner.setdefault(name, op)
        return owner

    def _is_view(self, name: str) -> bool:
        node = self.nodes.get(name)
        return node is None or node.view

    def _classify(self, node: FxNode) -> str:
        if node.namespace == "collective":
            return "collective"
        if self.tuple_item(node):
            return self.klass.get(node.inputs[0], "folded")
        if node.view:
            return "view"
        if node.packet in GENERATORS:
            return "generator"
        op = self.owner.get(node.name)
        if op is None:
            return "folded"
        kind = self.facts.kernels[op.kernel].kind
        if kind in ("collective", "wait"):
            return "collective"
        if kind == "device_copy":
            return "fallback"
        if kind == "user_triton" or op.role == "template":
            return "extern"
        if kind in ("extern", "nop"):
            return "extern" if is_heavy(node) else "fallback"
        return "fusible"

    def tuple_item(self, node: FxNode) -> bool:
        """Whether the node picks one result of an operator with several (and not a slice of a split tensor)."""
        if node.packet != "getitem" or not node.inputs:
            return False
        producer = self.nodes.get(node.inputs[0])
        return producer is not None and producer.op == "call_function" and not producer.view and not producer.dtype

    def base(self, name: str) -> str:
        """The node whose memory `name` is a view of."""
        node = self.nodes.get(name)
        while node is not None and node.op == "call_function" and node.view and node.inputs:
            if self.tuple_item(node):
                return node.name
            node = self.nodes.get(node.inputs[0])
        return node.name if node is not None else name

    def operation(self, name: str) -> SchedOp | None:
        """The operation that computes a node, also for one result of several."""
        found = self.owner.get(name)
        node = self.nodes.get(name)
        if found is None and node is not None and self.tuple_item(node):
            return self.owner.get(node.inputs[0])
        return found

    def kernel(self, name: str) -> int | None:
        """Index of the kernel that computes a node."""
        op = self.operation(name)
        return None if op is None else op.kernel

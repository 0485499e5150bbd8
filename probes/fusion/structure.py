"""What lies between the nodes of a graph, who consumes what, and which kernels load it. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from costlab.probes.fusion.facts import FxNode, GraphFacts
from costlab.probes.fusion.ownership import CASTS, COPIES, Ownership

PARTICIPANTS = ("fusible", "fallback")  # work that counts as traffic
BARRIERS = ("extern", "collective")  # work that no loop fuses across
LOOPS = ("pointwise", "reduction", "foreach", "layout_copy")


@dataclass(slots=True)
class Read:
    """A kernel that loads a tensor for `consumer`; `parts` are the bytes by how they are indexed."""

    kernel: int
    consumer: FxNode
    nbytes: int
    parts: dict[int, int]


class Between:
    """Matrix products, convolutions, attention and collectives above and below every node, as bit sets."""

    def __init__(self, nodes: dict[str, FxNode], klass: dict[str, str]) -> None:
        self._bits = {n: 1 << i for i, n in enumerate(x for x in nodes if klass[x] in BARRIERS)}
        self._above: dict[str, int] = {}
        self._below: dict[str, int] = dict.fromkeys(nodes, 0)
        sources = self._sources(nodes)
        for name in nodes:
            mask = 0
            for i in sources[name]:
                mask |= self._above.get(i, 0) | self._bits.get(i, 0)
            self._above[name] = mask
        for name in reversed(nodes):
            passed = self._below[name] | self._bits.get(name, 0)
            for i in sources[name]:
                if i in self._below:
                    self._below[i] |= passed

    @staticmethod
    def _sources(nodes: dict[str, FxNode]) -> dict[str, tuple[str, ...]]:
        """Inputs of every node, with the operator that filled a buffer for the buffer's later readers."""
        filled: dict[str, str] = {}
        sources = {}
        for name, node in nodes.items():
            sources[name] = (*node.inputs, *(filled[i] for i in node.inputs if i in filled))
            filled.update(dict.fromkeys(node.writes, name))
            if node.view and node.inputs and node.inputs[0] in filled:
                filled[name] = filled[node.inputs[0]]
        return sources

    def barriers(self, first: str, second: str) -> list[str]:
        """Barriers on a path from the first node to the second."""
        mask = self._below.get(first, 0) & self._above.get(second, 0)
        return [n for n, bit in self._bits.items() if bit & mask] if mask else []

    def separated(self, first: str, second: str) -> bool:
        """Whether a barrier lies between the two, in either direction."""
        below, above = self._below, self._above
        return bool(below.get(first, 0) & above.get(second, 0) or below.get(second, 0) & above.get(first, 0))


class Structure:
    """One graph: who owns, consumes, stores and loads which tensor."""

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.nodes = facts.nodes
        self.own = Ownership(facts)
        self.klass = self.own.klass
        self.between = Between(self.nodes, self.klass)
        self._members = self._kernel_members()
        self.parts_of_copies: dict[int, FxNode] = {}  # kernels that write a part of a copy that another one owns
        self.kinds = self._kinds()
        self.outputs = {self.own.base(o) for o in facts.outputs}
        self.results = {self.own.base(o) for o in facts.user_outputs}
        self._consumers, self.needed = self._consumption()
        self._loaded, self._holders, self._exact = self._buffers()
        self._leading = self._leading_nodes()

    def members(self, kernel: int) -> list[FxNode]:
        """FX nodes that a kernel computes."""
        return self._members.get(kernel, [])

    def casts_only(self, kernel: int) -> bool:
        """Whether a kernel does nothing but convert element types."""
        members = self.members(kernel)
        return bool(members) and self.kinds[kernel] == "pointwise" and all(n.packet in CASTS for n in members)

    def is_tensor(self, node: FxNode) -> bool:
        """Whether the node is a tensor in memory, not a view, a constant or a tuple."""
        if not node.nbytes or (node.op == "call_function" and not node.dtype):
            return False
        return self.klass[node.name] in ("input", *PARTICIPANTS, *BARRIERS)

    def is_own(self, tensor: FxNode) -> bool:
        """Whether fusible work computes it."""
        return self.klass[tensor.name] in PARTICIPANTS

    def reads(self, tensor: FxNode) -> list[Read]:
        """Kernels other than its own that load a tensor."""
        home = self.own.kernel(tensor.name) if self.is_own(tensor) else None
        by_kernel: dict[int, list[tuple[FxNode, str]]] = defaultdict(list)
        for consumer, view in self._consumers[tensor.name]:
            kernel = self.own.kernel(consumer.name)
            if kernel is not None and kernel != home:
                by_kernel[kernel].append((consumer, view))
        found = []
        buffers = self.buffers_of(tensor)
        for kernel in self._loading(tensor, home, list(by_kernel), buffers):
            direct = by_kernel.get(kernel, [])
            # A kernel that recomputes another's operator loads its inputs without owning a consumer of them.
            reader = direct[0][0] if direct else self._leading.get(kernel)
            parts = self._loaded_parts(kernel, buffers) or {
                hash(view): self._view_bytes(view, tensor) for _, view in direct or ((tensor, tensor.name),)
            }
            if reader is not None:
                found.append(Read(kernel, reader, min(tensor.nbytes, sum(parts.values())), parts))
        return found

    def _loaded_parts(self, kernel: int, buffers: set[str]) -> dict[int, int]:
        """Index -> bytes that a kernel loads from buffers, by the scheduler's account; {} where it has none."""
        parts: dict[int, int] = {}
        for name in buffers & self._loaded[kernel].keys():
            parts.update(self._loaded[kernel][name])
        return parts if all(parts.values()) else {}

    def _view_bytes(self, view: str, tensor: FxNode) -> int:
        """Bytes of a tensor seen through a view; an expanded view reads no more than there is."""
        node = self.nodes.get(view)
        return min(node.nbytes, tensor.nbytes) if node is not None and node.nbytes else tensor.nbytes

    def buffers_of(self, tensor: FxNode) -> set[str]:
        """Buffers that hold a tensor; empty where the schedule does not say."""
        if tensor.op == "placeholder":
            return {tensor.name}
        if tensor.name in self._exact:
            return self._exact[tensor.name]
        return self._holders.get(tensor.name, set()) if self.klass[tensor.name] == "fusible" else set()

    def _loading(self, tensor: FxNode, home: int | None, consumers: list[int], buffers: set[str]) -> list[int]:
        """Kernels that load the tensor, by the scheduler's own account where it has one."""
        if not buffers:
            return consumers
        sure = tensor.op == "placeholder" or tensor.name in self._exact
        candidates: Iterable[int] = self._loaded if sure else consumers
        loops = [k for k in candidates if k != home and self.kinds[k] in LOOPS and buffers & self._loaded[k].keys()]
        return loops + [k for k in consumers if self.kinds[k] not in LOOPS]

    def _kernel_members(self) -> dict[int, list[FxNode]]:
        members: dict[int, list[FxNode]] = defaultdict(list)
        for name, op in self.own.owner.items():
            if self.klass.get(name) in (*PARTICIPANTS, *BARRIERS):
                members[op.kernel].append(self.nodes[name])
        return members

    def _kinds(self) -> dict[int, str]:
        """Kernel kinds with copies told from other pointwise kernels.

        A kernel that only clones, or that owns no operator and inherited only library calls and views, moves data into
        another layout. So does one that inherited a copy and owns nothing: a concatenation is written part by part. One
        that owns nothing but inherited loops is the second pass of a split reduction.
        """
        inherited: dict[int, set[str]] = defaultdict(set)
        reading = set()
        for op in self.facts.ops.values():
            inherited[op.kernel].update(op.origins)
            if op.reads:
                reading.add(op.kernel)
        kinds = {}
        for kernel in self.facts.kernels:
            kinds[kernel.index] = kernel.kind
            if kernel.kind != "pointwise" or kernel.index not in reading:
                continue
            members = self.members(kernel.index)
            other = [self.klass.get(o, "view") for o in inherited[kernel.index]]
            idle = not members and all(k in (*BARRIERS, "view", "generator", "input") for k in other)
            copied = None if members or idle else self._copied_along(inherited[kernel.index])
            if copied is not None:
                self.parts_of_copies[kernel.index] = copied
                idle = True
            if idle or (members and all(n.packet in COPIES for n in members)):
                kinds[kernel.index] = "layout_copy"
        return kinds

    def _copied_along(self, origins: set[str]) -> FxNode | None:
        """The copy in a kernel whose operators are all copies but those that take no part in its loop; else None."""
        taking = [self.nodes[o] for o in sorted(origins) if self.klass.get(o) in PARTICIPANTS]
        return taking[0] if taking and all(node.packet in COPIES for node in taking) else None

    def _consumption(self) -> tuple[dict[str, list[tuple[FxNode, str]]], set[str]]:
        """(tensor -> its fusible consumers and the view each reads, tensors that must be stored whatever is fused)."""
        consumers: dict[str, list[tuple[FxNode, str]]] = defaultdict(list)
        needed = set(self.outputs)
        for node in self.nodes.values():
            klass = self.klass[node.name]
            if node.mutates:
                needed.add(node.name)
            if klass not in (*PARTICIPANTS, *BARRIERS) or self.own.tuple_item(node):
                continue
            for name in node.inputs:
                base = self.own.base(name)
                if klass in PARTICIPANTS:
                    consumers[base].append((node, name))
                else:
                    needed.add(base)
        return consumers, needed

    def _buffers(self) -> tuple[dict[int, dict[str, dict[int, int]]], dict[str, set[str]], dict[str, set[str]]]:
        """(kernel -> buffers it loads, node -> its kernel's buffers that contain it, node -> buffers exactly it)."""
        loaded: dict[int, dict[str, dict[int, int]]] = defaultdict(dict)
        holders: dict[str, set[str]] = defaultdict(set)
        exact: dict[str, set[str]] = defaultdict(set)
        for op in self.facts.ops.values():
            for name, parts in op.reads.items():
                loaded[op.kernel].setdefault(name, {}).update(parts)
            for origin in op.origins:
                if self.own.kernel(origin) == op.kernel:
                    holders[origin].update(op.buffers)
            if op.origin:
                exact[self.own.base(op.origin)].update(op.buffers)
        return loaded, holders, exact

    def _leading_nodes(self) -> dict[int, FxNode]:
        """The first fusible node of every kernel, also of one that writes a part of what another one owns."""
        leading: dict[int, FxNode] = dict(self.parts_of_copies)
        for node in self.nodes.values():
            kernel = self.own.kernel(node.name) if self.is_own(node) else None
            if kernel is not None:
                leading.setdefault(kernel, node)
        return leading

"""How many bytes the kernels of one graph move, how many an ideal fusion would, and why they move more. Torch-free.

For every tensor of the graph: one write if it is stored, one read for each kernel that really loads it. Ideal is one
write if a matrix product, a collective or the graph's caller needs it, and the reads that no fusion removes. Each
byte beyond is charged to the layer and kernel that reads or writes it, with a cause. Only fusible kernels (loops and
library calls that are not matrix products) are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from costlab.probes.fusion.causes import HARD, STRUCTURAL, addressable
from costlab.probes.fusion.facts import FxNode, GraphFacts
from costlab.probes.fusion.launches import kernel_names
from costlab.probes.fusion.model import Lost
from costlab.probes.fusion.ownership import CASTS, COPIES, Ownership, is_random
from costlab.probes.fusion.why import Reasons

PARTICIPANTS = ("fusible", "fallback")
BARRIERS = ("extern", "collective")


@dataclass(slots=True)
class Charge:
    """Traffic of one layer or one kernel."""

    read: int = 0
    written: int = 0
    addressable: int = 0
    structural: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def actual(self) -> int:
        """Bytes moved."""
        return self.read + self.written


@dataclass(slots=True)
class _Read:
    """A kernel that loads a tensor."""

    kernel: int
    consumer: FxNode
    nbytes: int
    views: frozenset[str]  # through which views of the tensor
    direct: bool  # the kernel owns a consumer; else it recomputes one


class TrafficModel:
    """Charges every read and write of a graph; see the module's text."""

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.own = Ownership(facts)
        self.nodes = facts.nodes
        self.klass = self.own.klass
        self.reasons = Reasons(facts)
        self.layers: dict[str, Charge] = defaultdict(Charge)
        self.kernels: dict[int, Charge] = defaultdict(Charge)
        self.lost: list[Lost] = []
        self.kinds = {k.index: k.kind for k in facts.kernels}
        self._names = kernel_names(facts)
        self._mark_layout_copies()
        self._loaded = self._kernel_loads()
        self._holders = self._origin_holders()
        self._exact = self._exact_buffers()
        self._consumers, self._needed = self._consumption()
        self._barriers()
        self._leading = self._leading_nodes()

    def run(self) -> None:
        """Charge all tensors, then the copies that Inductor inserted itself."""
        for node in self.nodes.values():
            if self._is_tensor(node):
                self._charge_tensor(node)
        for index, kind in self.kinds.items():
            if kind == "layout_copy" and not self.members(index):
                self._charge_inserted_copy(index)

    # The graph's structure

    def members(self, kernel: int) -> list[FxNode]:
        """FX nodes that a kernel computes."""
        return self._members.get(kernel, [])

    def _mark_layout_copies(self) -> None:
        """Tell copy kernels from others.

        A kernel that only clones, or that owns no operator and inherited only library calls and views, moves data into
        another layout. One that owns nothing but inherited loops is the second pass of a split reduction.
        """
        self._members: dict[int, list[FxNode]] = defaultdict(list)
        for name, op in self.own.owner.items():
            node = self.nodes.get(name)
            if node is not None and self.klass[name] in (*PARTICIPANTS, *BARRIERS):
                self._members[op.kernel].append(node)
        inherited: dict[int, set[str]] = defaultdict(set)
        for op in self.facts.ops.values():
            inherited[op.kernel].update(op.origins)
        for index, kind in self.kinds.items():
            if kind != "pointwise":
                continue
            members = self._members[index]
            if members:
                copies = all(n.packet in COPIES for n in members)
            else:
                known = [self.klass.get(o, "view") for o in inherited[index]]
                copies = all(k in (*BARRIERS, "view", "generator", "input") for k in known)
            if copies and self._reads_anything(index):
                self.kinds[index] = "layout_copy"

    def _reads_anything(self, kernel: int) -> bool:
        return any(op.reads for op in self.facts.ops.values() if op.kernel == kernel)

    def _kernel_loads(self) -> dict[int, set[str]]:
        loaded: dict[int, set[str]] = defaultdict(set)
        for op in self.facts.ops.values():
            loaded[op.kernel] |= op.reads
        return loaded

    def _origin_holders(self) -> dict[str, set[str]]:
        """FX node -> buffers of the operations, in its owner's kernel, that contain it."""
        holders: dict[str, set[str]] = defaultdict(set)
        for op in self.facts.ops.values():
            for origin in op.origins:
                if self.own.kernel(origin) == op.kernel:
                    holders[origin].update(op.buffers)
        return holders

    def _exact_buffers(self) -> dict[str, set[str]]:
        """FX node -> buffers that hold exactly its value."""
        exact: dict[str, set[str]] = defaultdict(set)
        for op in self.facts.ops.values():
            if op.origin:
                exact[self.own.base(op.origin)].update(op.buffers)
        return exact

    def _consumption(self) -> tuple[dict[str, list[tuple[FxNode, str]]], set[str]]:
        """(tensor -> its fusible consumers and the view each reads, tensors that must be stored whatever is fused)."""
        consumers: dict[str, list[tuple[FxNode, str]]] = defaultdict(list)
        needed = {self.own.base(o) for o in self.facts.outputs}
        for node in self.nodes.values():
            if node.op != "call_function":
                continue
            if node.mutates:
                needed.add(node.name)
            klass = self.klass[node.name]
            if klass in ("view", "generator", "folded") or self.own.tuple_item(node):
                continue
            for name in node.inputs:
                base = self.own.base(name)
                if klass in PARTICIPANTS:
                    consumers[base].append((node, name))
                else:
                    needed.add(base)
        return consumers, needed

    def _barriers(self) -> None:
        """For every node the matrix products and collectives above and below it, as bit sets."""
        self._bits = {n: 1 << i for i, n in enumerate(x for x in self.nodes if self.klass[x] in BARRIERS)}
        self._above: dict[str, int] = {}
        self._below: dict[str, int] = dict.fromkeys(self.nodes, 0)
        for name, node in self.nodes.items():
            mask = 0
            for i in node.inputs:
                mask |= self._above.get(i, 0) | self._bits.get(i, 0)
            self._above[name] = mask
        for name, node in reversed(self.nodes.items()):
            passed = self._below[name] | self._bits.get(name, 0)
            for i in node.inputs:
                if i in self._below:
                    self._below[i] |= passed

    def _between(self, first: str, second: str) -> list[str]:
        mask = self._below.get(first, 0) & self._above.get(second, 0)
        return [n for n, bit in self._bits.items() if bit & mask] if mask else []

    def _leading_nodes(self) -> dict[int, FxNode]:
        """The first fusible node of every kernel: it stands in where a kernel recomputes another's operator."""
        leading: dict[int, FxNode] = {}
        for node in self.nodes.values():
            if self.klass[node.name] in PARTICIPANTS:
                kernel = self.own.kernel(node.name)
                if kernel is not None:
                    leading.setdefault(kernel, node)
        return leading

    def _is_tensor(self, node: FxNode) -> bool:
        if not node.nbytes or (node.op == "call_function" and not node.dtype):
            return False
        return self.klass[node.name] in ("input", *PARTICIPANTS, *BARRIERS)

    # Charging

    def _charge_tensor(self, tensor: FxNode) -> None:
        own = self.klass[tensor.name] in PARTICIPANTS
        reads = self._reads(tensor, own)
        stored = own and (bool(reads) or tensor.name in self._needed or self.klass[tensor.name] == "fallback")
        for read in reads:
            self._charge(read.consumer.layer, read.kernel, read.nbytes, write=False)
        lost = self._lost_own_reads(tensor, reads) if own else self._lost_shared_reads(tensor, reads)
        kernel = self.own.kernel(tensor.name)
        if stored and kernel is not None:
            self._charge(tensor.layer, kernel, tensor.nbytes, write=True)
            if tensor.name not in self._needed and lost:
                first = next((item for item in lost if addressable(item.cause)), lost[0])
                self._lose(tensor, None, kernel, None, first.cause, first.reason, tensor.nbytes, partner=first)
            elif self.kinds.get(kernel) == "layout_copy":
                self._lose(tensor, None, kernel, None, "layout_copy", _copied(tensor), tensor.nbytes)
            elif self._is_cast_kernel(kernel):
                self._lose_cast(tensor, kernel, tensor.nbytes)

    def _reads(self, tensor: FxNode, own: bool) -> list[_Read]:
        home = self.own.kernel(tensor.name) if own else None
        by_kernel: dict[int, list[tuple[FxNode, str]]] = defaultdict(list)
        for consumer, view in self._consumers[tensor.name]:
            kernel = self.own.kernel(consumer.name)
            if kernel is not None and kernel != home:
                by_kernel[kernel].append((consumer, view))
        found = []
        for kernel in self._loading_kernels(tensor, home, by_kernel):
            direct = by_kernel.get(kernel, [])
            views = frozenset(v for _, v in direct) or frozenset((tensor.name,))
            size = min(tensor.nbytes, sum(self._view_bytes(v, tensor) for v in views))
            consumer = direct[0][0] if direct else self._leading.get(kernel)
            if consumer is not None:
                found.append(_Read(kernel, consumer, size, views, bool(direct)))
        return found

    def _loading_kernels(self, tensor: FxNode, home: int | None, by_kernel: Iterable[int]) -> list[int]:
        """Kernels that load the tensor by the scheduler's own account, where it has one."""
        buffers = self._exact.get(tensor.name) or (
            self._holders.get(tensor.name) if self.klass[tensor.name] == "fusible" else None
        )
        if tensor.op == "placeholder":
            buffers = {tensor.name}
        consumers = list(by_kernel)
        if not buffers:
            return consumers
        if tensor.op == "placeholder" or tensor.name in self._exact:
            candidates: Iterable[int] = self._loaded
        else:
            candidates = consumers
        loading = [k for k in candidates if k != home and self._is_loop(k) and buffers & self._loaded[k]]
        return loading + [k for k in consumers if not self._is_loop(k)]

    def _is_loop(self, kernel: int) -> bool:
        return self.kinds[kernel] in ("pointwise", "reduction", "foreach", "layout_copy")

    def _view_bytes(self, view: str, tensor: FxNode) -> int:
        node = self.nodes.get(view)
        return min(node.nbytes, tensor.nbytes) if node is not None and node.nbytes else tensor.nbytes

    def _lost_own_reads(self, tensor: FxNode, reads: list[_Read]) -> list[Lost]:
        """A result of a fusible operator is ideally never read from memory."""
        return [self._lose_read(tensor, tensor, read, read.nbytes) for read in reads]

    def _lost_shared_reads(self, tensor: FxNode, reads: list[_Read]) -> list[Lost]:
        """Inputs and library results are ideally read once by each group of readers that nothing separates."""
        groups: list[tuple[_Read, set[str], int]] = []
        lost = []
        for read in reads:
            for place, (first, views, covered) in enumerate(groups):
                if self._separated(first.consumer, read.consumer):
                    continue
                again = sum(self._view_bytes(v, tensor) for v in read.views & views)
                fresh = sum(self._view_bytes(v, tensor) for v in read.views - views)
                again = min(read.nbytes, again + max(0, covered + fresh - tensor.nbytes))
                if again:
                    lost.append(self._lose_read(tensor, first.consumer, read, again))
                elif self._only_copies(read.kernel):
                    lost.append(self._lose_copy_read(tensor, read))
                groups[place] = (first, views | read.views, min(tensor.nbytes, covered + fresh))
                break
            else:
                groups.append((read, set(read.views), read.nbytes))
                if self._only_copies(read.kernel):
                    lost.append(self._lose_copy_read(tensor, read))
        return lost

    def _separated(self, first: FxNode, second: FxNode) -> bool:
        return bool(
            self._below.get(first.name, 0) & self._above.get(second.name, 0)
            or self._below.get(second.name, 0) & self._above.get(first.name, 0)
        )

    def _lose_read(self, tensor: FxNode, partner: FxNode, read: _Read, nbytes: int) -> Lost:
        cause, reason = self._cause(tensor, partner, read)
        return self._lose(partner, read.consumer, self.own.kernel(partner.name), read.kernel, cause, reason, nbytes)

    def _cause(self, tensor: FxNode, partner: FxNode, read: _Read) -> tuple[str, str]:
        """Why `partner`, which makes or also reads the tensor, and the reader are not one kernel."""
        for node in (partner, read.consumer):
            if self.klass[node.name] == "fallback":
                return self._fallback_cause(node)
        between = self._between(partner.name, read.consumer.name)
        if between:
            collective = all(self.klass[b] == "collective" for b in between)
            cause = "collective_boundary" if collective else "through_extern"
            return cause, f"{self.nodes[between[0]].target} lies between"
        return self.reasons.why(self._operation(partner, tensor), self._operation(read.consumer, tensor, read.kernel))

    def _operation(self, node: FxNode, tensor: FxNode, kernel: int | None = None) -> str:
        op = self.own.operation(node.name)
        if op is not None and (kernel is None or op.kernel == kernel):
            return op.name
        inside = [o for o in self.facts.ops.values() if o.kernel == kernel]
        return next((o.name for o in inside if tensor.name in o.origins), inside[0].name if inside else "")

    def _fallback_cause(self, node: FxNode) -> tuple[str, str]:
        kernel = self.own.kernel(node.name)
        if kernel is not None and self.kinds[kernel] == "device_copy":
            return "device_copy", f"{node.target} copies between devices"
        if is_random(node):
            return "rng_fallback", f"{node.target} is drawn by the library"
        if node.namespace in ("aten", "prims", ""):
            return "library_op", f"Inductor has no loop for {node.target}"
        return "opaque_op", f"{node.target} is opaque to the compiler"

    def _only_copies(self, kernel: int) -> bool:
        return self.kinds[kernel] == "layout_copy" or self._is_cast_kernel(kernel)

    def _is_cast_kernel(self, kernel: int) -> bool:
        members = self._members.get(kernel)
        return bool(members) and all(n.packet in CASTS for n in members or ())

    def _lose_copy_read(self, tensor: FxNode, read: _Read) -> Lost:
        if self.kinds[read.kernel] == "layout_copy":
            reason = _copied(read.consumer)
            return self._lose(
                tensor, read.consumer, self.own.kernel(tensor.name), read.kernel, "layout_copy", reason, read.nbytes
            )
        return self._lose_cast(read.consumer, read.kernel, read.nbytes, tensor)

    def _lose_cast(self, cast: FxNode, kernel: int, nbytes: int, read_from: FxNode | None = None) -> Lost:
        """Converting a graph input or a result of the graph is the caller's dtype policy, not the layer's doing."""
        source = self.nodes.get(self.own.base(cast.inputs[0])) if cast.inputs else None
        policy = cast.name in self._outputs_base() or (source is not None and source.op == "placeholder")
        reason = f"converts {source.dtype if source is not None else '?'} to {cast.dtype} and nothing else"
        if read_from is None:
            return self._lose(cast, None, kernel, None, "dtype_copy", reason, nbytes, forgiven=policy)
        return self._lose(read_from, cast, None, kernel, "dtype_copy", reason, nbytes, forgiven=policy)

    def _outputs_base(self) -> set[str]:
        return {self.own.base(o) for o in self.facts.outputs}

    def _charge_inserted_copy(self, index: int) -> None:
        """A copy that belongs to no operator of the user: Inductor made it for a library call's strides."""
        kernel = self.facts.kernels[index]
        written = {b for op in kernel.ops for b in self.facts.ops[op].buffers}
        reader = next((op for op in self.facts.ops.values() if op.kernel != index and op.reads & written), None)
        name = next((o for o in ((reader.origin, *reader.origins) if reader else ()) if o in self.nodes), "")
        node = self.nodes.get(name)
        layer = node.layer if node is not None else ""
        charge = ((kernel.bytes_read, False), (kernel.bytes_written, True))
        for nbytes, write in charge:
            self._charge(layer, index, nbytes, write=write)
        target = node.target if node is not None else "its reader"
        item = Lost(
            layer=layer,
            cause="layout_copy",
            addressable=True,
            bytes=kernel.bytes_read + kernel.bytes_written,
            reason=f"inserted for the strides that {target} needs",
            consumer=node.target if node is not None else "",
            consumer_source=node.source if node is not None else "",
            producer_kernel=self.kernel_name(index),
        )
        self._record(item, index)

    def _charge(self, layer: str, kernel: int, nbytes: int, *, write: bool) -> None:
        for charge in (self.layers[layer], self.kernels[kernel]):
            if write:
                charge.written += nbytes
            else:
                charge.read += nbytes

    def _lose(
        self,
        producer: FxNode,
        consumer: FxNode | None,
        producer_kernel: int | None,
        consumer_kernel: int | None,
        cause: str,
        reason: str,
        nbytes: int,
        *,
        partner: Lost | None = None,
        forgiven: bool = False,
    ) -> Lost:
        """Record lost bytes; without a consumer it is a write, whose other side is that of `partner`."""
        item = Lost(
            layer=producer.layer if consumer is None else consumer.layer,
            cause=cause,
            addressable=addressable(cause) and not forgiven,
            bytes=nbytes,
            reason=reason,
            producer=producer.target or producer.name,
            consumer=consumer.target if consumer is not None else partner.consumer if partner is not None else "",
            producer_source=producer.source,
            consumer_source=consumer.source if consumer else partner.consumer_source if partner is not None else "",
            producer_kernel=self.kernel_name(producer_kernel),
            consumer_kernel=self.kernel_name(consumer_kernel),
        )
        charged = producer_kernel if consumer is None else consumer_kernel
        self._record(item, charged)
        return item

    def _record(self, item: Lost, kernel: int | None) -> None:
        self.lost.append(item)
        charges = [self.layers[item.layer]] + ([self.kernels[kernel]] if kernel is not None else [])
        for charge in charges:
            if item.addressable:
                charge.addressable += item.bytes
            else:
                charge.structural += item.bytes
            charge.causes[item.cause] += item.bytes

    def kernel_name(self, index: int | None) -> str:
        """The name under which a kernel is launched, "" where there is none."""
        return "" if index is None else self._names.get(index, "")

    def hard_causes(self) -> dict[str, list[str]]:
        """Layer -> causes that break it whatever its rate."""
        hard: dict[str, list[str]] = {}
        for layer, charge in self.layers.items():
            found = sorted(c for c in charge.causes if c in HARD)
            if found:
                hard[layer] = found
        return hard


def _copied(node: FxNode) -> str:
    return f"{node.target or node.name} copies into another layout and computes nothing"


def main_cause(causes: Counter[str]) -> str:
    """The cause with most bytes, addressable ones first."""
    ranked = sorted(causes.items(), key=lambda item: (item[0] in STRUCTURAL, -item[1], item[0]))
    return ranked[0][0] if ranked else ""

"""How many bytes the kernels of one graph move, how many an ideal fusion would, and why they move more. Torch-free.

For every tensor of the graph: one write if it is stored, one read for each kernel that really loads it. Ideal is one
write if a matrix product, a collective or the graph's caller needs it, and the reads that no fusion removes. Each
byte beyond is charged to the layer and kernel that reads or writes it, with a cause. Only fusible kernels (loops and
library calls that are not matrix products) are counted.
"""

from __future__ import annotations

from costlab.probes.fusion.causes import addressable
from costlab.probes.fusion.facts import FxNode, GraphFacts
from costlab.probes.fusion.launches import kernel_names
from costlab.probes.fusion.ledger import Ledger
from costlab.probes.fusion.model import Lost
from costlab.probes.fusion.ownership import is_random
from costlab.probes.fusion.structure import Read, Structure
from costlab.probes.fusion.why import Reasons


class TrafficModel:
    """Charges every read and write of a graph to `ledger`; see the module's text."""

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.structure = Structure(facts)
        self.klass = self.structure.klass
        self.kinds = self.structure.kinds
        self.ledger = Ledger()
        self.copy_layers: dict[int, str] = {}  # kernel -> layer, of the copies that Inductor inserted
        self._own = self.structure.own
        self._reasons = Reasons(facts)
        self._names = kernel_names(facts)

    def run(self) -> TrafficModel:
        """Charge all tensors, then the copies that Inductor inserted itself."""
        for node in self.facts.nodes.values():
            if self.structure.is_tensor(node):
                self._charge(node)
        for index, kind in self.kinds.items():
            whose = self.structure.members(index) or index in self.structure.parts_of_copies
            if kind == "layout_copy" and not whose:
                self._charge_inserted_copy(index)
        return self

    def kernel_name(self, index: int | None) -> str:
        """The name under which a kernel is launched, "" where there is none."""
        return "" if index is None else self._names.get(index, "")

    def _charge(self, tensor: FxNode) -> None:
        own = self.structure.is_own(tensor)
        reads = self.structure.reads(tensor)
        for read in reads:
            self.ledger.read(read.consumer.layer, read.kernel, read.nbytes)
        kernel = self._own.kernel(tensor.name)
        # What a mere copy wrote would be read from its source instead, so its first reader stays.
        fused = own and kernel is not None and not self._idle(kernel)
        lost = self._lost_own_reads(tensor, reads) if fused else self._lost_shared_reads(tensor, reads)
        needed = tensor.name in self.structure.needed
        if own and kernel is not None and (reads or needed or self.klass[tensor.name] == "fallback"):
            self.ledger.write(tensor.layer, kernel, tensor.nbytes)
            self._lose_write(tensor, kernel, lost, needed)

    def _lost_own_reads(self, tensor: FxNode, reads: list[Read]) -> list[Lost]:
        """A result of fusible work is ideally never read from memory."""
        return [self._lose_read(tensor, tensor, read, read.nbytes) for read in reads]

    def _lost_shared_reads(self, tensor: FxNode, reads: list[Read]) -> list[Lost]:
        """Inputs and library results are ideally read once by each group of readers that nothing separates."""
        lost = []
        groups: list[tuple[Read, dict[int, int]]] = []
        for read in reads:
            group = next((g for g in groups if not self._separated(g[0], read)), None)
            again = self._read_again(tensor, group[1], read) if group is not None else 0
            if group is not None and again:
                lost.append(self._lose_read(tensor, group[0].consumer, read, again))
            elif self._idle(read.kernel):
                lost.append(self._lose_idle_read(read, read.nbytes))
            if group is None:
                groups.append((read, dict(read.parts)))
            else:
                group[1].update(read.parts)
        return lost

    def _separated(self, first: Read, second: Read) -> bool:
        return self.structure.between.separated(first.consumer.name, second.consumer.name)

    @staticmethod
    def _read_again(tensor: FxNode, seen: dict[int, int], read: Read) -> int:
        """Bytes of a read that its group had read before: disjoint slices of a tensor are not the same bytes."""
        again = sum(n for part, n in read.parts.items() if part in seen)
        fresh = sum(n for part, n in read.parts.items() if part not in seen)
        covered = min(tensor.nbytes, sum(seen.values()))
        return min(read.nbytes, again + max(0, covered + fresh - tensor.nbytes))

    def _lose_read(self, tensor: FxNode, partner: FxNode, read: Read, nbytes: int) -> Lost:
        if self._idle(read.kernel):
            return self._lose_idle_read(read, nbytes)
        cause, reason = self._cause(tensor, partner, read)
        item = self._item(partner, read.consumer, cause, reason, nbytes)
        item.consumer_kernel = self.kernel_name(read.kernel)
        culprit = next((n for n in (partner, read.consumer) if self.klass[n.name] == "fallback"), None)
        if culprit is not None:
            item.culprit, item.culprit_source = culprit.target, culprit.source
        return self.ledger.lose(item, read.kernel)

    def _lose_write(self, tensor: FxNode, kernel: int, lost_reads: list[Lost], needed: bool) -> None:
        """A tensor is written in vain if it is a mere copy, or if only kernels read it that should have been fused."""
        if self._idle(kernel):
            self.ledger.lose(self._idle_item(tensor, kernel, tensor.nbytes), kernel)
        elif not needed and lost_reads:
            why = next((item for item in lost_reads if item.addressable), lost_reads[0])
            item = self._item(tensor, None, why.cause, why.reason, tensor.nbytes)
            item.consumer, item.consumer_source = why.consumer, why.consumer_source
            item.culprit, item.culprit_source = why.culprit, why.culprit_source
            item.addressable = why.addressable
            self.ledger.lose(item, kernel)

    def _cause(self, tensor: FxNode, partner: FxNode, read: Read) -> tuple[str, str]:
        """Why `partner`, which makes or also reads the tensor, and the reader are not one kernel."""
        for node in (partner, read.consumer):
            if self.klass[node.name] == "fallback":
                return self._fallback_cause(node)
        between = self.structure.between.barriers(partner.name, read.consumer.name)
        if between:
            collective = all(self.klass[b] == "collective" for b in between)
            cause = "collective_boundary" if collective else "through_extern"
            return cause, f"{self.facts.nodes[between[0]].target} lies between"
        first = self._own.operation(partner.name)
        second = self._operation_in(read, tensor)
        return self._reasons.why(first.name if first else "", second, self.structure.buffers_of(tensor))

    def _operation_in(self, read: Read, tensor: FxNode) -> str:
        """The scheduler operation that does the reading, also where the kernel recomputes another's operator."""
        op = self._own.operation(read.consumer.name)
        if op is not None and op.kernel == read.kernel:
            return op.name
        inside = [self.facts.ops[o] for o in self.facts.kernels[read.kernel].ops]
        return next((o.name for o in inside if tensor.name in o.origins), inside[0].name if inside else "")

    def _fallback_cause(self, node: FxNode) -> tuple[str, str]:
        kernel = self._own.kernel(node.name)
        if kernel is not None and self.kinds[kernel] == "device_copy":
            return "device_copy", f"{node.target} copies between devices"
        if is_random(node):
            return "rng_fallback", f"{node.target} is drawn by the library"
        if node.namespace in ("aten", "prims", ""):
            return "library_op", f"Inductor has no loop for {node.target}"
        return "opaque_op", f"{node.target} is opaque to the compiler"

    # Kernels that compute nothing

    def _idle(self, kernel: int) -> bool:
        return self.kinds[kernel] == "layout_copy" or self.structure.casts_only(kernel)

    def _lose_idle_read(self, read: Read, nbytes: int) -> Lost:
        return self.ledger.lose(self._idle_item(read.consumer, read.kernel, nbytes), read.kernel)

    def _idle_item(self, mover: FxNode, kernel: int, nbytes: int) -> Lost:
        """The loss of a read or a write of `mover`, which only copies or converts."""
        source = self.facts.nodes.get(self._own.base(mover.inputs[0])) if mover.inputs else None
        if self.kinds[kernel] == "layout_copy":
            reason = f"{mover.target} copies into another layout and computes nothing"
            item = self._item(source or mover, mover, "layout_copy", reason, nbytes)
        else:
            reason = f"converts {source.dtype if source else '?'} to {mover.dtype} and computes nothing"
            item = self._item(source or mover, mover, "dtype_copy", reason, nbytes)
            # Converting the graph's own inputs and results is the caller's dtype policy, not the layer's doing.
            given = source is not None and source.op == "placeholder"
            item.addressable = not given and mover.name not in self.structure.results
        item.consumer_kernel = self.kernel_name(kernel)
        item.culprit, item.culprit_source = mover.target, mover.source
        return item

    def _charge_inserted_copy(self, index: int) -> None:
        """A copy that belongs to no operator of the user: Inductor made it for a library call's strides."""
        kernel = self.facts.kernels[index]
        node = self._reader_of(index)
        layer = self.copy_layers[index] = node.layer if node is not None else ""
        self.ledger.read(layer, index, kernel.bytes_read)
        self.ledger.write(layer, index, kernel.bytes_written)
        item = Lost(
            layer=layer,
            cause="layout_copy",
            addressable=True,
            bytes=kernel.bytes_read + kernel.bytes_written,
            reason=f"inserted for the strides that {node.target if node is not None else 'its reader'} needs",
            consumer=node.target if node is not None else "",
            consumer_source=node.source if node is not None else "",
            producer_kernel=self.kernel_name(index),
        )
        self.ledger.lose(item, index)

    def _reader_of(self, index: int) -> FxNode | None:
        """The operator that an inserted copy was made for."""
        written = {b for op in self.facts.kernels[index].ops for b in self.facts.ops[op].buffers}
        reader = next((o for o in self.facts.ops.values() if o.kernel != index and o.reads.keys() & written), None)
        names = (reader.origin, *reader.origins) if reader is not None else ()
        return next((self.facts.nodes[n] for n in names if n in self.facts.nodes), None)

    def _item(self, producer: FxNode, consumer: FxNode | None, cause: str, reason: str, nbytes: int) -> Lost:
        """A loss at the consumer's layer, or without a consumer at the producer's."""
        return Lost(
            layer=producer.layer if consumer is None else consumer.layer,
            cause=cause,
            addressable=addressable(cause),
            bytes=nbytes,
            reason=reason,
            producer=producer.target or producer.name,
            consumer=consumer.target if consumer is not None else "",
            producer_source=producer.source,
            consumer_source=consumer.source if consumer is not None else "",
            producer_kernel=self.kernel_name(self._own.kernel(producer.name)),
        )

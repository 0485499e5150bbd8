"""Builds graph facts by hand: nodes, and which kernel computes them."""

from __future__ import annotations

from costlab.probes.fusion.facts import FxNode, GraphFacts, Rejection, SchedKernel, SchedOp


class Builder:
    """A graph whose operations each compute one node; `fuse` puts operations into one kernel."""

    def __init__(self) -> None:
        self.facts = GraphFacts(compile_id="0/0", phase="forward", root="layers.0")
        self._kernel_of: dict[str, int] = {}

    def input(self, name: str, nbytes: int = 1000) -> str:
        self.facts.nodes[name] = FxNode(name, "placeholder", "", "", "", (), nbytes, "float32", "cuda")
        return name

    def node(
        self,
        name: str,
        *inputs: str,
        kind: str = "pointwise",
        packet: str = "",
        namespace: str = "aten",
        nbytes: int = 1000,
        kernel: str = "",
        view: bool = False,
        layer: str = "L['self'].mlp",
        dtype: str = "float32",
    ) -> str:
        """A node; `kernel` names the node whose kernel it shares."""
        packet = packet or name.rstrip("0123456789_")
        stack = f'File "/home/me/model.py", line {len(self.facts.nodes)}, in forward'
        self.facts.nodes[name] = FxNode(
            name, "call_function", f"{namespace}.{packet}.default", packet, namespace, inputs, nbytes, dtype, "cuda",
            layer, "", stack, name, view,
        )  # fmt: skip
        if view:
            return name
        index = self._kernel_of[kernel] if kernel else len(self.facts.kernels)
        self._kernel_of[name] = index
        role = "extern" if kind not in ("pointwise", "reduction") else "loop"
        op = f"op{len(self.facts.ops)}"
        reads = {self._buffer(i): {0 if role == "extern" else hash((i, "all")): self._size(i)} for i in inputs}
        self.facts.ops[op] = SchedOp(
            op, index, role, (f"buf_{name}",), reads, (name,), name, reduction=kind == "reduction"
        )
        if kernel:
            old = self.facts.kernels[index]
            self.facts.kernels[index] = SchedKernel(index, old.kind, old.device, (*old.ops, op), 0, 0)
        else:
            self.facts.kernels.append(SchedKernel(index, kind, "cuda", (op,), 0, 0))
            self.facts.calls.append((f"triton_{packet}_{index}", (op,)))
        return name

    def _base(self, name: str) -> str:
        node = self.facts.nodes[name]
        return self._base(node.inputs[0]) if node.view else name

    def _buffer(self, name: str) -> str:
        base = self._base(name)
        return base if self.facts.nodes[base].op == "placeholder" else f"buf_{base}"

    def _size(self, name: str) -> int:
        return min(self.facts.nodes[name].nbytes, self.facts.nodes[self._base(name)].nbytes)

    def reject(self, first: str, second: str, reason: str) -> None:
        """The scheduler's answer for two nodes."""
        ops = {o.origin: o.name for o in self.facts.ops.values()}
        self.facts.rejections.append(Rejection(frozenset((ops[first],)), frozenset((ops[second],)), reason))

    def done(self, *outputs: str) -> GraphFacts:
        """The facts, with what the graph returns."""
        self.facts.outputs, self.facts.user_outputs = frozenset(outputs), outputs
        self.facts.complete = True
        return self.facts

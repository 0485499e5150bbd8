"""act(a) * b with SiLU or GELU, however written; and the last Linear with the mean cross-entropy of its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from costlab.kernels.fused.gated import gated
from costlab.kernels.fused.linear_cross_entropy import linear_cross_entropy
from costlab.kernels.fused.patterns.matches import Emit, Emitter, Match, NearMiss
from costlab.kernels.fused.patterns.ops import cast_of, dtype_of, is_call, live, number, pairs, value


def gates(graph: fx.Graph) -> Iterator[Match | NearMiss]:
    """Products of an activation with another tensor of its shape and dtype, in either order."""
    for node in live(graph):
        for act, up in pairs(node, "mul"):
            found = _activation(act)
            if found is None or not isinstance(up, fx.Node):
                continue
            name, gate, inner = found
            a, b = value(gate), value(up)
            if b is None or a is None or not a.dim() or a.shape != b.shape:
                yield NearMiss("gated", node, "gate and the other factor differ in shape")
            elif dtype_of(node) != a.dtype:
                yield NearMiss("gated", node, f"its result is {dtype_of(node)}, the kernel's would be {a.dtype}")
            else:
                columns = a.shape[-1]
                rows = a.numel() // columns if columns else 0
                yield Match(
                    "gated", (node,), (gate, up), tuple(inner), _emit_gate(gate, up, name), columns, rows,
                    alike=(up,), strided=True,
                )  # fmt: skip
                break


def _emit_gate(gate: fx.Node, up: fx.Node, act: str) -> Emit:
    def emit(out: Emitter) -> tuple[fx.Node, ...]:
        return (out.function(gated, gate, up, act),)

    return emit


def _activation(node: Any) -> tuple[str, fx.Node, list[fx.Node]] | None:
    """(name in `gated.ACTIVATIONS`, input, inner nodes)."""
    call = is_call(node, "silu")
    if call is not None and isinstance(call.args[0], fx.Node) and len(call.args) == 1:
        return "silu", call.args[0], [node]
    call = is_call(node, "gelu")
    if call is not None and isinstance(call.args[0], fx.Node) and len(call.args) == 1:
        form = str(call.kwargs.get("approximate", "none"))
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(form)
        return (name, call.args[0], [node]) if name else None
    for x, gate in pairs(node, "mul"):
        sigmoid = is_call(gate, "sigmoid")
        if sigmoid is not None and sigmoid.args[0] is x and isinstance(x, fx.Node):
            return "silu", x, [node, gate]
    return None


def losses(graph: fx.Graph) -> Iterator[Match | NearMiss]:
    """cross_entropy(linear(x, weight)) with the mean over the targets, in one graph."""
    for node in live(graph):
        call = is_call(node, "cross_entropy")
        if call is None or not isinstance(call.args[0], fx.Node):
            continue
        logits, targets = call.arg(0, "input"), call.arg(1, "target")
        reason = _loss_problem(call)
        head, inner = _head(logits)
        linear = is_call(head, "linear")
        if linear is None:
            continue
        x, weight, bias = linear.arg(0, "input"), linear.arg(1, "weight"), linear.arg(2, "bias")
        target = value(targets)
        if bias is not None:
            reason = reason or "the Linear has a bias"
        if target is None or target.dtype != torch.int64 or target.dim() != 1:
            reason = reason or "the targets are not class numbers, one a token"
        table = value(weight)
        if reason or table is None or dtype_of(x) is None:
            yield NearMiss("linear_cross_entropy", node, reason or "its operands are not known")
            continue
        if dtype_of(x) != table.dtype:
            yield NearMiss("linear_cross_entropy", node, "input and weight of the Linear differ in dtype")
            continue
        ignored = call.arg(4, "ignore_index", -100)
        emit = _emit_loss(x, weight, targets, int(ignored))
        tensor = value(x)
        assert tensor is not None and target is not None
        if dtype_of(node) != torch.float32:
            yield NearMiss("linear_cross_entropy", node, f"its result is {dtype_of(node)}, the kernel's is fp32")
            continue
        yield Match(
            "linear_cross_entropy", (node,), (x, weight, targets), tuple(inner), emit, tensor.shape[-1],
            target.shape[0], alike=(weight,),
        )  # fmt: skip


def _loss_problem(call: Any) -> str:
    if call.arg(2, "weight") is not None:
        return "the classes are weighted"
    if call.arg(6, "reduction", "mean") != "mean":
        return "it is not the mean over the targets"
    if number(call.arg(7, "label_smoothing", 0.0)) != 0.0:
        return "labels are smoothed"
    if call.arg(3, "size_average") is not None or call.arg(5, "reduce") is not None:
        return "it uses arguments that torch deprecated"
    return ""


def _head(logits: Any) -> tuple[Any, list[fx.Node]]:
    """The Linear behind views and conversions of its output, and the nodes passed, the Linear included."""
    inner: list[fx.Node] = []
    while isinstance(logits, fx.Node):
        inner.append(logits)
        nearer = cast_of(logits)
        if nearer is None:
            view = is_call(logits, "view") or is_call(logits, "flatten")
            nearer = view.args[0] if view is not None and isinstance(view.args[0], fx.Node) else None
            if nearer is not None and not _keeps_rows(logits, nearer):
                break
        if nearer is None:
            break
        logits = nearer
    return logits, inner


def _keeps_rows(after: fx.Node, before: fx.Node) -> bool:
    """Whether a view only joins leading dimensions: the classes stay the last one."""
    a, b = value(after), value(before)
    return a is not None and b is not None and a.dim() == 2 and bool(a.shape[-1] == b.shape[-1])


def _emit_loss(x: fx.Node, weight: fx.Node, targets: fx.Node, ignored: int) -> Emit:
    tensor = value(x)
    columns = None if tensor is None else int(tensor.shape[-1])

    def emit(out: Emitter) -> tuple[fx.Node, ...]:
        flat = out.method("reshape", x, -1, columns)
        return (out.function(linear_cross_entropy, flat, weight, targets, ignored),)

    return emit

"""Rewrites the graph of a module's forward to the calls of `steps`. A rule returns how many places it replaced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from costlab.kernels.fused import matching as match
from costlab.kernels.fused import steps

Rule = Callable[[fx.GraphModule, nn.Module, dict[nn.Module, bool]], int]


def _replace(graph: fx.Graph, old: fx.Node, function: Callable[..., object], *args: object) -> fx.Node:
    """Put a call of `function` where `old` is; the nodes that only `old` needed are left for `finish`."""
    with graph.inserting_before(old):
        new = graph.call_function(function, tuple(args))  # type: ignore[arg-type]
    old.replace_all_uses_with(new)
    return new


def _redirect(old: fx.Node, new: fx.Node, kept: tuple[fx.Node, ...]) -> None:
    """Let all users of `old` but `kept` use `new`."""
    for user in list(old.users):
        if user not in kept:
            user.replace_input_with(old, new)


def _submodule(graph: fx.Graph, before: fx.Node, target: object) -> fx.Node:
    with graph.inserting_before(before):
        return graph.get_attr(str(target))


def feed_forward_norm(traced: fx.GraphModule, module: nn.Module, _norms: dict[nn.Module, bool]) -> int:
    """LayerNorm(x + Linear(gelu(Linear(x)))), where nothing else uses what lies between."""
    found = 0
    for node in list(traced.graph.nodes):
        norm = match.called(node, module)
        added = match.sum_of(node.args[0]) if norm is not None and match.is_layer_norm(norm) else None
        for x, branch in (added, added[::-1]) if added else ():
            second = match.called(branch, module)
            act = match.activation_of(branch.args[0], module) if second and match.is_linear(second, True) else None
            inner = act[1] if act and act[0] != "silu" else None
            first = match.called(inner, module)
            if inner is None or first is None or not match.is_linear(first, True) or inner.args[0] is not x:
                continue
            between = (node.args[0], branch, branch.args[0], inner)
            if any(not isinstance(n, fx.Node) or len(n.users) != 1 for n in between):
                continue
            modules = [_submodule(traced.graph, node, n.target) for n in (inner, branch, node)]
            form = "tanh" if act and act[0] == "gelu_tanh" else "none"
            _replace(traced.graph, node, steps.feed_forward_norm, *modules, x, form)
            found += 1
            break
    return found


def add_norm(traced: fx.GraphModule, module: nn.Module, norms: dict[nn.Module, bool]) -> int:
    """norm(x + residual), with a recognised norm; the sum stays available to its other users."""
    found = 0
    for node in list(traced.graph.nodes):
        norm = match.called(node, module)
        added = node.args[0] if norm is not None and (norms.get(norm) or match.is_layer_norm(norm)) else None
        pair = match.sum_of(added)
        if pair is None or not isinstance(added, fx.Node):
            continue
        # The fused call stands where the sum stood, so that every user of the sum comes after it.
        norm_node = _submodule(traced.graph, added, node.target)
        both = _replace(traced.graph, added, steps.add_norm, norm_node, *pair)
        with traced.graph.inserting_after(both):
            h = traced.graph.call_function(operator.getitem, (both, 1))
            y = traced.graph.call_function(operator.getitem, (both, 0))
        _redirect(both, h, (h, y))
        node.replace_all_uses_with(y)
        traced.graph.erase_node(node)
        found += 1
    return found


def gated_linear(traced: fx.GraphModule, module: nn.Module, _norms: dict[nn.Module, bool]) -> int:
    """act(gate) * up, joined to the Linear without bias behind it where that is its only user."""
    found = 0
    for node in list(traced.graph.nodes):
        pair = match.product_of(node)
        for gate, up in (pair, pair[::-1]) if pair else ():
            act = match.activation_of(gate, module)
            if act is None or len(gate.users) != 1:
                continue
            user = next(iter(node.users)) if len(node.users) == 1 else None
            linear = match.called(user, module)
            if user is not None and linear is not None and match.is_linear(linear, False):
                weight = _submodule(traced.graph, user, user.target)
                _replace(traced.graph, user, steps.gate_linear, weight, act[1], up, act[0])
            else:
                _replace(traced.graph, node, steps.gate_only, act[1], up, act[0])
            found += 1
            break
    return found


def norm_linear(traced: fx.GraphModule, module: nn.Module, norms: dict[nn.Module, bool]) -> int:
    """A recognised RMSNorm, alone or of a sum, whose output nothing but Linears without bias reads."""
    found = 0
    for node in list(traced.graph.nodes):
        norm = match.called(node, module)
        alone = norm is not None and norms.get(norm)
        of_sum = node.target is operator.getitem and node.args[1] == 0 and _is_sum_norm(node.args[0], traced, norms)
        linears = match.fed_linears(node, module) if alone or of_sum else None
        if linears is None:
            continue
        if alone:
            _replace(traced.graph, node, steps.norm_noted, _submodule(traced.graph, node, node.target), node.args[0])
        else:
            node.args[0].target = steps.add_norm_noted
        for linear in linears:
            exchange(linear, "norm_linear", steps.linear_forward)
        found += 1
    return found


def _is_sum_norm(node: object, traced: fx.GraphModule, norms: dict[nn.Module, bool]) -> bool:
    """Whether the node is a call of `steps.add_norm` with a recognised RMSNorm."""
    if not isinstance(node, fx.Node) or node.target is not steps.add_norm:
        return False
    norm = node.args[0]
    return isinstance(norm, fx.Node) and bool(norms.get(traced.get_submodule(str(norm.target))))


_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def exchange(module: nn.Module, code: str, forward: Callable[..., object]) -> None:
    """Give the module a subclass of its class with this forward, one for all modules of equal class and code.

    One class, because torch.compile guards on it: equal blocks then share one graph.
    """
    kind = type(module)
    if (kind, code) not in _classes:
        members = {"forward": forward, match.MARK: kind, "_costlab_targets": None, "__module__": kind.__module__}
        _classes[kind, code] = type(kind.__name__, (kind,), members)
    module.__class__ = _classes[kind, code]


def rope(traced: fx.GraphModule, _module: nn.Module, _norms: dict[nn.Module, bool]) -> int:
    """Two rotations by the same cos and sin, the first of which is not used before the second is computed."""
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    waiting: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]] = {}
    found = 0
    for node in list(traced.graph.nodes):
        rotation = match.rotation_of(node)
        if rotation is None:
            continue
        x, cos, sin = rotation
        earlier = waiting.pop((cos, sin), None)
        if earlier is None or any(order[user] < order[node] for user in earlier[0].users):
            waiting[cos, sin] = (node, x)
            continue
        both = _replace(traced.graph, node, steps.rotate_pair, earlier[1], x, cos, sin)
        with traced.graph.inserting_after(both):
            second = traced.graph.call_function(operator.getitem, (both, 1))
            first = traced.graph.call_function(operator.getitem, (both, 0))
        _redirect(both, second, (first, second))
        earlier[0].replace_all_uses_with(first)
        found += 1
    return found


def batch_norm_relu(traced: fx.GraphModule, module: nn.Module, _norms: dict[nn.Module, bool]) -> int:
    """relu(BatchNorm2d(x)) or relu(BatchNorm2d(x) + shortcut), where nothing else uses what lies between."""
    found = 0
    for node in list(traced.graph.nodes):
        inner = match.relu_of(node, module)
        if inner is None or len(inner.users) != 1:
            continue
        for call, norm, *beside in _normed(inner):
            if match.is_batch_norm(norm, module) and len(norm.users) == 1:
                _replace(traced.graph, node, call, _submodule(traced.graph, node, norm.target), norm.args[0], *beside)
                found += 1
                break
    return found


def _normed(inner: fx.Node) -> list[tuple[Any, ...]]:
    """What a ReLU's input may be: (step that replaces both, node of the norm, the branch added to it if any)."""
    added, in_place = match.sum_of(inner), match.in_place_sum_of(inner)
    if in_place:
        return [(steps.norm_iadd_relu, *in_place)]
    return [(steps.norm_add_relu, *added), (steps.norm_add_relu, *added[::-1])] if added else [(steps.norm_relu, inner)]


def finish(traced: fx.GraphModule) -> fx.GraphModule:
    """Drop what nothing uses any more and generate the code; graphs with effects were refused by `matching.trace`."""
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    return traced

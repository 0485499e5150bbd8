"""RMSNorm and LayerNorm over the last dimension, with or without the residual addition in front, however written.

    RMSNorm(h) = h / sqrt(mean(h^2) + eps) * weight        written with rsqrt, sqrt, ** -0.5, reciprocal, a division,
                                                           pow, square or a product, mean or sum / n, F.rms_norm
    LayerNorm(h) by F.layer_norm

with or without conversions to fp32 and back. Not RMSNorm, and left alone: another dimension, epsilon outside of the
root, no epsilon, a mean of another tensor than the one that is scaled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from costlab.kernels.fused.layer_norm import add_layer_norm, layer_norm
from costlab.kernels.fused.patterns.matches import Emit, Emitter, Match, NearMiss
from costlab.kernels.fused.patterns.ops import (
    cast_next,
    dtype_of,
    is_call,
    is_last_dim,
    live,
    number,
    pairs,
    path_between,
    uncast,
    value,
    widened,
)
from costlab.kernels.fused.rms_norm import add_rms_norm, rms_norm

_PLAIN: dict[str, Any] = {"rms_norm": rms_norm, "layer_norm": layer_norm}
_WITH_SUM: dict[str, Any] = {"rms_norm": add_rms_norm, "layer_norm": add_layer_norm}
Found = tuple[fx.Node, fx.Node, float, list[fx.Node]]  # h, weight, eps, inner nodes


def norms(graph: fx.Graph) -> Iterator[Match | NearMiss]:
    """All norms of the graph; one whose input is a sum of two alike tensors takes the sum in."""
    for node in live(graph):
        found = _torch_rms_norm(node)
        found = _written_out(node) if found is None and not cast_next(node) else found
        if isinstance(found, str):
            yield NearMiss("rms_norm", node, found)
        elif found is not None:
            yield _match("rms_norm", node, found, None)
        if (layer := _layer_norm(node)) is not None:
            yield _match("layer_norm", node, layer[0], layer[1])


def _match(kind: str, root: fx.Node, found: Found, bias: fx.Node | None) -> Match | NearMiss:
    h, weight, eps, inner = found
    tensor, scale = value(h), value(weight)
    if tensor is None or scale is None or scale.dim() != 1 or not tensor.dim() or scale.shape[0] != tensor.shape[-1]:
        return NearMiss(kind, root, "its weight is not one vector along the last dimension")
    if dtype_of(root) != tensor.dtype:
        return NearMiss(kind, root, f"its result is {dtype_of(root)}, the kernel's would be {tensor.dtype}")
    columns, rows = tensor.shape[-1], tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0
    vectors = (weight,) if bias is None else (weight, bias)
    residual = _sum(h)
    if residual is None:
        emit = _emit_plain(kind, h, vectors, eps)
        return Match(kind, (root,), (h, *vectors), tuple(inner), emit, columns, rows)
    x, other = residual
    return Match(
        f"add_{kind}", (root, h), (x, other, *vectors), tuple(inner), _emit_sum(kind, x, other, vectors, eps),
        columns, rows, alike=(other,),
    )  # fmt: skip


def _sum(h: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Operands of h if it is the sum of two tensors of its own shape and dtype."""
    for a, b in pairs(h, "add")[:1]:
        x, y, whole = value(a), value(b), value(h)
        if x is None or y is None or whole is None:
            return None
        if x.shape == y.shape == whole.shape and x.dtype == y.dtype == whole.dtype and x.device == y.device:
            return a, b
    return None


def _emit_plain(kind: str, h: fx.Node, vectors: tuple[fx.Node, ...], eps: float) -> Emit:
    def emit(out: Emitter) -> tuple[fx.Node, ...]:
        return (out.function(_PLAIN[kind], h, *vectors, eps),)

    return emit


def _emit_sum(kind: str, x: fx.Node, other: fx.Node, vectors: tuple[fx.Node, ...], eps: float) -> Emit:
    def emit(out: Emitter) -> tuple[fx.Node, ...]:
        both = out.function(_WITH_SUM[kind], x, other, *vectors, eps)
        return out.function(operator.getitem, both, 0), out.function(operator.getitem, both, 1)

    return emit


def _torch_rms_norm(node: fx.Node) -> Found | str | None:
    call = is_call(node, "rms_norm")
    if call is None:
        return None
    h, shape, weight, eps = (call.arg(i, n) for i, n in enumerate(("input", "normalized_shape", "weight", "eps")))
    if len(shape) != 1:
        return "it normalises over more than the last dimension"
    if not isinstance(weight, fx.Node):
        return "it has no weight"
    if number(eps) is None:
        return "its epsilon is left to torch and depends on the dtype"
    return h, weight, float(eps), []


def _layer_norm(node: fx.Node) -> tuple[Found, fx.Node] | None:
    call = is_call(node, "layer_norm")
    if call is None:
        return None
    names = ("input", "normalized_shape", "weight", "bias")
    h, shape, weight, bias = (call.arg(i, n) for i, n in enumerate(names))
    eps = number(call.arg(4, "eps", 1e-5))
    if len(shape) != 1 or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node) or eps is None:
        return None
    return (h, weight, eps, []), bias


def _written_out(root: fx.Node) -> Found | str | None:
    """RMSNorm by its formula: root = [cast] (normalised * weight). A string says what makes a look-alike differ."""
    product = uncast(root)
    problem: str | None = None
    for scaled, weight in pairs(product, "mul"):
        if (vector := value(weight)) is None or vector.dim() != 1 or not isinstance(scaled, fx.Node):
            continue
        inside = uncast(scaled)
        found = _normalised(inside)
        if isinstance(found, str):
            problem = found
        elif found is not None:
            h, eps, inner = found
            inner = [*inner, *path_between(scaled, inside), inside]
            if root is not product:
                inner = [*inner, *path_between(root, product)[1:], product]
            return h, weight, eps, inner
    return problem


def _normalised(node: Any) -> tuple[fx.Node, float, list[fx.Node]] | str | None:
    """(h, eps, inner nodes) if the node is h / sqrt(mean(h^2) + eps)."""
    for wide, factor in (*pairs(node, "mul"), *((a, ("inverse", b)) for a, b in pairs(node, "div"))):
        inverse = _root_of(factor)
        if inverse is None or not isinstance(wide, fx.Node):
            continue
        inside, inner = inverse
        for moment, eps in pairs(inside, "add"):
            square = _mean_square(moment) if number(eps) is not None else None
            if isinstance(square, str):
                return square
            if square is not None and square[0] is widened(wide):
                source, found = square
                return source, float(eps), [*inner, inside, *found, *path_between(wide, source)]
        if isinstance(_mean_square(inside), tuple):
            return "there is no epsilon inside the root"
    return None


def _root_of(factor: Any) -> tuple[Any, list[fx.Node]] | None:
    """(what stands under the root, nodes passed) for 1 / sqrt(v); ("inverse", d) stands for a divisor d."""
    if isinstance(factor, tuple):
        call = is_call(factor[1], "sqrt")
        power = is_call(factor[1], "pow")
        if power is not None and number(power.arg(1, "exponent")) == 0.5:
            call = power
        return (call.args[0], [factor[1]]) if call is not None else None
    if (call := is_call(factor, "rsqrt")) is not None:
        return call.args[0], [factor]
    if (call := is_call(factor, "pow")) is not None and number(call.arg(1, "exponent")) == -0.5:
        return call.args[0], [factor]
    divisor = is_call(factor, "reciprocal")
    below = divisor.args[0] if divisor else next((b for a, b in pairs(factor, "div") if number(a) == 1.0), None)
    inverse = _root_of(("inverse", below)) if below is not None else None
    return (inverse[0], [factor, *inverse[1]]) if inverse else None


def _mean_square(node: Any) -> tuple[fx.Node, list[fx.Node]] | str | None:
    """(h, inner nodes) if the node is the mean of h^2 along the last dimension, kept; a string for a look-alike."""
    inner = [node]
    total = node
    for a, b in pairs(node, "div"):
        tensor = value(a)
        if (summed := is_call(a, "sum")) is not None and tensor is not None and isinstance(summed.args[0], fx.Node):
            source = value(summed.args[0])
            if source is None or number(b) != float(source.shape[-1]):
                return None
            total, inner = a, [node, a]
    call = is_call(total, "mean" if total is node else "sum")
    if call is None or not isinstance(call.args[0], fx.Node) or set(call.kwargs) - {"dim", "keepdim"}:
        return None
    squared = call.args[0]
    wide = _squared(squared)
    if wide is None:
        return None
    if not is_last_dim(call.arg(1, "dim"), squared):
        return "its mean is not over the last dimension"
    if call.arg(2, "keepdim", False) is not True:
        return "its mean does not keep the dimension"
    source = widened(wide)
    return source, [*inner, squared, *path_between(wide, source)]


def _squared(node: Any) -> fx.Node | None:
    call = is_call(node, "square")
    power = is_call(node, "pow")
    if power is not None and number(power.arg(1, "exponent")) == 2.0:
        call = power
    base = call.args[0] if call is not None else next((a for a, b in pairs(node, "mul") if a is b), None)
    return base if isinstance(base, fx.Node) else None

"""Rotary embedding of q and k by one table, the halves of a head being rotated against each other, however written.

    out = cat(a cos - b sin, b cos + a sin) with a, b the halves of x        (GPT-NeoX's convention)
    out = x cos + cat(-b, a) sin with cos, sin of a whole head               only if both are seen to be cat(t, t)

Tables are [seq, head_dim / 2], with any number of leading dimensions of size one. Not matched: interleaved pairs, a
table that differs by sample, tables of a whole head whose halves cannot be seen to be equal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from costlab.kernels.fused.patterns.matches import Emit, Emitter, Match, NearMiss
from costlab.kernels.fused.patterns.ops import (
    cast_next,
    cast_of,
    dtype_of,
    is_call,
    is_last_dim,
    live,
    pairs,
    path_between,
    uncast,
    value,
    widened,
)
from costlab.kernels.fused.rope import rope


@dataclass(frozen=True)
class _Rotation:
    root: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    inner: tuple[fx.Node, ...]


def rotations(graph: fx.Graph) -> Iterator[Match | NearMiss]:
    """Pairs of rotations by the same tables."""
    waiting: dict[tuple[fx.Node, fx.Node], _Rotation] = {}
    for node in live(graph):
        found = None if cast_next(node) else _rotation(node)
        if isinstance(found, str):
            yield NearMiss("rope", node, found)
            continue
        if found is None:
            continue
        first = waiting.pop((found.cos, found.sin), None)
        if first is None:
            waiting[found.cos, found.sin] = found
            continue
        yield _pair(first, found)
    for alone in waiting.values():
        yield NearMiss("rope", alone.root, "no second rotation by the same tables")


def _pair(q: _Rotation, k: _Rotation) -> Match | NearMiss:
    a, b, table = value(q.x), value(k.x), value(q.cos)
    if a is None or b is None or table is None or a.dim() != 4 or b.dim() != 4:
        return NearMiss("rope", k.root, "q and k are not [batch, heads, seq, head_dim]")
    if dtype_of(q.root) != a.dtype or dtype_of(k.root) != b.dtype:
        return NearMiss("rope", k.root, f"its result is {dtype_of(k.root)}, the kernel's would be {b.dtype}")
    if any(t is None or t.requires_grad for t in (table, value(q.sin))):
        return NearMiss("rope", k.root, "the tables need a gradient")
    if a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:]:
        return NearMiss("rope", k.root, "q and k differ in more than their heads")
    if tuple(table.shape[-2:]) != (a.shape[2], a.shape[3] // 2) or any(s != 1 for s in table.shape[:-2]):
        return NearMiss("rope", k.root, "the tables are not [seq, head_dim / 2]")
    rows = a.shape[0] * a.shape[1] * a.shape[2]
    return Match(
        "rope", (q.root, k.root), (q.x, k.x, q.cos, q.sin), (*q.inner, *k.inner), _emit(q, k), a.shape[3], rows,
        alike=(k.x,), strided=True,
    )  # fmt: skip


def _emit(q: _Rotation, k: _Rotation) -> Emit:
    table = value(q.cos)
    leading = 0 if table is None else table.dim() - 2

    def flat(out: Emitter, node: fx.Node) -> fx.Node:
        for _ in range(leading):
            node = out.method("squeeze", node, 0)
        return node

    def emit(out: Emitter) -> tuple[fx.Node, ...]:
        both = out.function(rope, q.x, k.x, flat(out, q.cos), flat(out, q.sin))
        return out.function(operator.getitem, both, 0), out.function(operator.getitem, both, 1)

    return emit


def _rotation(root: fx.Node) -> _Rotation | str | None:
    joined = uncast(root)
    by_halves = _by_halves(joined)
    found = by_halves or _by_whole_heads(joined)
    if found is None or isinstance(found, str):
        return found
    wide, cos, sin, inner = found
    x = wide
    while (nearer := cast_of(x)) is not None:
        x = nearer
    passed = path_between(wide, x)
    if root is not joined:
        inner = [*inner, *path_between(root, joined)[1:], joined]
    return _Rotation(root, x, cos, sin, tuple(n for n in (*inner, *passed) if n is not root))


_Found = tuple[fx.Node, fx.Node, fx.Node, list[fx.Node]]


def _by_halves(joined: Any) -> _Found | None:
    call = is_call(joined, "cat")
    parts = call.args[0] if call is not None else None
    if call is None or not isinstance(parts, list | tuple) or len(parts) != 2:
        return None
    if not is_last_dim(call.arg(1, "dim", 0), joined):
        return None
    for minus in pairs(parts[0], "sub"):
        for plus in pairs(parts[1], "add"):
            for a, cos in pairs(minus[0], "mul"):
                for b, sin in pairs(minus[1], "mul"):
                    first, second = _is_half(a, 0), _is_half(b, 1)
                    x = widened(first)
                    if first is None or second is None or widened(second) is not x:
                        continue
                    if _product(plus[0], b, cos) and _product(plus[1], a, sin):
                        inner = [joined, *parts, *minus, *plus, a, b, *_chunks(a, b)]
                        inner += [*path_between(first, x), *path_between(second, x)]
                        return x, cos, sin, [n for n in dict.fromkeys(inner) if isinstance(n, fx.Node)]
    return None


def _product(node: Any, a: Any, b: Any) -> bool:
    return any(pair == (a, b) for pair in pairs(node, "mul"))


def _chunks(*halves: Any) -> list[Any]:
    """The nodes that split, where the halves are items of a split rather than slices of the tensor itself."""
    found = []
    for half in halves:
        call = is_call(half, "getitem")
        if call is not None and isinstance(call.args[1], int):
            found.append(call.args[0])
    return found


def _is_half(node: Any, which: int) -> fx.Node | None:
    """The tensor of which the node is the first (0) or second (1) half along the last dimension."""
    call = is_call(node, "getitem")
    part = value(node)
    if call is None or part is None:
        return None
    source, index = call.args
    if index == which and isinstance(index, int):
        split = is_call(source, "chunk") or is_call(source, "split")
        whole = split.args[0] if split is not None else None
        tensor = value(whole)
        if split is None or tensor is None or not isinstance(whole, fx.Node):
            return None
        size = 2 if split.name == "chunk" else tensor.shape[-1] // 2
        dim = split.arg(2, "dim", 0)
        fits = split.arg(1, "chunks" if split.name == "chunk" else "split_size", None) == size
        return whole if fits and tensor.shape[-1] % 2 == 0 and is_last_dim(dim, whole) else None
    tensor = value(source)
    if not isinstance(index, tuple) or len(index) < 2 or tensor is None or not isinstance(source, fx.Node):
        return None
    *before, last = index
    half, whole_size = tensor.shape[-1] // 2, tensor.shape[-1]
    if len(index) != tensor.dim() and before != [Ellipsis]:
        return None
    if whole_size % 2 or any(i is not Ellipsis and i != slice(None) for i in before) or not isinstance(last, slice):
        return None
    start, stop = last.start or 0, whole_size if last.stop is None else last.stop
    wanted = (0, half) if which == 0 else (half, whole_size)
    return source if last.step in (None, 1) and (start, stop) == wanted else None


def _by_whole_heads(joined: Any) -> _Found | str | None:
    for straight, crossed in pairs(joined, "add"):
        for turned, sin in pairs(crossed, "mul"):
            call = is_call(turned, "cat")
            parts = call.args[0] if call is not None else None
            if call is None or not isinstance(parts, list | tuple) or len(parts) != 2:
                continue
            negative = is_call(parts[0], "neg")
            x = _is_half(parts[1], 0)
            if negative is None or x is None or _is_half(negative.args[0], 1) is not x:
                continue
            if not is_last_dim(call.arg(1, "dim", 0), turned):
                continue
            for factor, cos in pairs(straight, "mul"):
                if factor is not x or not isinstance(cos, fx.Node) or not isinstance(sin, fx.Node):
                    continue
                tables = _doubled(cos), _doubled(sin)
                if tables[0] is None or tables[1] is None:
                    return "the halves of its tables are not seen to be equal"
                second = negative.args[0]
                inner = [joined, straight, crossed, turned, parts[0], parts[1], second, *_chunks(parts[1], second)]
                return x, tables[0], tables[1], [n for n in dict.fromkeys(inner) if isinstance(n, fx.Node)]
    return None


def _doubled(table: fx.Node) -> fx.Node | None:
    """t if the table is cat((t, t)) along the last dimension."""
    call = is_call(table, "cat")
    parts = call.args[0] if call is not None else None
    if call is None or not isinstance(parts, list | tuple) or len(parts) != 2 or parts[0] is not parts[1]:
        return None
    return parts[0] if is_last_dim(call.arg(1, "dim", 0), table) and isinstance(parts[0], fx.Node) else None

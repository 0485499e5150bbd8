"""Looks up why two operations of a schedule were not fused. Torch-free."""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection

from costlab.probes.fusion.causes import cause_of
from costlab.probes.fusion.facts import GraphFacts

_INDEXING = "indexing: "
_SHAPES = ("iteration_shape", "layout_mismatch", "backend_loop_mismatch")
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_LARGE = 1021.0  # for an unknown dimension: large beside the parts of a split, and not divided by their number
_FILLED_UP = 0.1


def _about(text: str, buffers: Collection[str]) -> str:
    """Of a reason that lists how each shared buffer is indexed, what it says of `buffers`."""
    if not text.startswith(_INDEXING):
        return text
    try:
        by_buffer = ast.literal_eval(text.removeprefix(_INDEXING))
        return next(f"{_INDEXING}{by_buffer[b]}" for b in by_buffer if b in buffers)
    except (ValueError, SyntaxError, TypeError, StopIteration):
        return text


def _rounded_up(text: str) -> bool:
    """Whether two loops differ in length only because one, a split reduction, is filled up to whole parts."""
    found = re.search(r"different numel: (.+) v\.s\. (.+)", text)
    lengths = [_length(side) for side in found.groups()] if found else []
    return len(lengths) == 2 and 0 < max(lengths) <= (1 + _FILLED_UP) * min(lengths)


def _length(text: str) -> float:
    """A loop's length, with every symbol a large number; 0 if it cannot be read."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0.0


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return float(node.value)
    if isinstance(node, ast.Name):
        return _LARGE
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


class Reasons:
    """The scheduler's rejections of one graph, by pair of operations."""

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        self._first: dict[str, list[int]] = defaultdict(list)
        self._second: dict[str, list[int]] = defaultdict(list)
        for index, rejection in enumerate(facts.rejections):
            for op in rejection.first:
                self._first[op].append(index)
            for op in rejection.second:
                self._second[op].append(index)
        self._above, self._below = self._reductions()

    def _reductions(self) -> tuple[dict[str, int], dict[str, int]]:
        """For every operation the reductions above and below it, as bit sets."""
        ops = self._facts.ops
        writer = {b: op.name for op in ops.values() for b in op.buffers}
        bits = {op.name: 1 << i for i, op in enumerate(o for o in ops.values() if o.reduction)}
        inputs = {o.name: {writer[r] for r in o.reads if r in writer and writer[r] != o.name} for o in ops.values()}
        above: dict[str, int] = {}
        below = dict.fromkeys(ops, 0)
        for name in ops:
            mask = 0
            for i in inputs[name]:
                mask |= above.get(i, 0) | bits.get(i, 0)
            above[name] = mask
        for name in reversed(ops):
            for i in inputs[name]:
                below[i] |= below[name] | bits.get(name, 0)
        return above, below

    def _last(self, first: str, second: str) -> int | None:
        """Index of the last rejection of any two groups that held the two operations, in either order."""
        pairs = set(self._first[first]) & set(self._second[second])
        pairs |= set(self._first[second]) & set(self._second[first])
        return max(pairs, default=None)

    def why(self, first: str, second: str, buffers: Collection[str] = ()) -> tuple[str, str]:
        """(cause, reason) for two operations by name, as far as `buffers`, which they share, are concerned."""
        ops = self._facts.ops
        one, two = ops.get(first), ops.get(second)
        if one is None or two is None:
            return "not_attempted", "the scheduler has no such pair"
        if "extern" in (one.role, two.role):
            return "extern_boundary", "one side is a library call"
        index = self._last(first, second)
        if index is None:
            return "not_attempted", "the scheduler never tried the pair"
        rejection = self._facts.rejections[index]
        text = _about(rejection.text, buffers)
        cause = cause_of(text if text.startswith(_INDEXING) else rejection.template)
        if cause == "no_shared_data":
            cause = "not_attempted"
        if cause == "iteration_shape" and _rounded_up(text):
            cause = "layout_mismatch"
        if cause in _SHAPES and self._reduction_decides(cause, one.reduction, two.reduction):
            cause = "reduction_shape"
        if cause in (*_SHAPES, "data_dependency") and self._reduction_between(first, second):
            cause = "reduction_shape"
        return cause, text

    @staticmethod
    def _reduction_decides(cause: str, first: bool, second: bool) -> bool:
        """A loop mismatch with a reduction on one side is the reduction's shape, not the user's layout."""
        if first and second:
            return True
        return first if cause == "iteration_shape" else cause == "layout_mismatch" and first != second

    def _reduction_between(self, first: str, second: str) -> bool:
        below, above = self._below, self._above
        return bool(below[first] & above[second] or below[second] & above[first])

"""Places on a time line for spans that have durations only.

A span's figure is its mean over the profiled steps: it has no begin of its own. Here the step begins where a profiled
step did, and children follow each other from their parent's begin in the order of the tree. Every export says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from costlab.app.store import Run, StoreError
from costlab.app.text import plain
from costlab.probes.records import SpanRow, StepRow

_LONGEST_MS = 1e9  # eleven days: a span that says more is damaged, and would not fit 64 bits of ns
HOW = "durations are means over the profiled steps; begins are laid out in the order of the span tree, not measured"


class Placed(msgspec.Struct, frozen=True):
    """A span with its place: begin and end in ns since 1970."""

    row: SpanRow
    begin: int
    end: int


def spans_of(run: Run) -> list[SpanRow]:
    """The run's spans, parents before children; StoreError where it has none, or one that cannot be read."""
    frame = run.table(SpanRow.table, SpanRow)
    if frame.empty:
        raise StoreError(f"{run.path.name} has no span tree; record it with --profile-steps above zero")
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    try:
        return [msgspec.convert(row, SpanRow, strict=False) for row in rows]
    except msgspec.ValidationError as error:
        raise StoreError(f"{run.path.name}: a row of its span table is damaged: {plain(error, 120)}") from error


def began(run: Run) -> dict[int, int]:
    """Rank -> when its first profiled step began, ns since 1970; the first timed one where none was profiled."""
    steps = run.table(StepRow.table, StepRow)
    found: dict[int, int] = {}
    for role in ("timed", "profiled"):
        chosen = steps[(steps.role == role) & (steps.start_ns > 0)].sort_values("start_ns", ascending=False)
        found |= {int(rank): int(ns) for rank, ns in zip(chosen["rank"], chosen.start_ns, strict=True)}
    return found


def place(spans: Sequence[SpanRow], begins: dict[int, int]) -> list[Placed]:
    """All spans with their places, a tree after the other; a tree whose root has no parent in the run follows others.

    A span without a figure of its own lasts as long as its children. None is shorter than its children together.
    """
    known = {(s.rank, s.span_id) for s in spans}
    children: dict[tuple[int, str], list[SpanRow]] = {}
    roots: dict[int, list[SpanRow]] = {}
    for span in spans:
        above = (span.rank, span.parent_span_id or "")
        (children.setdefault(above, []) if above in known else roots.setdefault(span.rank, [])).append(span)
    out: list[Placed] = []
    for rank, tops in sorted(roots.items()):
        cursor = begins.get(rank, 0)
        for top in tops:
            cursor = _lay(top, cursor, children, out)
    return out


def _lay(span: SpanRow, begin: int, children: dict[tuple[int, str], list[SpanRow]], out: list[Placed]) -> int:
    """Append `span` and what is below it, depth first; its end. Iterative: the depth is a file's business."""
    stack: list[tuple[SpanRow, int, int, int]] = [(span, len(out), begin, 0)]
    out.append(Placed(span, begin, begin))
    seen = {span.span_id}
    cursor = begin
    while stack:
        current, index, start, nth = stack.pop()
        below = children.get((current.rank, current.span_id), [])
        if nth < len(below):
            stack.append((current, index, start, nth + 1))
            child = below[nth]
            if child.span_id not in seen:
                seen.add(child.span_id)
                stack.append((child, len(out), cursor, 0))
                out.append(Placed(child, cursor, cursor))
            continue
        own = current.ms if current.ms is not None and 0 <= current.ms <= _LONGEST_MS else 0.0
        cursor = max(cursor, start + round(own * 1e6))
        out[index] = Placed(current, start, cursor)
    return cursor


def attributes(span: SpanRow) -> dict[str, Any]:
    """What is known of a span; absent figures, and those that JSON has no number for, left out."""
    named = {f"costlab.{k}": v for k, v in msgspec.to_builtins(span).items() if k not in _IDENTITY}
    return {k: v for k, v in named.items() if v not in (None, "") and (not isinstance(v, float) or math.isfinite(v))}


_IDENTITY = ("type", "trace_id", "span_id", "parent_span_id", "name")

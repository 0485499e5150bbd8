"""Chrome trace JSON as Perfetto reads it: a process for each rank, tracks for layers, kernels and fusion status.

Format: "Trace Event Format" (Chromium project), complete events `X`, counters `C`, metadata `M`; microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from costlab.app.export.layout import HOW, Placed, attributes, began, place, spans_of
from costlab.app.store import Run

TREE, FUSION = 1, 2  # the first tracks of a rank; those that hold the fusion status are FUSION and above
STATUSES = ("complete", "partial", "broken", "unknown")
# Names of Perfetto's palette (catapult's reserved colour names): green, yellow, red, grey.
COLOURS = {"complete": "good", "partial": "bad", "broken": "terrible", "unknown": "grey"}


def document(run: Run) -> bytes:
    """The run as one JSON trace. StoreError without spans."""
    placed = place(spans_of(run), began(run))
    first = min((p.begin for p in placed), default=0)
    events = [*_metadata(placed), *_events(placed, first)]
    other = {"run": run.manifest.run_id, "times": HOW, "begin_unix_ns": str(first)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _metadata(placed: list[Placed]) -> Iterator[dict[str, Any]]:
    for rank in sorted({p.row.rank for p in placed}):
        yield _meta("process_name", rank, 0, f"rank {rank}")
        yield _meta("thread_name", rank, TREE, "step > phase > layer > kernel")
        for number, status in enumerate(STATUSES):
            yield _meta("thread_name", rank, FUSION + number, f"kernels, fusion {status}")


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _events(placed: list[Placed], first: int) -> Iterator[dict[str, Any]]:
    for one in placed:
        row = one.row
        event = {
            "ph": "X",
            "cat": row.kind,
            "name": row.name,
            "pid": row.rank,
            "ts": (one.begin - first) / 1e3,
            "dur": (one.end - one.begin) / 1e3,
            "args": attributes(row) | {"span_id": row.span_id, "parent_span_id": row.parent_span_id or ""},
        }
        yield event | {"tid": TREE}
        if row.kind == "kernel":
            yield event | {"tid": FUSION + STATUSES.index(row.fusion_status), "cname": COLOURS[row.fusion_status]}
        if row.kind == "layer" and row.fusion_rate is not None:
            rate = {"rate": row.fusion_rate}
            yield {"ph": "C", "name": "fusion rate", "pid": row.rank, "ts": event["ts"], "args": rate}

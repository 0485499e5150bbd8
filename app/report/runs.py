"""The list of stored runs as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from costlab.app.figures import MISSING, seconds
from costlab.app.report.document import Cell, Document
from costlab.app.report.terminal import to_text
from costlab.app.store import RunSummary

MARKS = {"complete": "●", "running": "▶", "incomplete": "◐", "cancelled": "◌", "failed": "✗", "damaged": "!"}


def runs_text(summaries: Sequence[RunSummary], width: int = 120) -> str:
    """One line a run for a terminal of `width` columns, newest first; what is wrong with one stands below the table."""
    doc = Document()
    rows: list[list[Cell]] = [
        [
            f"{MARKS.get(s.status, '?')} {s.status}",
            s.id,
            s.created[:16].replace("T", " ") or MISSING,
            s.title,
            seconds(s.duration_s),
        ]
        for s in summaries
    ]
    doc.table(["status", "run", "created (UTC)", "what", "took"], rows, right=(4,), wide=3, drop=(4, 2))
    doc.items([[f"{s.id}: {s.problem}"] for s in summaries if s.problem])
    return to_text(doc, width).rstrip("\n")


def runs_json(summaries: Sequence[RunSummary]) -> str:
    """A JSON array of the summaries; paths as strings."""
    return msgspec.json.format(msgspec.json.encode(summaries, enc_hook=str), indent=2).decode()

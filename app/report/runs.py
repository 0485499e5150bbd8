"""The list of stored runs as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from costlab.app import figures
from costlab.app.store import RunSummary
from costlab.app.text import plain

_MARK = {"complete": "●", "running": "▶", "failed": "✗", "cancelled": "◌", "incomplete": "◐", "damaged": "!"}


def runs_text(summaries: Sequence[RunSummary]) -> str:
    """One line a run: id, how it ended, what it is, how long it took."""
    rows = [
        (
            plain(s.id),
            f"{_MARK.get(s.status, '?')} {s.status}",
            plain(s.problem or s.title),
            "" if s.duration_s is None else figures.seconds(s.duration_s),
        )
        for s in summaries
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{run:<{widths[0]}}  {status:<{widths[1]}}  {title:<{widths[2]}}  {took:>8}".rstrip()
        for run, status, title, took in rows
    )


def runs_json(summaries: Sequence[RunSummary]) -> str:
    """A JSON array of the same, with paths."""
    return msgspec.json.format(msgspec.json.encode(summaries, enc_hook=str), indent=1).decode()


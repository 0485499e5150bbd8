"""A run that failed, and any other error worth more than a toast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costlab.app.tui.cells import EMPTY, Line, line, text_of
from costlab.app.tui.dialogs.base import Message


@dataclass(frozen=True)
class FailureFacts:
    """What is known of a failure. `rank` -1 is the launcher, None when no rank is to blame."""

    sentence: str
    rank: int | None = None
    phase: str = ""
    advice: str = ""
    log_tail: Sequence[str] = ()
    saved_at: str = ""


def failure_lines(facts: FailureFacts) -> list[Line]:
    """The sentence first, then where, what to try, the log, and where the run is kept."""
    rows = [line(("✗ ", "bad"), (facts.sentence, "strong")), EMPTY]
    place = [] if facts.rank is None else ["launcher" if facts.rank < 0 else f"rank {facts.rank}"]
    place += [f"phase {facts.phase}"] if facts.phase else []
    if place:
        rows.append(line(("where  ", "muted"), ", ".join(place)))
    if facts.advice:
        rows.append(line(("try    ", "muted"), facts.advice))
    if facts.saved_at:
        rows.append(line(("saved  ", "muted"), facts.saved_at))
    if facts.log_tail:
        rows += [EMPTY, line(("last log lines", "muted"))]
        rows += [line(("│ ", "faint"), text) for text in facts.log_tail]
    return rows


class Failed(Message):
    """The modal of a failure; `c` copies all of it."""

    def __init__(self, title: str, facts: FailureFacts) -> None:
        lines = failure_lines(facts)
        super().__init__(title, lines, copy="\n".join(text_of(row) for row in lines))

"""The all-reduce schedules that a run chose, from its manifest, which may be anybody's."""

from __future__ import annotations

import math

import msgspec

from costlab.app.analysis.views import ScheduleView
from costlab.app.text import plain
from costlab.probes.schedule_choice import ScheduleChoice

MOST = 64  # rows
NAMES = {"nccl": "NCCL's own", "gloo": "gloo's own"}
OWN = "backend"
HOOKED = "a communication hook issues the all-reduces: the trace lacks some, and so do traffic and exposed time"


def schedules(stored: object) -> tuple[list[ScheduleView], str]:
    """Rows by size, those of the step before those measured, and how they came about; ([], "") for anything else."""
    try:
        found = msgspec.convert(stored, list[ScheduleChoice])
    except msgspec.ValidationError:
        return [], ""
    sane = [c for c in found if c.nbytes > 0][:MOST]
    if not sane:
        return [], ""
    first = sane[0]
    hosts = f"{first.hosts} host{'s' if first.hosts != 1 else ''}"
    how = (
        f"--schedule {plain(first.asked, 20)} over {first.ranks} ranks on {hosts}: every candidate was timed on the"
        " run's own ranks before the first step"
    )
    rows = [_view(c) for c in sorted(sane, key=lambda c: (not c.used, c.nbytes))]
    return rows, how


def _view(choice: ScheduleChoice) -> ScheduleView:
    own = NAMES.get(choice.library, "the library's own")
    return ScheduleView(
        bytes=choice.nbytes,
        schedule=own if choice.schedule == OWN else plain(choice.schedule, 60),
        ms=_ms(choice, choice.schedule),
        library_ms=_ms(choice, OWN),
        used=choice.used,
    )


def _ms(choice: ScheduleChoice, plan: str) -> float | None:
    seconds = choice.seconds.get(plan)
    return seconds * 1e3 if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None

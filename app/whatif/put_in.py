"""What an arm's options put into the step, where that was decided on the machine: fused kernels, schedules."""

from __future__ import annotations

from costlab.app.analysis.views import RunReport, ScheduleView
from costlab.app.figures import counted, fused_kernels, ms, size

SIZES = 4


def put_in(before: RunReport, after: RunReport) -> list[str]:
    """One sentence each on the fused kernels and the all-reduces of `after` that `before` has not."""
    told = []
    kernels = after.run.fused
    if kernels and kernels != before.run.fused:
        told.append(f"{counted(sum(kernels.values()), 'fused kernel')} put in: {fused_kernels(kernels)}")
    mine, base = _schedules(after), _schedules(before)
    if mine and mine != base:
        told.append(f"all-reduces, each timed alone: {_messages(mine)}")
    return told


def _schedules(report: RunReport) -> list[ScheduleView]:
    """Those of the step's own messages; of the sizes that were timed where no message is known."""
    rows = report.collectives.schedules if report.collectives else []
    return [row for row in rows if row.used] or rows


def _messages(rows: list[ScheduleView]) -> str:
    parts = [f"{size(row.bytes)} by {row.schedule}{_times(row)}" for row in rows[:SIZES]]
    return "; ".join([*parts, *([f"{len(rows) - SIZES} more sizes"] if len(rows) > SIZES else [])])


def _times(row: ScheduleView) -> str:
    if row.ms is None:
        return ""
    library = "" if row.library_ms in (None, row.ms) else f", the library's own {ms(row.library_ms)}"
    return f" ({ms(row.ms)}{library})"

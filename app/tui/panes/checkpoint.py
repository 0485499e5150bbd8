"""Checkpoint: what saving and loading costs, measured while steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult

from costlab.app import figures as fmt
from costlab.app.analysis.views import CheckpointLine, CheckpointView, RunReport
from costlab.app.tui.cells import EMPTY, Line, line, stacked
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col

BLOCKED = "█"
BACKGROUND = "░"
BLOCKED_HOW = "time the call kept the training thread, slowest rank"


def _state(row: CheckpointLine) -> Line:
    return line(("✓", "good")) if row.ok else line(("✗", "bad"))


def _mode(row: CheckpointLine) -> Line:
    return line(row.op, (f"  {row.mode}", "strong"))


def _stall(row: CheckpointLine, width: int) -> Line:
    if row.stall is None:
        return line((fmt.MISSING, "faint"))
    return line((fmt.resolved(row.stall), "strong"), (f" {fmt.interval(row.stall)}" if width > 20 else "", "muted"))


def _identical(row: CheckpointLine) -> Line:
    if row.identical is None:
        return line((fmt.MISSING, "faint"))
    return line(("● bit-equal", "good")) if row.identical else line(("○ differs", "bad"))


def _optional(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def columns(longest_ms: float) -> list[Column[CheckpointLine]]:
    """The table's columns; the timeline is drawn against the slowest operation."""

    def timeline(row: CheckpointLine, width: int) -> Line:
        if row.total_ms is None:
            return EMPTY
        blocked = min(row.blocked_ms or 0.0, row.total_ms)
        parts = [
            (blocked / longest_ms, BLOCKED, "accent"),
            ((row.total_ms - blocked) / longest_ms, BACKGROUND, "muted"),
        ]
        return stacked(parts, width)  # type: ignore[arg-type]

    return [
        col("ok", "", _state, 1),
        col("mode", "operation", _mode, 18, flex=2, max_width=44),
        col("bytes", "bytes", lambda r: _optional(fmt.size(r.bytes)), 8, "right", priority=2),
        col("blocked", "blocked", lambda r: _optional(fmt.ms(r.blocked_ms)), 8, "right", priority=1),
        col("total", "until done", lambda r: _optional(fmt.ms(r.total_ms)), 10, "right"),
        Column("line", "█ blocked ░ behind", timeline, 18, flex=3, priority=3, max_width=60, drawn=True),
        Column("stall", "stall", _stall, 9, "right", flex=1, max_width=34),
        col("gbps", "GB/s", lambda r: _optional(fmt.number(r.gbps)), 6, "right", priority=1),
        col("identical", "restored", _identical, 11, priority=1),
    ]


class CheckpointPane(Pane):
    """Saves and loads, and the stall of a save spread over the steps between two."""

    TITLE: ClassVar[str] = "Checkpoint"
    FOCUS: ClassVar[str] = "#saves"
    HELP: ClassVar[str | None] = """\
**Stall** is the figure that counts: how much longer the steps around a save took than control steps. **Blocked** is how
long the call itself kept the training thread; the rest happens behind the steps. **Restored** compares every tensor
that was loaded with what was saved, bit by bit.
"""
    DEFAULT_CSS = """
    CheckpointPane #saves { margin-bottom: 1; }
    CheckpointPane #note { padding: 0 1; }
    """

    def body(self) -> ComposeResult:
        """Figures, table, notes."""
        yield FigureStrip(id="headline")
        yield Table[CheckpointLine](columns(1.0), id="saves", classes="fit")
        yield Lines(id="note", classes="wrap")

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """Nothing saved in this run."""
        view = report.checkpoint
        if view is not None and view.lines:
            return ()
        why = view.note if view and view.note else "The run saved no checkpoint."
        return lacking(why, line(("n", "accent"), "  record one without --no-checkpoint"))

    def fill(self, report: RunReport) -> None:
        """Show the run."""
        view = report.checkpoint
        assert view is not None
        self.query_one("#headline", FigureStrip).show(headline(view))
        table = self.query_one("#saves", Table)
        table.set_columns(columns(max((c.total_ms or 0.0 for c in view.lines), default=0.0) or 1.0))
        table.set_rows(view.lines, cursor=0)
        self.query_one("#note", Lines).show(notes(view))

    def pointed(self) -> Named | None:
        """A headline figure or the stall of the line."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, CheckpointLine):
            row = table.row
            name = f"{row.op} {row.mode}"
            if row.stall is not None:
                return Named(f"stall of {name}", row.stall)
            return computed(f"blocked by {name}", row.blocked_ms, "ms", BLOCKED_HOW, "measured")
        return super().pointed()


def headline(view: CheckpointView) -> list[Named]:
    """The synchronous stall, its share of a step, the best mode's stall."""
    found: list[Named] = []
    saves = [c for c in view.lines if c.op == "save" and c.stall is not None]
    for save in saves[:3]:
        assert save.stall is not None
        found.append(
            Named(f"{save.mode} stall", save.stall, tone="accent" if save.mode == view.best_mode else "strong")
        )
    if view.per_step_ms is not None:
        how = f"stall of the synchronous save / {fmt.count(view.every_steps)} steps between saves"
        found.append(computed("per step", view.per_step_ms, "ms", how))
    return found


def notes(view: CheckpointView) -> list[Line]:
    """The best mode, the interval, notes of single operations."""
    lines: list[Line] = []
    if view.best_mode:
        lines.append(line(("least stall  ", "muted"), (view.best_mode, "strong")))
    if view.every_steps:
        lines.append(line(("one save every ", "muted"), f"{fmt.count(view.every_steps)} steps"))
    lines += [line((f"{c.op} {c.mode}  ", "muted"), c.note) for c in view.lines if c.note]
    return [*lines, line((view.note, "muted"))]

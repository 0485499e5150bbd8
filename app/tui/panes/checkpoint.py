"""Checkpoint: what saving and loading costs, measured while steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult

from costlab.app import figures as fmt
from costlab.app.analysis.views import CheckpointView, CodecLine, RunReport, StageLine
from costlab.app.tui.cells import Line, line
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.panes.checkpoint_rows import (
    Resumed,
    Way,
    codec_columns,
    resume_columns,
    resumed,
    stage_columns,
    way_columns,
    ways,
)
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Table

BLOCKED_HOW = "time the call kept the training thread, slowest rank"


class CheckpointPane(Pane):
    """Saves and loads, and the stall of a save spread over the steps between two."""

    TITLE: ClassVar[str] = "Checkpoint"
    FOCUS: ClassVar[str] = "#saves"
    HELP: ClassVar[str | None] = """\
**Stall** is the figure that counts: how much longer the steps around a save took than control steps. **Blocked** is how
long the call itself kept the training thread; the rest happens behind the steps. **Restored** compares what was loaded
with what was saved: bit by bit, or for a lossy save against the error bound that its file states. `costlab:` is
costlab's own engine, `async:` are ways of torch.distributed.checkpoint.

Below: the engine's stages from the call on, each with its pace beside what this machine reaches at the same; what the
codec does to each class of tensors, with the error of the first optimizer update after a restore; and the loss of
training resumed from the restored state, less that of the training that went on with the exact one.
"""
    DEFAULT_CSS = """
    CheckpointPane Table { margin-bottom: 1; }
    CheckpointPane #note { padding: 0 1; }
    """

    def body(self) -> ComposeResult:
        """Figures, tables, notes."""
        yield FigureStrip(id="headline")
        yield Table[Way](way_columns(1.0, ""), id="saves", classes="fit")
        yield Table[StageLine](stage_columns(1.0), id="stages", classes="fit")
        yield Table[CodecLine](codec_columns(), id="codecs", classes="fit")
        yield Table[Resumed](resume_columns([]), id="resumed", classes="fit")
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
        saves, again = ways(view), resumed(view)
        table = self.query_one("#saves", Table)
        table.set_columns(way_columns(max((w.main.total_ms or 0.0 for w in saves), default=0.0) or 1.0, view.chosen))
        table.set_rows(saves, cursor=0)
        stages = self.query_one("#stages", Table)
        stages.set_columns(stage_columns(max((s.end_ms or 0.0 for s in view.stages), default=0.0)))
        self.query_one("#resumed", Table).set_columns(resume_columns(again))
        for name, rows in (("#stages", view.stages), ("#codecs", view.codecs), ("#resumed", again)):
            inner = self.query_one(name, Table)
            inner.set_rows(rows, cursor=0)
            inner.display = bool(rows)
        self.query_one("#note", Lines).show(notes(view))

    def pointed(self) -> Named | None:
        """A headline figure, the stall of the line, or a stage's pace."""
        table = self.screen.focused
        row = table.row if isinstance(table, Table) else None
        if isinstance(row, Way):
            name = f"{row.main.op} {row.mode}"
            if row.main.stall is not None:
                return Named(f"stall of {name}", row.main.stall)
            return computed(f"blocked by {name}", row.main.blocked_ms, "ms", BLOCKED_HOW, "measured")
        if isinstance(row, StageLine):
            how = f"bytes over busy time, slowest rank; ceiling: {row.ceiling}" if row.ceiling else "busy time, slowest"
            return computed(f"{row.mode} {row.stage}", row.gbps, "GB/s", how, "measured")
        return super().pointed()


def headline(view: CheckpointView) -> list[Named]:
    """The stall of the way the run was asked for, then of the engine and of the best; what a step pays."""
    saves = [c for c in view.lines if c.op == "save" and c.stall is not None]
    wanted = dict.fromkeys((view.chosen, "costlab:exact", "costlab:fp8", view.best_mode, *(c.mode for c in saves)))
    by = {c.mode: c for c in saves}
    found: list[Named] = []
    for save in [by[m] for m in wanted if m in by][:3]:
        assert save.stall is not None
        found.append(
            Named(
                f"{save.mode} stall",
                save.stall,
                fmt.resolved(save.stall),
                "accent" if save.mode == view.best_mode else "strong",
            )
        )
    if view.per_step_ms is not None:
        saved = "synchronous save" if view.chosen == "sync" else f"save with {view.chosen}"
        how = f"stall of the {saved} / {fmt.count(view.every_steps)} steps between saves"
        found.append(computed("per step", view.per_step_ms, "ms", how))
    return found


def notes(view: CheckpointView) -> list[Line]:
    """The best mode, the interval, notes of single operations."""
    lines: list[Line] = []
    if view.best_mode:
        lines.append(line(("least stall  ", "muted"), (view.best_mode, "strong"), ("  of the exact ways", "muted")))
    if view.every_steps:
        lines.append(line(("one save every ", "muted"), f"{fmt.count(view.every_steps)} steps"))
    lines += [line((f"{c.op} {c.mode}  ", "muted"), c.note) for c in view.lines if c.note]
    return [*lines, line((view.note, "muted"))]

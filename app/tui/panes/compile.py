"""Compile: graphs, breaks, recompiles, caches per rank, phases and the memory peak while compiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.views import BreakView, CacheView, CompileView, GraphView, Part, RunReport
from costlab.app.tui.cells import Line, bar, crop_start, line
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col

AMORTISED_HOW = "cold compile time over the steps of the training run"


def _breaks(title: str) -> list[Column[BreakView]]:
    return [
        col("reason", title, lambda r: line(r.reason), 30, flex=3, max_width=120),
        Column("source", "where", lambda r, w: line((crop_start(r.source, w), "muted")), 16, flex=1, max_width=40),
        col("count", "×", lambda r: line((fmt.count(r.count), "strong")), 4, "right"),
        col("id", "graph", lambda r: line((r.compile_id, "muted")), 6, priority=2),
    ]


GRAPHS: list[Column[GraphView]] = [
    col("id", "graph", lambda r: line((r.compile_id, "muted")), 8),
    col("name", "frame", lambda r: line(r.name), 18, flex=1, max_width=60),
    col("ops", "operators", lambda r: line(fmt.count(r.ops)), 9, "right"),
    col("s", "compile", lambda r: line(fmt.seconds(r.seconds)), 8, "right"),
]


def _tally(value: int, good: bool) -> Line:
    if not value:
        return line(("·", "faint"))
    return line((fmt.count(value), "good" if good else "warn"))


CACHES: list[Column[CacheView]] = [
    col("cache", "cache", lambda r: line(r.cache), 20, flex=1, max_width=34),
    col("rank", "rank", lambda r: line((str(r.rank), "muted")), 4, "right"),
    col("run", "run", lambda r: line((r.run, "muted")), 5),
    col("hit", "hit", lambda r: _tally(r.hit, True), 5, "right"),
    col("miss", "miss", lambda r: _tally(r.miss, False), 5, "right"),
    col("bypass", "bypass", lambda r: _tally(r.bypass, False), 6, "right"),
]


def phase_columns(longest_ms: float) -> list[Column[Part]]:
    """Phases with bars against the longest."""
    return [
        col("name", "compile phase", lambda r: line(r.name), 22, flex=1, max_width=36),
        col("ms", "time", lambda r: line(fmt.ms(r.ms)), 8, "right"),
        Column("bar", "", lambda r, w: bar(r.ms / longest_ms, w), 10, flex=2, max_width=40, drawn=True),
    ]


class CompilePane(Pane):
    """What compiling cost and what made it happen again."""

    TITLE: ClassVar[str] = "Compile"
    FOCUS: ClassVar[str] = "#breaks"
    HELP: ClassVar[str | None] = """\
**Cold** compiles with empty caches, **warm** with those the cold run left. Cache facts are three counts for each rank,
never one ratio: a **bypass** is work the cache refused to take.

Phases nest, so their times do not add up to the whole.
"""
    SCOPED_CSS = False  # the rules look at the screen's size classes
    DEFAULT_CSS = """
    CompilePane Table { margin-bottom: 1; }
    CompilePane #columns { height: auto; }
    CompilePane .column { height: auto; width: 1fr; }
    CompilePane #left { margin-right: 3; }
    CompilePane #none { padding: 0 1; margin-bottom: 1; }
    .-narrow CompilePane #columns { layout: vertical; }
    .-narrow CompilePane .column { width: 100%; margin-right: 0; }
    """

    def body(self) -> ComposeResult:
        """Figures; breaks and recompiles; phases and caches beside graphs."""
        yield FigureStrip(id="headline")
        yield Lines(id="none")
        yield Table[BreakView](_breaks("graph breaks"), id="breaks", classes="fit")
        yield Table[BreakView](_breaks("recompiles: the guard that failed"), id="recompiles", classes="fit")
        with Horizontal(id="columns"):
            with Vertical(id="left", classes="column"):
                yield Table[Part](phase_columns(1.0), id="phases", classes="fit")
            with Vertical(id="right", classes="column"):
                yield Table[CacheView](CACHES, id="caches", classes="fit")
        yield Table[GraphView](GRAPHS, id="graphs", classes="fit")
        yield Lines(id="note", classes="wrap")

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """An eager run compiles nothing."""
        view = report.compile
        if view is not None and (view.graphs or view.cold_s is not None):
            return ()
        why = view.note if view and view.note else "The run compiled nothing: it ran eagerly."
        return lacking(why, line(("n", "accent"), "  record one with compile = block or model"))

    def fill(self, report: RunReport) -> None:
        """Show the run; tables without rows are not shown."""
        view = report.compile
        assert view is not None
        self.query_one("#headline", FigureStrip).show(headline(view))
        self.query_one("#phases", Table).set_columns(
            phase_columns(max((p.ms for p in view.phases), default=1.0) or 1.0)
        )
        tables: dict[str, Sequence[object]] = {
            "breaks": view.breaks,
            "recompiles": view.recompiles,
            "phases": view.phases,
            "caches": view.caches,
            "graphs": view.graphs,
        }
        for name, rows in tables.items():
            table = self.query_one(f"#{name}", Table)
            table.set_rows(rows, cursor=0)
            table.display = bool(rows)
        self.query_one("#none", Lines).show(absences(view))
        self.query_one("#none").display = bool(absences(view))
        self.query_one("#note", Lines).show([line((view.note, "muted"))] if view.note else [])

    def take_focus(self) -> None:
        """The first table that has rows."""
        tables = [table for table in self.query(Table) if table.display and table.rows]
        if tables and not self.has_class("-empty"):
            tables[0].focus(scroll_visible=False)
        else:
            super().take_focus() if not self.has_class("-empty") else self.screen.set_focus(None)

    def pointed(self) -> Named | None:
        """A headline figure or the time of a phase."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, Part):
            how = "compiler's own clock, cold run, slowest rank; phases nest"
            return computed(f"phase {table.row.name}", table.row.ms, "ms", how, "measured")
        return super().pointed()


def headline(view: CompileView) -> list[Named]:
    """Cold and warm time, what a step bears of it, counts, memory peaks."""
    found = [Named(name, f) for name, f in (("cold", view.cold_s), ("warm", view.warm_s)) if f is not None]
    if view.amortised_ms is not None:
        found.append(computed("per step", view.amortised_ms, "ms", AMORTISED_HOW))
    found.append(computed("graphs", len(view.graphs), "count", "graphs compiled in the cold run", "measured"))
    peaks = (("device peak", view.peak_device_bytes), ("host peak", view.peak_host_bytes))
    return [*found, *(Named(name, f) for name, f in peaks if f is not None)]


def absences(view: CompileView) -> list[Line]:
    """Good news is said, not left out."""
    lines: list[Line] = []
    if not view.breaks:
        lines.append(line(("● ", "good"), "no graph break"))
    if not view.recompiles:
        lines.append(line(("● ", "good"), "no recompile"))
    return lines

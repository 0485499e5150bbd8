"""Comms: every collective of a step, how much of it is waiting, how much is exposed, and the bandwidth it reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from costlab.app import figures as fmt
from costlab.app.analysis.views import CollectivesView, CollectiveView, Figure, RunReport
from costlab.app.tui.cells import Line, Tone, line, stacked
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.plot import BandwidthPlot, Points
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col

TRANSFER = "█"
WAIT = "▒"
SCHEDULES = 4  # sizes; the report holds them all
MIN_SIZES = 3  # with fewer sizes a chart says less than the table
MARKERS = ("●", "▲", "■", "◆", "x", "+")
CURVES = ("·", ":", "~", "=")
SORTS = ("ms", "bytes", "exposed", "wait", "bus")


def _optional(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def call_bytes(row: CollectiveView) -> int | None:
    """Size of one call as nccl-tests counts it: the larger of what goes in and comes out."""
    known = [size for size in (row.bytes_in, row.bytes_out) if size is not None]
    return max(known, default=None)


def _muted(text: str) -> Line:
    return line((text or fmt.MISSING, "muted" if text else "faint"))


def _group(row: CollectiveView) -> Line:
    return line(f"{row.group_size}", (f"  [{row.group}]" if row.group else "", "muted"))


def _wait(row: CollectiveView) -> Line:
    """The wait, faint where the clocks do not tell it from none."""
    within = row.wait_ms is not None and row.wait_doubt_ms is not None and row.wait_ms < row.wait_doubt_ms
    return line((fmt.ms(row.wait_ms), "faint" if within or row.wait_ms is None else ""))


def _schedule(row: CollectiveView) -> Line:
    return _muted("own" if row.schedule == "backend" else row.schedule)


def _last(row: CollectiveView) -> Line:
    return line((f"rank {row.last_rank}", "muted")) if row.last_rank is not None else line((fmt.MISSING, "faint"))


def columns(longest_ms: float, ideals: bool = False, planned: bool = False) -> list[Column[CollectiveView]]:
    """The table's columns; bars are drawn against the collective that takes longest.

    `ideals` where they are known, the schedule where some are `planned`.
    """

    def split(row: CollectiveView, width: int) -> Line:
        if row.transfer_ms is None or row.wait_ms is None:
            return stacked([(row.ms / longest_ms, TRANSFER, "muted")], width)
        parts = [(row.transfer_ms / longest_ms, TRANSFER, "accent"), (row.wait_ms / longest_ms, WAIT, "warn")]
        return stacked(parts, width)  # type: ignore[arg-type]

    return [
        col("call", "collective", lambda r: line(r.kind), 14, flex=1, max_width=24),
        *([col("plan", "schedule", _schedule, 9, priority=3)] if planned else []),
        col("dtype", "dtype", lambda r: _muted(r.dtype), 8, priority=8),
        col("group", "ranks", _group, 5, flex=1, priority=6, max_width=20),
        col("calls", "×", lambda r: line((fmt.number(r.calls), "muted")), 4, "right", priority=3),
        col("size", "one call", lambda r: _optional(fmt.size(call_bytes(r))), 8, "right", priority=2),
        col("bytes", "a step", lambda r: _optional(fmt.size(r.bytes_step)), 8, "right", priority=1),
        col("ms", "time", lambda r: line((fmt.ms(r.ms), "strong")), 8, "right"),
        Column("split", "█ transfer ▒ wait", split, 14, flex=3, priority=4, max_width=48, drawn=True),
        col("wait", "wait", _wait, 8, "right"),
        col("exposed", "exposed", lambda r: line(fmt.ms(r.exposed_ms)), 8, "right"),
        col("alg", "algbw", lambda r: _optional(fmt.number(r.algbw_gbps)), 6, "right", priority=5),
        col("bus", "busbw", lambda r: _optional(fmt.number(r.busbw_gbps)), 6, "right"),
        *(_ideal_columns() if ideals else ()),
        col("last", "last in", _last, 8, priority=5),
        col("layer", "layer", lambda r: line((r.layer, "muted")), 10, flex=1, priority=7, max_width=30),
    ]


def _ideal_columns() -> list[Column[CollectiveView]]:
    return [
        col("ideal", "ideal", lambda r: _optional(fmt.ms(r.ideal_ms)), 8, "right", priority=6),
        col("ratio", "of it", lambda r: _optional(fmt.share(r.ideal_ratio)), 6, "right", priority=4),
    ]


class CommsPane(Pane):
    """The collectives table and the bandwidth over message size."""

    TITLE: ClassVar[str] = "Comms"
    FOCUS: ClassVar[str] = "#collectives"
    HELP: ClassVar[str | None] = """\
Each line is one kind of collective of one size in one group, per step and rank.

**Wait** is time spent until the last rank arrived: the shortest duration over the ranks is the **transfer**, the
rest is waiting. **Exposed** is what no computation covered. **algbw** = bytes / time; **busbw** scales it by what the
algorithm must move, so that it compares with the link; the convention of this run is printed below the table.
**Ideal** is the least that one call can take: one latency and the bytes over the slowest link on its way, from the
calibrated graph (`costlab topo --calibrate`); **of it** = ideal / transfer. A faint wait is within what the clocks of
the ranks are uncertain by. Curves in the plot: `costlab bench collectives` on this machine, and the calibrated link.

A run with `--schedule` says below the table which **all-reduce** schedule each message got, its time and that of the
library's **own**, both measured before the first step.

`s` sorts, `p` shows the plot where there is little room.
"""
    SCOPED_CSS = False  # the rules look at the screen's size classes
    DEFAULT_CSS = """
    CommsPane #pane-body { overflow: hidden; }
    CommsPane #collectives { height: auto; max-height: 55%; min-height: 4; }
    CommsPane #schedules { margin: 1 0 0 1; height: auto; max-height: 4; display: none; }
    CommsPane.-planned #schedules { display: block; }
    CommsPane #convention { margin: 1 0 0 1; height: auto; max-height: 7; }
    CommsPane #plot { height: 1fr; max-height: 24; min-height: 10; margin-top: 1; display: none; }
    CommsPane.-plot #plot { display: block; }
    .-short CommsPane #plot { display: none; }
    .-short CommsPane.-plot.-forced #plot { display: block; height: 1fr; margin-top: 0; }
    .-short CommsPane.-forced #collectives { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort", id="comms.sort"),
        Binding("p", "plot", "Plot", id="comms.plot"),
    ]

    sort: str = "ms"

    def body(self) -> ComposeResult:
        """Figures, table, convention, plot."""
        yield FigureStrip(id="headline")
        yield Table[CollectiveView](columns(1.0), id="collectives")
        yield Lines(id="schedules", classes="wrap")
        yield Lines(id="convention", classes="wrap")
        yield BandwidthPlot(id="plot")

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """No collectives: one rank, or none recorded."""
        view = report.collectives
        if view is not None and (view.rows or view.schedules):
            return ()
        why = view.note if view and view.note else "The run recorded no collectives."
        return lacking(why, line(("n", "accent"), "  record one with two ranks or more"))

    def fill(self, report: RunReport) -> None:
        """Show the run."""
        view = report.collectives
        assert view is not None
        self.query_one("#headline", FigureStrip).show(headline(view))
        table = self.query_one("#collectives", Table)
        longest = max((r.ms for r in view.rows), default=1.0) or 1.0
        ideals, planned = any(r.ideal_ms is not None for r in view.rows), any(r.schedule for r in view.rows)
        table.set_columns(columns(longest, ideals, planned))
        self._show_rows()
        self.query_one("#schedules", Lines).show(schedules(view))
        self.set_class(bool(view.schedules), "-planned")
        self.query_one("#convention", Lines).show(notes(view))
        points = bandwidth_points(view)
        self.set_class(len({x for p in points for x in p.x}) >= MIN_SIZES, "-plot")
        self.query_one("#plot", BandwidthPlot).show(points)

    def _show_rows(self) -> None:
        view = self.report.collectives if self.report else None
        if view is None:
            return
        rows = sorted(view.rows, key=lambda r: -(_sort_value(r, self.sort) or 0.0))
        table = self.query_one("#collectives", Table)
        table.set_rows(rows, cursor=0)
        table.mark_sorted(self.sort)

    def action_sort(self) -> None:
        """Next order."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self._show_rows()

    @on(Table.HeadingClicked, "#collectives")
    def _heading(self, event: Table.HeadingClicked) -> None:
        if event.key in SORTS:
            self.sort = event.key
            self._show_rows()

    def action_plot(self) -> None:
        """Plot instead of the table where both do not fit."""
        self.toggle_class("-forced")

    def pointed(self) -> Named | None:
        """A headline figure or the bus bandwidth of the line."""
        table = self.screen.focused
        view = self.report.collectives if self.report else None
        if isinstance(table, Table) and isinstance(table.row, CollectiveView) and view is not None:
            row = table.row
            reached = "" if row.ideal_ratio is None else f"; {fmt.share(row.ideal_ratio)} of the ideal: {row.ideal_how}"
            return computed(f"busbw of {row.kind}", row.busbw_gbps, "GB/s", view.convention + reached)
        return super().pointed()


def _sort_value(row: CollectiveView, key: str) -> float | None:
    size = None if row.bytes_step is None else float(row.bytes_step)
    values = {"ms": row.ms, "bytes": size, "exposed": row.exposed_ms, "wait": row.wait_ms}
    return values.get(key, row.busbw_gbps)


def headline(view: CollectivesView) -> list[Named]:
    """Traffic, the formula's traffic, time, and how it splits."""
    found: list[Named] = []
    if view.bytes_per_step is not None:
        found.append(Named("traffic a step", view.bytes_per_step, tone="accent"))
    parts = [
        ("exposed", view.exposed_ms, "communication no computation covered, per profiled step"),
        ("transfer", view.transfer_ms, "shortest duration over the ranks, summed over the calls of a step"),
        (
            "wait",
            view.wait_ms,
            "duration beyond the shortest over the ranks: waiting for the last one, in slowed steps",
        ),
        ("in all", view.total_ms, "duration of all collectives of a step, mean over ranks"),
    ]
    found += [_part(view, name, value, how) for name, value, how in parts if value is not None]
    if view.overlapped is not None:
        found.append(computed("overlapped", view.overlapped, "fraction", "1 - exposed / all communication time"))
    if view.expected_bytes is not None:
        found.append(Named("by formula", view.expected_bytes))
    return found


def _part(view: CollectivesView, name: str, value: float, how: str) -> Named:
    """A time of a step; waiting is a difference between ranks and carries their clocks' uncertainty."""
    doubt = view.wait_doubt_ms if name == "wait" else None
    if doubt is None:
        return computed(name, value, "ms", how)
    figure = Figure(
        value=value, unit="ms", source="derived", low=max(value - doubt, 0.0), high=value + doubt,
        how=f"{how}; range: the clocks' uncertainty of {fmt.number(view.clock_uncertainty_us)} us a call",
    )  # fmt: skip
    return Named(name, figure, f"{fmt.ms(value)} ±{fmt.ms(doubt)}")


PROFILED = (
    "times are of the profiled steps: their hosts are slower, so ranks wait longer than in a plain step; "
    "Overview holds the plain step's share"
)


def notes(view: CollectivesView) -> list[Line]:
    """The slowest rank, the bandwidth convention, what is missing."""
    ways = list(dict.fromkeys(r.ideal_how for r in view.rows if r.ideal_how))
    ideal = f"ideal: {ways[0]}{f' (and {len(ways) - 1} other ways)' if len(ways) > 1 else ''}" if ways else ""
    muted = [view.clock, ideal, view.convention, view.note]
    profiled = PROFILED if view.rows else ""
    texts = [("", view.straggler), ("", profiled), *(("muted", text) for text in muted)]
    return [line((text, tone)) for tone, text in texts if text]  # type: ignore[arg-type]


def schedules(view: CollectivesView) -> list[Line]:
    """The all-reduce schedule of each message of the step, else of each measured size."""
    used = [s for s in view.schedules if s.used] or view.schedules
    if not used:
        return []
    spans: list[tuple[str, Tone]] = [("all-reduce  ", "strong")]
    for place, row in enumerate(used[:SCHEDULES]):
        beside = f", own {fmt.ms(row.library_ms)}" if row.library_ms is not None and row.ms != row.library_ms else ""
        spans += [("; " if place else "", "muted"), (f"{fmt.size(row.bytes)}: ", "muted"), (row.schedule, "accent")]
        spans.append((f" {fmt.ms(row.ms)}{beside}", "muted"))
    more = f"; {len(used) - SCHEDULES} more sizes" if len(used) > SCHEDULES else ""
    return [line(*spans, (more, "muted")), line((view.schedules_how, "muted"))]


def bandwidth_points(view: CollectivesView) -> list[Points]:
    """Bus bandwidth over the size of a call: the machine's curves, then the run's own, one series for each kind."""
    series: dict[str, Points] = {}
    for row in sorted(view.rows, key=lambda r: call_bytes(r) or 0):
        size = call_bytes(row)
        if row.busbw_gbps is None or not size:
            continue
        marker = MARKERS[len(series) % len(MARKERS)]
        points = series.setdefault(row.kind, Points(row.kind, marker))
        points.x.append(float(size))
        points.y.append(row.busbw_gbps)
    curves = [
        Points(c.name, CURVES[n % len(CURVES)], [float(b) for b in c.bytes], list(c.busbw_gbps), joined=True)
        for n, c in enumerate(view.curves)
    ]
    return [*curves, *series.values()]

"""Log: the event stream of the run being recorded, else of the open one; filtered by rank, level and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.timer import Timer
from textual.widgets import Input

from costlab.app.analysis.views import RunReport
from costlab.app.tui.cells import Line, line
from costlab.app.tui.dialogs.base import Message
from costlab.app.tui.eventlines import LEVELS, MARKS, TONES, Level, level_of, rank_text, text_of_event
from costlab.app.tui.panes.base import NO_RUN, SearchPane, lacking
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Column, Table, col
from costlab.probes.records import AnyEvent, Failure, Heartbeat, Progress

REFRESH_S = 1.0


@dataclass(frozen=True)
class LogFilter:
    """`rank` None is all ranks; `level` is the least level shown."""

    rank: int | None = None
    level: Level = "info"
    text: str = ""

    @property
    def words(self) -> str:
        """The filter in words."""
        parts = ["" if self.rank is None else rank_text(self.rank)]
        parts += ["" if self.level == "info" else f"{self.level} and above"]
        parts += [f"“{self.text}”" if self.text else ""]
        return " · ".join(p for p in parts if p) or "all events"


def passes(event: AnyEvent, wanted: LogFilter) -> bool:
    """Whether an event is shown. Progress is for the live pane; here it would bury the rest."""
    return (
        not isinstance(event, Progress | Heartbeat)
        and (wanted.rank is None or event.rank == wanted.rank)
        and LEVELS.index(level_of(event)) >= LEVELS.index(wanted.level)
        and wanted.text.lower() in text_of_event(event).lower()
    )


class LogPane(SearchPane):
    """One line an event; `enter` shows it in full."""

    TITLE: ClassVar[str] = "Log"
    FOCUS: ClassVar[str] = "#events"
    HELP: ClassVar[str | None] = """\
Events of the run being recorded, else of the open run. Times count from the run's first event.

`w` goes through the ranks, `v` through the levels, `/` searches, `end` follows the newest line, `enter` shows a line in
full with its traceback.
"""
    DEFAULT_CSS = """
    LogPane #pane-body { overflow: hidden; }
    LogPane #log { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/", id="log.search"),
        Binding("w", "rank", "Rank", id="log.rank"),
        Binding("v", "level", "Level", id="log.level"),
        Binding("x,escape", "clear", "Clear filters", show=False, id="log.clear"),
    ]

    wanted: LogFilter = LogFilter()
    _count: int = -1
    _timer: Timer | None = None

    def body(self) -> ComposeResult:
        """Filter line, events, search line."""
        with Vertical(id="log"):
            yield Lines(id="filter")
            yield Table[AnyEvent](self._columns(), id="events", header=False)
            yield Input(id="search", compact=True, placeholder="part of a line")

    def _columns(self) -> list[Column[AnyEvent]]:
        return [
            col("t", "", lambda e: line((f"{e.t - self._began():.1f} s", "muted")), 9, "right"),
            col("rank", "", lambda e: line((rank_text(e.rank), "muted")), 8),
            col("mark", "", lambda e: line((MARKS[level_of(e)], TONES[level_of(e)])), 1),
            col("text", "", lambda e: line((text_of_event(e), TONES[level_of(e)])), 20, flex=1),
        ]

    def _began(self) -> float:
        events = self.session.events
        return events[0].t if events else 0.0

    def on_mount(self) -> None:
        """Look for new events while a run is recorded and the pane is shown."""
        self._timer = self.set_interval(REFRESH_S, self._follow)

    def _follow(self) -> None:
        if self.display and self.session.recording:
            self.refill()

    def on_show(self) -> None:
        """Catch up."""
        self.show(self.session.report)

    def show(self, report: RunReport | None) -> None:
        """Events may be there without a report."""
        self.report = report
        events = self.session.events
        if not events:
            reason: Sequence[Line] = NO_RUN if report is None else lacking("The run has no stored events.")
            self.query_one("#pane-empty", Lines).show(reason)
        self.set_class(not events, "-empty")
        self._count = -1
        self.refill()

    def refill(self) -> None:
        """Show the events that pass; the cursor follows if it was at the end."""
        events = self.session.events
        if len(events) == self._count:
            return
        self._count = len(events)
        self.set_class(not events, "-empty")
        rows = [e for e in events if passes(e, self.wanted)]
        table = self.query_one("#events", Table)
        at_end = not table.rows or table.cursor >= len(table.rows) - 1
        table.set_rows(rows, cursor=len(rows) - 1 if at_end else None)
        shown = line((f" {len(rows):,} of {len(events):,}  ", "strong"), (self.wanted.words, "accent"))
        self.query_one("#filter", Lines).show([shown])

    def change(self, wanted: LogFilter) -> None:
        """Apply a filter."""
        self.wanted = wanted
        self._count = -1
        self.refill()

    def action_rank(self) -> None:
        """Next rank."""
        ranks: list[int | None] = [None, *sorted({e.rank for e in self.session.events})]
        at = ranks.index(self.wanted.rank) if self.wanted.rank in ranks else -1
        self.change(replace(self.wanted, rank=ranks[(at + 1) % len(ranks)]))

    def action_level(self) -> None:
        """Next level."""
        at = LEVELS.index(self.wanted.level)
        self.change(replace(self.wanted, level=LEVELS[(at + 1) % len(LEVELS)]))

    def action_clear(self) -> None:
        """No filter."""
        self.query_one("#search", Input).value = ""
        self.query_one("#search").remove_class("-on")
        self.change(LogFilter())
        self.take_focus()

    def search(self, text: str) -> None:
        """Show what has this text in it."""
        self.change(replace(self.wanted, text=text))

    @on(Table.Chosen, "#events")
    def _chosen(self, event: Table.Chosen) -> None:
        self.app.push_screen(full_event(event.row))


def full_event(event: AnyEvent) -> Message:
    """The whole text of an event."""
    text = text_of_event(event)
    lines = [line(part) for part in text.splitlines()] or [line("")]
    if isinstance(event, Failure):
        lines += [line((part, "muted")) for part in event.traceback.splitlines()]
        lines += [line(("try  ", "muted"), event.advice)] if event.advice else []
        text = "\n".join(p for p in (text, event.traceback, event.advice) if p)
    return Message(f"event · {rank_text(event.rank)}", lines, copy=text)

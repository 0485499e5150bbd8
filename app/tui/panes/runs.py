"""Runs: the stored runs and the samples; open, mark and compare, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message

from costlab.app import figures as fmt
from costlab.app.analysis.views import RunReport
from costlab.app.store import RunSummary, runs_directory
from costlab.app.tui.cells import EMPTY, Line, line, run_status
from costlab.app.tui.panes.base import Pane, computed
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import Named
from costlab.app.tui.widgets.table import Column, Table, col
from costlab.app.whatif.store import Accuracy, accuracy

PREDICTED = 4  # toggles of the record of predictions
IMPORT_HINT = line(
    ("traces recorded elsewhere  ", "muted"), ("costlab import FILE", "accent"), ("  makes a run of them", "muted")
)


@dataclass(frozen=True)
class RunLine:
    """A stored run, or a sample by its name."""

    summary: RunSummary | None = None
    sample: str = ""
    marked: bool = False
    opened: bool = False

    @property
    def path(self) -> Path | None:
        """Where a stored run is."""
        return self.summary.path if self.summary else None


def run_lines(session: Session) -> list[RunLine]:
    """Stored runs, newest first, then samples."""
    loaded = session.loaded
    here = loaded.path if loaded and not loaded.sample else None
    sample = loaded.sample if loaded else ""
    stored = [RunLine(s, marked=s.path in session.marked, opened=s.path == here) for s in session.runs]
    return [*stored, *(RunLine(sample=name, opened=name == sample) for name in session.samples)]


def _mark(row: RunLine) -> Line:
    if row.marked:
        return line(("■", "accent"))
    return line(("▸", "accent")) if row.opened else EMPTY


def when(created: str) -> str:
    """An ISO time as local date and time."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return created


def _when(row: RunLine) -> Line:
    return line((when(row.summary.created) if row.summary else "sample", "muted"))


def _title(row: RunLine) -> Line:
    if row.summary is None:
        return line(row.sample)
    return line(row.summary.title or row.summary.id)


def _status(row: RunLine) -> Line:
    return run_status(row.summary.status) if row.summary else line(("◇ recorded elsewhere", "muted"))


def _duration(row: RunLine) -> Line:
    seconds = row.summary.duration_s if row.summary else None
    return line(fmt.seconds(seconds)) if seconds is not None else EMPTY


COLUMNS: list[Column[RunLine]] = [
    col("mark", "", _mark, 1),
    col("when", "recorded", _when, 16),
    col("title", "run", _title, 24, flex=3, max_width=90),
    col("status", "status", _status, 12, flex=1, max_width=22),
    col("duration", "took", _duration, 8, "right", priority=2),
    col("id", "id", lambda r: line((r.summary.id if r.summary else "", "faint")), 16, flex=1, priority=3, max_width=36),
]


class RunsPane(Pane):
    """The list of runs."""

    TITLE: ClassVar[str] = "Runs"
    FOCUS: ClassVar[str] = "#runs"
    HELP: ClassVar[str | None] = """\
`enter` opens, `space` marks, `c` compares the two marked runs (or the marked one with the one under the cursor),
`d` deletes after asking. `▸` is the open run, `■` a marked one.

`predictions off by` is the running record of what-ifs: the median of |measured − predicted| by toggle; all of it with
`costlab predictions`.

Runs live in `$COSTLAB_HOME/runs`. Traces recorded elsewhere become runs with `costlab import`.
"""
    DEFAULT_CSS = """
    RunsPane #pane-body { overflow: hidden; }
    RunsPane #runs { height: 1fr; }
    RunsPane #about { height: auto; max-height: 6; padding: 1 1 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "mark", "Mark", id="runs.mark"),
        Binding("c", "compare", "Compare", id="runs.compare"),
        Binding("d,delete", "delete", "Delete", id="runs.delete"),
        Binding("s", "app.samples", "Samples", id="runs.samples"),
        Binding("o", "app.open", "Open path", id="runs.open-path"),
    ]

    class OpenAsked(Message):
        """Open this run or sample."""

        def __init__(self, row: RunLine) -> None:
            self.row = row
            super().__init__()

    class CompareAsked(Message):
        """Compare two runs."""

        def __init__(self, first: Path, second: Path) -> None:
            self.first = first
            self.second = second
            super().__init__()

    class DeleteAsked(Message):
        """Delete these runs, after asking."""

        def __init__(self, paths: Sequence[Path]) -> None:
            self.paths = list(paths)
            super().__init__()

    _record: Sequence[Line] = ()

    def body(self) -> ComposeResult:
        """List and facts."""
        yield Table[RunLine](COLUMNS, id="runs")
        yield Lines(id="about", classes="wrap")

    def show(self, report: RunReport | None) -> None:
        """The list does not depend on a run being open."""
        self.report = report
        self.store_changed()

    def store_changed(self) -> None:
        """List again."""
        self._record = prediction_record(accuracy())
        rows = run_lines(self.session)
        self.set_class(not rows, "-empty")
        if not rows:
            self.query_one("#pane-empty", Lines).show(nothing(self.session))
            return
        self.query_one("#runs", Table).set_rows(rows)
        self._about()

    def on_mount(self) -> None:
        """The list may have come before the pane."""
        self.store_changed()

    @property
    def current(self) -> RunLine | None:
        """The line under the cursor."""
        row = self.query_one("#runs", Table).row
        return row if isinstance(row, RunLine) else None

    @on(Table.Moved, "#runs")
    def _about(self) -> None:
        row = self.current
        self.query_one("#about", Lines).show([*(about(row) if row else ()), *self._record])

    @on(Table.Chosen, "#runs")
    def _chosen(self, event: Table.Chosen) -> None:
        self.post_message(self.OpenAsked(event.row))

    def action_mark(self) -> None:
        """Mark or unmark; the oldest of more than two marks is dropped."""
        path = self.current.path if self.current else None
        if path is None:
            self.notify("Samples cannot be marked: open one first", timeout=3)
            return
        marks = self.session.marked
        if path in marks:
            marks.remove(path)
        else:
            marks.append(path)
            del marks[:-2]
        self.store_changed()
        self.query_one("#runs", Table).action_move(1)

    def action_compare(self) -> None:
        """Compare the marked runs, or the marked one with the current one, or the open one with the current one."""
        pair = self._pair()
        if pair is None:
            self.notify("Mark two runs with space, then press c", timeout=4)
        else:
            self.post_message(self.CompareAsked(*pair))

    def _pair(self) -> tuple[Path, Path] | None:
        here = self.current.path if self.current else None
        opened = self.session.loaded.path if self.session.loaded else None
        found = [*self.session.marked]
        for path in (opened, here) if not found else (here,):
            if path is not None and path not in found:
                found.append(path)
        return (found[0], found[1]) if len(found) >= 2 else None

    def action_delete(self) -> None:
        """Delete the marked runs, else the one under the cursor."""
        here = self.current.path if self.current else None
        paths = self.session.marked or ([here] if here else [])
        live = self.session.live
        if self.session.recording and live is not None and live.run_dir in paths:
            self.notify("That run is being recorded", severity="warning", timeout=4)
        elif paths:
            self.post_message(self.DeleteAsked(paths))
        else:
            self.notify("Samples are part of the installation", timeout=3)

    def pointed(self) -> Named | None:
        """The duration of the run under the cursor."""
        row = self.current
        if row is None or row.summary is None:
            return None
        return computed(f"took: {row.summary.id}", row.summary.duration_s, "s", "from start to last table", "measured")


def about(row: RunLine) -> list[Line]:
    """What is known of a run without opening it."""
    if row.summary is None:
        return [line(("sample  ", "muted"), row.sample), line(("enter opens it; it is unpacked on first use", "muted"))]
    summary = row.summary
    lines = [line(("id    ", "muted"), summary.id), line(("path  ", "muted"), str(summary.path))]
    if summary.problem:
        lines.append(line(("note  ", "warn"), summary.problem))
    return [*lines, IMPORT_HINT]


def prediction_record(known: Sequence[Accuracy]) -> list[Line]:
    """How far the predictions of what-ifs were off, the toggles predicted most often first; one line."""
    told = [f"{a.toggle} {100 * a.median_error:.1f} % (n={a.count})" for a in known[:PREDICTED]]
    return [line(("predictions off by  ", "muted"), ", ".join(told))] if told else []


def nothing(session: Session) -> list[Line]:
    """The empty store."""
    lines = [line(("No runs yet.", "strong")), EMPTY, line(("n", "accent"), "  record one on this machine")]
    if session.samples:
        lines.append(line(("s", "accent"), f"  open a sample: {', '.join(session.samples)}"))
    lines += [line(("o", "accent"), "  open a run directory by its path"), EMPTY, IMPORT_HINT]
    lines.append(line(("runs are kept in ", "muted"), str(runs_directory())))
    if session.problem:
        lines.append(line(("! ", "warn"), session.problem))
    return lines

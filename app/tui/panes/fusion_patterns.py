"""Anti-patterns of the user's model: where each stands, what it costs a step, what mends it."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.views import PatternView
from costlab.app.tui.cells import EMPTY, Line, crop_start, line
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Column, Table, col

COST_HOW = {
    "derived": "measured time of the kernels that exist only for it, per step",
    "modelled": "its bytes at the copy bandwidth measured in this run, per step",
    "": "no cost is known: it moves no data of its own, and no kernel runs only for it",
}


def _number(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def _cost(row: PatternView) -> Line:
    return line((fmt.ms(row.cost_ms), "strong")) if row.cost_ms is not None else line((fmt.MISSING, "faint"))


PATTERNS: list[Column[PatternView]] = [
    col("cost", "cost", _cost, 8, "right"),
    col("how", "how", lambda r: line((r.cost_kind or "unknown", "muted")), 8, priority=2),
    col("kind", "anti-pattern", lambda r: line(r.kind.replace("_", " ")), 16, flex=1, max_width=26),
    Column("layer", "layer", lambda r, w: line(crop_start(r.layer or "model", w)), 14, flex=2, max_width=44),
    col("phase", "phase", lambda r: line((r.phase, "muted")), 9, priority=4),
    col("count", "×", lambda r: line((fmt.count(r.count), "muted")), 4, "right", priority=3),
    col("bytes", "bytes", lambda r: _number(fmt.size(r.bytes or None)), 8, "right", priority=5),
    Column("where", "where", lambda r, w: line((crop_start(r.source, w), "muted")), 13, flex=1, max_width=34),
]
NONE: tuple[Line, ...] = (
    line(("No anti-pattern was found in the graphs of this run.", "strong")),
    EMPTY,
    line("Runs that were not compiled, imported traces and older runs are not searched for them."),
)


class PatternPanel(Vertical, can_focus=True):
    """All anti-patterns, the costliest first; the one under the cursor in full below."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    PatternPanel { height: 1fr; display: none; }
    PatternPanel #pattern-head { margin: 0; }
    PatternPanel #patterns { height: 1fr; }
    PatternPanel #pattern-text { height: auto; max-height: 8; padding: 0 1; border-top: hkey $faint; }
    PatternPanel.-none #patterns { display: none; }
    PatternPanel.-none #pattern-text { display: none; }
    """

    def compose(self) -> ComposeResult:
        """Head, table, the one under the cursor."""
        yield Lines(id="pattern-head", classes="wrap")
        yield Table[PatternView](PATTERNS, id="patterns")
        yield Lines(id="pattern-text", classes="wrap")

    def show(self, rows: Sequence[PatternView]) -> None:
        """Show a run's anti-patterns."""
        self.set_class(not rows, "-none")
        self.query_one("#pattern-head", Lines).show([summary(rows)] if rows else NONE)
        self.query_one("#patterns", Table).set_rows(rows, cursor=0)
        self.query_one("#pattern-text", Lines).show(pattern_lines(rows[0]) if rows else ())

    def take_focus(self) -> None:
        """Focus the table, or where there is none the panel."""
        (self if self.has_class("-none") else self.query_one("#patterns", Table)).focus()

    @on(Table.Moved, "#patterns")
    def _moved(self, event: Table.Moved) -> None:
        event.stop()
        if isinstance(event.row, PatternView):
            self.query_one("#pattern-text", Lines).show(pattern_lines(event.row))


def summary(rows: Sequence[PatternView]) -> Line:
    """How many, and what those with a known cost cost together."""
    known = [r.cost_ms for r in rows if r.cost_ms is not None]
    noun = "anti-pattern" if len(rows) == 1 else "anti-patterns"
    cost = f"  {fmt.ms(sum(known))} a step" if known else ""
    rest = f", {len(rows) - len(known)} of unknown cost" if known and len(known) < len(rows) else ""
    return line((f" {fmt.count(len(rows))} {noun}", "strong"), (cost + rest, "muted"))


def pattern_lines(row: PatternView) -> list[Line]:
    """What it is and where, what it costs and how that is known, what mends it."""
    place = "  ".join(p for p in (row.layer or "model", row.phase, row.source) if p)
    cost = f"{fmt.ms(row.cost_ms)} a step, {row.cost_kind}: " if row.cost_ms is not None else ""
    return [
        line((place, "strong")),
        line(row.text),
        line(("cost  ", "accent"), cost + COST_HOW[row.cost_kind]),
        line(("mend  ", "accent"), row.mend),
    ]

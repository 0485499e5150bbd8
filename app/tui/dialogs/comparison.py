"""Two runs side by side: the answer first, then what changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from costlab.app import figures as fmt
from costlab.app.analysis.compare import Change, Comparison, Verdict
from costlab.app.report.compare import render_comparison, signed, verdict
from costlab.app.tui.cells import EMPTY, Line, Tone, line
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Column, Table, col

VERDICTS: dict[Verdict, tuple[str, Tone]] = {
    "better": ("● better", "good"),
    "worse": ("○ worse", "bad"),
    "same": ("= same", "muted"),
    "unknown": ("", "muted"),
}


@dataclass(frozen=True)
class ChangeLine:
    """A figure in both runs, or the title of a group."""

    change: Change | None
    title: str = ""


def change_lines(c: Comparison) -> list[ChangeLine]:
    """Step, parts, figures, memory."""
    rows = [ChangeLine(c.step)] if c.step else []
    for title, group in (("where the step changed", c.parts), ("figures", c.headline), ("memory", c.memory)):
        if group:
            rows += [ChangeLine(None, title), *(ChangeLine(change) for change in group)]
    return rows


def _value(row: ChangeLine, amount: float | None) -> Line:
    if row.change is None:
        return EMPTY
    text = fmt.value(amount, row.change.unit)
    return line((text, "faint" if text == fmt.MISSING else ""))


def _name(row: ChangeLine) -> Line:
    return line((row.title, "muted")) if row.change is None else line("  " + row.change.name)


def _change(row: ChangeLine) -> Line:
    if row.change is None or row.change.change is None:
        return EMPTY
    return line((signed(row.change.change, row.change.unit), "strong"))


def _ratio(row: ChangeLine) -> Line:
    if row.change is None or row.change.ratio is None:
        return EMPTY
    return line(signed(row.change.ratio, "fraction"))


COLUMNS: list[Column[ChangeLine]] = [
    col("name", "", _name, 21, flex=1, max_width=40),
    col("a", "A", lambda r: _value(r, r.change.a if r.change else None), 10, "right", flex=1, max_width=20),
    col("b", "B", lambda r: _value(r, r.change.b if r.change else None), 10, "right", flex=1, max_width=20),
    col("change", "change", _change, 10, "right", flex=1, max_width=18),
    col("ratio", "", _ratio, 7, "right", priority=1),
    col("verdict", "", lambda r: line(VERDICTS[r.change.verdict]) if r.change else EMPTY, 8),
]


class Compare(Dialog[None]):
    """The comparison of two runs; `y` copies all of it as Markdown."""

    DEFAULT_CSS = """
    Compare > #dialog { width: 110; height: 92%; }
    Compare #dialog-content { height: 1fr; overflow: hidden; }
    Compare #runs-compared { margin-bottom: 1; }
    Compare #changes { height: 1fr; min-height: 8; margin-top: 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y,c", "copy", "Copy", show=False, id="compare.copy")]

    def __init__(self, comparison: Comparison) -> None:
        super().__init__("two runs compared")
        self.comparison = comparison

    def content(self) -> ComposeResult:
        """Verdict and caveats, then the changes."""
        yield Lines(run_names(self.comparison), id="runs-compared")
        yield Lines(heading_lines(self.comparison), classes="wrap")
        yield Table[ChangeLine](COLUMNS, id="changes")

    def on_mount(self) -> None:
        """Fill the table."""
        table = self.query_one("#changes", Table)
        table.set_rows(change_lines(self.comparison))
        table.focus()

    def keys(self) -> Line:
        """Copy and close."""
        return keys(("y", "copy as Markdown"), ("↑ ↓", "scroll"), ("esc", "close"))

    def action_copy(self) -> None:
        """Copy the comparison."""
        self.app.copy_to_clipboard(render_comparison(self.comparison, "md"))
        self.notify("Copied through the terminal (OSC 52)", timeout=3)


def run_names(c: Comparison) -> list[Line]:
    """The two runs."""
    runs = (("A  ", c.a), ("B  ", c.b))
    return [line((letter, "accent"), run.title, (f"  {run.id}", "faint")) for letter, run in runs]


def heading_lines(c: Comparison) -> list[Line]:
    """The verdict, what moved, what cannot be compared and which options differ."""
    rows = [line((verdict(c), "strong"))]
    rows += [line(("· ", "muted"), text) for text in c.moved]
    rows += [
        line(("! ", "warn"), f"{m.what}: {m.a or '–'} / {m.b or '–'}", (f"  {m.effect}", "muted")) for m in c.mismatches
    ]
    options = [f"{m.what} {m.a or '–'} → {m.b or '–'}" for m in c.options]
    if options:
        rows.append(line(("options  ", "muted"), ", ".join(options)))
    return [*rows, line((c.note, "muted"))] if c.note else rows

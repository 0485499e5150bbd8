"""Where to write the report and in which format."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid
from textual.widgets import Input, Label

from costlab.app.tui.cells import Line
from costlab.app.tui.dialogs.ask import PathSuggester
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.widgets.choice import Choice
from costlab.app.tui.work import FORMATS, SUFFIXES

EVERYTHING = "everything"


class ExportTo(NamedTuple):
    """The answer."""

    form: str
    path: Path
    only_pane: bool = False  # what the pane shows, as Markdown


class Export(Dialog[ExportTo]):
    """Asks for format and file."""

    DEFAULT_CSS = """
    Export Grid { grid-size: 2; grid-columns: 8 1fr; grid-rows: 1; grid-gutter: 0 1; height: auto; }
    Export Label { color: $muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "write", "Write", show=False, priority=True, id="export.write"),
        Binding("down", "app.focus_next", show=False, id="export.next"),
        Binding("up", "app.focus_previous", show=False, id="export.previous"),
    ]

    def __init__(self, stem: str, pane: str) -> None:
        super().__init__("export the report")
        self.stem, self.pane = stem, pane

    def content(self) -> ComposeResult:
        """Format and path."""
        with Grid():
            yield Label("format")
            yield Choice(FORMATS, "md", id="form")
            yield Label("what")
            yield Choice((EVERYTHING, f"{self.pane} pane (Markdown)"), EVERYTHING, id="what")
            yield Label("file")
            yield Input(f"{self.stem}.md", id="path", compact=True, suggester=PathSuggester())

    def keys(self) -> Line:
        """Keys of the dialog."""
        return keys(("enter", "write"), ("← →", "format"), ("tab", "field"), ("esc", "back"))

    @on(Choice.Changed, "#what")
    def _what_changed(self, event: Choice.Changed) -> None:
        """A pane is Markdown."""
        if event.choice.value != EVERYTHING:
            self.query_one("#form", Choice).value = "md"

    @on(Choice.Changed, "#form")
    def _form_changed(self, event: Choice.Changed) -> None:
        """The suffix follows the format."""
        field = self.query_one("#path", Input)
        path = Path(field.value)
        if path.suffix in SUFFIXES.values():
            field.value = str(path.with_suffix(SUFFIXES[event.choice.value]))

    def action_write(self) -> None:
        """Dismiss with the answer."""
        text = self.query_one("#path", Input).value.strip()
        if text:
            only_pane = self.query_one("#what", Choice).value != EVERYTHING
            self.dismiss(ExportTo(self.query_one("#form", Choice).value, Path(text).expanduser(), only_pane))

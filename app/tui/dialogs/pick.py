"""Pick one of a few names."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import OptionList

from costlab.app.text import plain
from costlab.app.tui.cells import Line, line
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.widgets.lines import Lines


class Pick(Dialog[str]):
    """Dismisses with the name picked."""

    DEFAULT_CSS = """
    Pick > #dialog { width: 60; }
    Pick OptionList { background: $surface; border: none; padding: 0; height: auto; max-height: 12; margin-top: 1; }
    """

    def __init__(self, title: str, hint: str, names: Sequence[str]) -> None:
        super().__init__(title)
        self.hint = hint
        self.names = list(names)

    def content(self) -> ComposeResult:
        """The hint and the names."""
        yield Lines([line((self.hint, "muted"))], classes="wrap")
        yield OptionList(*(Content(plain(name)) for name in self.names))

    def keys(self) -> Line:
        """Keys of the dialog."""
        return keys(("enter", "open"), ("↑ ↓", "move"), ("esc", "back"))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.names[event.option_index])

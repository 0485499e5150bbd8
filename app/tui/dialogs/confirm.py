"""Questions with two answers; the harmless one is the default."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from costlab.app.tui.cells import Line, line
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.widgets.lines import Lines


class Confirm(Dialog[bool]):
    """Ask before something that cannot be undone. True only for an explicit yes."""

    DEFAULT_CSS = "Confirm > #dialog { width: 64; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", show=False, id="confirm.yes"),
        Binding("n,enter", "answer(False)", "No", show=False, id="confirm.no"),
    ]

    def __init__(self, title: str, *lines: str | Line, yes: str, no: str) -> None:
        super().__init__(title)
        self.lines = [line(text) if isinstance(text, str) else text for text in lines]
        self.yes = yes
        self.no = no

    def content(self) -> ComposeResult:
        """The question."""
        yield Lines(self.lines, classes="wrap")

    def keys(self) -> Line:
        """What each key does, in words."""
        return keys(("y", self.yes), ("n", self.no))

    def action_answer(self, answer: bool) -> None:
        """Dismiss with the answer."""
        self.dismiss(answer)

    def action_close(self) -> None:
        """Escape is the harmless answer."""
        self.dismiss(False)

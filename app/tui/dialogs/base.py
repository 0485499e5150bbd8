"""A modal dialog: a title, scrollable content, one line of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen

from costlab.app.tui.cells import Line, Span, line
from costlab.app.tui.widgets.lines import Lines

T = TypeVar("T")


def keys(*pairs: tuple[str, str]) -> Line:
    """A line of keys with what they do."""
    spans: list[Span] = []
    for key, text in pairs:
        spans += [(f"{key} ", "accent"), (f"{text}   ", "muted")]
    return line(*spans)


class Dialog(ModalScreen[T], Generic[T]):
    """Base of the dialogs. Escape dismisses with None."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > #dialog {
        width: 84; max-width: 96%; height: auto; max-height: 92%;
        background: $surface; border: round $faint; border-title-color: $accent-text; border-title-style: bold;
        padding: 1 2 0 2;
    }
    Dialog #dialog-content { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    Dialog #dialog-keys { margin-top: 1; height: 1; }
    Dialog.-narrow > #dialog { max-width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close", show=False, id="dialog.close")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self.heading = title

    def compose(self) -> ComposeResult:
        """Title, content, keys."""
        with Vertical(id="dialog") as box:
            box.border_title = " ".join(line(self.heading)[0][0].split()).replace("[", r"\[") if self.heading else ""
            with VerticalScroll(id="dialog-content", can_focus=False):
                yield from self.content()
            yield Lines([self.keys()], id="dialog-keys")

    def content(self) -> ComposeResult:
        """The widgets of the dialog."""
        yield from ()

    def keys(self) -> Line:
        """The keys of the dialog."""
        return keys(("esc", "close"))

    def action_close(self) -> None:
        """Dismiss without an answer."""
        self.dismiss(None)


class Message(Dialog[None]):
    """Something to read, with an optional text to copy."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "close", "Close", show=False, id="message.close"),
        Binding("c,y", "copy", "Copy", show=False, id="message.copy"),
        Binding("up,k", "scroll(-1)", show=False, id="message.up"),
        Binding("down,j", "scroll(1)", show=False, id="message.down"),
        Binding("pageup", "scroll(-10)", show=False, id="message.page-up"),
        Binding("pagedown,space", "scroll(10)", show=False, id="message.page-down"),
    ]

    def __init__(self, title: str, lines: Sequence[Line], copy: str = "") -> None:
        super().__init__(title)
        self.lines = tuple(lines)
        self.copy_text = copy

    def content(self) -> ComposeResult:
        """The lines."""
        yield Lines(self.lines, id="message", classes="wrap")

    def keys(self) -> Line:
        """Copy only where there is something to copy."""
        pairs = [("c", "copy")] if self.copy_text else []
        return keys(*pairs, ("esc", "close"))

    def action_copy(self) -> None:
        """Copy through the terminal (OSC 52)."""
        if self.copy_text:
            self.app.copy_to_clipboard(self.copy_text)
            self.notify("Copied through the terminal (OSC 52)", timeout=3)

    def action_scroll(self, lines: int) -> None:
        """Scroll the text."""
        self.query_one("#dialog-content").scroll_relative(y=lines, animate=False)

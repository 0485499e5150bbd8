"""Contextual help: the focused pane's text and every key that works right now."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen

from costlab.app.tui.cells import EMPTY, Line, line
from costlab.app.tui.dialogs.base import Message
from costlab.app.tui.widgets.lines import Lines


def key_lines(screen: Screen[object]) -> list[Line]:
    """The active bindings, the focused widget's first, each action once with all its keys; only ours have ids."""
    keys: dict[tuple[object, str], list[str]] = {}
    texts: dict[tuple[object, str], str] = {}
    for namespace, binding, enabled, _ in screen.active_bindings.values():
        if not enabled or not binding.description or not binding.id:
            continue
        action = (namespace, binding.action)
        keys.setdefault(action, []).append(screen.app.get_key_display(binding))
        texts[action] = binding.description
    return [line((f"{' '.join(shown):<14}", "accent"), texts[action]) for action, shown in keys.items()]


class Help(Message):
    """The help of a pane."""

    DEFAULT_CSS = """
    Help Markdown { background: $surface; padding: 0; margin: 0; }
    """

    def __init__(self, title: str, text: str, bindings: list[Line]) -> None:
        super().__init__(f"help · {title}", bindings)
        self.text = text

    def content(self) -> ComposeResult:
        """The pane's text, then the keys."""
        from textual.widgets import Markdown

        if self.text:
            yield Markdown(self.text)
        yield Lines([line(("keys", "strong")), EMPTY, *self.lines], classes="wrap")

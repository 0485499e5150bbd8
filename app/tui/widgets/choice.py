"""A one-line choice: ‹ value ›, changed with the arrow keys, a letter or a click."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from costlab.app.tui.cells import Line, fit
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned


class Choice(Toned, can_focus=True):
    """Choose one of a few values without a menu that covers the form."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = (
        "Choice { height: 1; background: $background;"
        + TONE_CSS
        + "&:focus { background: $cursor-line; text-style: bold; } }"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", "Previous value", show=False, id="choice.previous"),
        Binding("right,space", "turn(1)", "Next value", show=False, id="choice.next"),
    ]

    value: reactive[str] = reactive("")

    class Changed(Message):
        """Another value was chosen."""

        def __init__(self, choice: Choice) -> None:
            self.choice = choice
            super().__init__()

        @property
        def control(self) -> Choice:
            """The choice."""
            return self.choice

    def __init__(self, options: Sequence[str], value: str, *, id: str) -> None:
        super().__init__(id=id)
        self.options = list(options)
        self.set_reactive(Choice.value, value if value in self.options else self.options[0])

    def set_options(self, options: Sequence[str], value: str | None = None) -> None:
        """Replace the options, keeping the value where it is still one."""
        self.options = list(options)
        wanted = value if value is not None else self.value
        self.value = wanted if wanted in self.options else self.options[0]
        self.refresh()

    def choose(self, value: str) -> None:
        """Set the value and say so."""
        if value != self.value:
            self.value = value
            self.post_message(self.Changed(self))

    def action_turn(self, step: int) -> None:
        """Next or previous value, around the end."""
        index = self.options.index(self.value) + step
        self.choose(self.options[index % len(self.options)])

    def on_key(self, event: events.Key) -> None:
        """A letter goes to the next value that starts with it."""
        char = event.character
        if char is None or not char.isalnum():
            return
        start = self.options.index(self.value) + 1
        turned = self.options[start:] + self.options[:start]
        match = next((o for o in turned if o.lower().startswith(char.lower())), None)
        if match is not None:
            event.stop()
            self.choose(match)

    def on_click(self, event: events.Click) -> None:
        """Left of the value goes back, elsewhere forth."""
        self.action_turn(-1 if event.x < 2 else 1)

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        """The value between its arrows."""
        spans: Line = (("‹ ", "accent"), (self.value or "–", ""), (" ›", "accent"))
        return self.strip_of(fit(spans, self.size.width), self.rich_style)

"""The headline figures of a pane: label over value, a cursor to ask where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.strip import Strip

from costlab.app import figures as fmt
from costlab.app.analysis.views import Figure
from costlab.app.text import md
from costlab.app.tui.cells import Span, Tone, fit, length, line
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned


@dataclass(frozen=True)
class Named:
    """A figure with the name it has on screen; `shown` replaces the standard text of its value."""

    name: str
    figure: Figure
    shown: str = ""
    tone: Tone = "strong"

    @property
    def text(self) -> str:
        """The value with its unit."""
        return self.shown or fmt.figure(self.figure)


class FigureStrip(Toned, can_focus=True):
    """Two lines: names, values. Left and right move a cursor; `i` in the app explains the figure under it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = "FigureStrip { height: 2; margin: 0 0 1 0; background: $background;" + TONE_CSS + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Previous figure", show=False, id="figures.previous"),
        Binding("right", "step(1)", "Next figure", show=False, id="figures.next"),
        Binding("enter", "app.explain", "Explain", show=False, id="figures.explain"),
    ]

    items: reactive[tuple[Named, ...]] = reactive(())
    cursor: reactive[int] = reactive(0)

    def show(self, items: Sequence[Named]) -> None:
        """Replace the figures."""
        self.items = tuple(items)
        self.cursor = min(self.cursor, max(len(items) - 1, 0))

    @property
    def current(self) -> Named | None:
        """The figure under the cursor."""
        return self.items[self.cursor] if self.items else None

    def markdown(self) -> str:
        """The figures as a list."""
        return "\n".join(f"- {md(n.name)}: **{md(n.text)}** ({n.figure.source})" for n in self.items)

    def _placed(self) -> list[tuple[int, Named, int]]:
        """(index, figure, width): as many as fit, each at least as wide as its text."""
        room = self.size.width - 1
        widths = [max(len(n.name), length(line(n.text))) + 2 for n in self.items]
        count = len(widths)
        while count > 1 and sum(widths[:count]) > room:
            count -= 1
        spare = max(room - sum(widths[:count]), 0) // max(count, 1)
        grow = min(spare, 8)
        return [(i, self.items[i], widths[i] + grow) for i in range(count)]

    def render_line(self, y: int) -> Strip:
        """Names on the first line, values on the second."""
        spans: list[Span] = []
        for index, item, width in self._placed():
            here = self.has_focus and index == self.cursor
            mark: Span = ("▌" if here else " ", "accent")
            body = line((item.name, "muted")) if y == 0 else line((item.text, item.tone))
            spans += [mark, *fit(body, width - 1)]
        return self.strip_of(fit(tuple(spans), self.size.width), self.rich_style)

    def action_step(self, step: int) -> None:
        """Move the cursor."""
        if self.items:
            self.cursor = min(max(self.cursor + step, 0), len(self._placed()) - 1)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the clicked figure."""
        left = 0
        for index, _, width in self._placed():
            left += width
            if event.x < left:
                self.cursor = index
                return

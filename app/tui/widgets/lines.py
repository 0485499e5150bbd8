"""A block of toned lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.geometry import Size
from textual.strip import Strip

from costlab.app.text import md
from costlab.app.tui.cells import Line, crop, fit, text_of, wrap
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned


class Lines(Toned):
    """Lines cut with an ellipsis; with the class `wrap` they wrap, and what follows a label stays beside it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = "Lines { height: auto; width: 1fr;" + TONE_CSS + "}"

    def __init__(self, lines: Sequence[Line] = (), *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.lines: tuple[Line, ...] = tuple(lines)
        self._laid: tuple[int, list[Line]] | None = None

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        if tuple(lines) != self.lines:
            self.lines = tuple(lines)
            self._laid = None
            self.refresh(layout=True)

    def _at(self, width: int) -> list[Line]:
        """The lines as laid out for a width."""
        if self._laid is None or self._laid[0] != width:
            one_each = [crop(one, width) for one in self.lines]
            wrapped = [part for one in self.lines for part in wrap(one, width)] if self.has_class("wrap") else one_each
            self._laid = (width, wrapped)
        return self._laid[1]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """As many lines as there are at this width."""
        return len(self._at(width))

    def render_line(self, y: int) -> Strip:
        """One line."""
        width = self.size.width
        rows = self._at(width)
        return self.strip_of(fit(rows[y] if y < len(rows) else (), width), self.rich_style)

    def markdown(self) -> str:
        """The lines as a Markdown list."""
        return "\n".join(f"- {md(' '.join(text_of(one).split()))}" for one in self.lines if text_of(one).strip())

    @property
    def plain(self) -> str:
        """The characters shown."""
        return "\n".join(text_of(one) for one in self.lines)

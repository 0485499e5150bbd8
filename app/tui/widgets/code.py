"""Source code to read: numbered lines with the theme's own tones, scrolled in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.highlight import HighlightTheme, highlight
from textual.scroll_view import ScrollView
from textual.strip import Strip

from costlab.app.text import plain
from costlab.app.tui.cells import TONES, Line, Span, Tone, length, text_of
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned

TAB = 4
LEXERS = {"triton": "python", "cpp": "cpp"}


_TONES = {
    "Comment": "muted",
    "Keyword": "accent",
    "Name.Builtin": "accent",
    "Name.Decorator": "accent",
    "Name.Function": "strong",
    "Name.Class": "strong",
    "Literal.String": "good",
    "Literal.Number": "warn",
    "Operator.Word": "accent",
}


_NAMES = {token: str(token).removeprefix("Token.") for token in HighlightTheme.STYLES}


class Tones(HighlightTheme):
    """Tones in place of colours, so that every theme and a terminal without colour are served."""

    STYLES = {token: _TONES[name] for token, name in _NAMES.items() if name in _TONES}  # noqa: RUF012


def highlighted(source: str, language: str) -> list[Line]:
    """The lines of a source with their tones; control characters are gone, tabs are spaces."""
    rows = [plain(row.expandtabs(TAB)) for row in source.splitlines()]
    content = highlight("\n".join(rows), language=LEXERS.get(language, "text"), theme=Tones)
    text = content.plain
    tones: dict[object, Tone] = {tone: tone for tone in TONES if tone}
    lines: list[list[Span]] = [[]]
    at = 0
    for span in content.spans:
        tone = tones.get(span.style)
        if tone is None or span.start < at:
            continue
        _extend(lines, (text[at : span.start], ""))
        _extend(lines, (text[span.start : span.end], tone))
        at = min(span.end, len(text))
    _extend(lines, (text[at:], ""))
    return [tuple(spans) for spans in lines]


def _extend(lines: list[list[Span]], piece: Span) -> None:
    """Add a piece of text that may go over several lines."""
    text, tone = piece
    for number, part in enumerate(text.split("\n")):
        if number:
            lines.append([])
        if part:
            lines[-1].append((part, tone))


class Code(ScrollView, Toned, can_focus=True):
    """Lines of code; only those on screen are drawn."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = "Code { height: 1fr; scrollbar-size: 1 1; background: $background;" + TONE_CSS + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False, id="code.up"),
        Binding("j", "scroll_down", show=False, id="code.down"),
        Binding("G", "scroll_end", show=False, id="code.end"),
        Binding("space", "page_down", show=False, id="code.page-down"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the code and go to its start."""
        self.lines = lines
        widest = max((length(one) for one in lines), default=0)
        self.virtual_size = Size(widest + self._gutter if lines else 0, len(lines))
        self.scroll_to(0, 0, animate=False)
        self.refresh()

    @property
    def _gutter(self) -> int:
        return len(str(len(self.lines))) + 3

    def render_line(self, y: int) -> Strip:
        """One line: its number stays where the code scrolls sideways."""
        width = self.scrollable_content_region.width
        left, top = self.scroll_offset
        at = top + y
        if not 0 <= at < len(self.lines):
            return Strip.blank(width, self.rich_style)
        number = self.strip_of(((f"{at + 1:>{self._gutter - 2}}  ", "faint"),), self.rich_style)
        room = max(width - self._gutter, 0)
        body = self.strip_of(self.lines[at], self.rich_style).crop_extend(left, left + room, self.rich_style)
        return Strip.join([number, body]).adjust_cell_length(width, self.rich_style)

    @property
    def plain(self) -> str:
        """The code as text."""
        return "\n".join(text_of(one) for one in self.lines)

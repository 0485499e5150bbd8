"""A report before it is Markdown or terminal text: blocks of literal text. Renderers escape, nobody else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Code:
    """A name, path or command, shown as code."""

    text: str


Cell = str | Code


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the document's title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text; parts are joined as they are."""

    parts: Sequence[Cell]


@dataclass(frozen=True)
class Items:
    """A list of points; `numbered` gives them numbers."""

    items: Sequence[Sequence[Cell]]
    numbered: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headers.

    `right` are the indices of right-aligned columns, `wide` is the column that shrinks where room is short, `drop` are
    those that go first, in order, before any other goes from the right.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: frozenset[int] = frozenset()
    wide: int = 0
    drop: Sequence[int] = ()


@dataclass(frozen=True)
class Bar:
    """One bar: its length is `fraction` of the full width."""

    label: str
    value: str
    fraction: float
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """A bar chart; `total` closes it with a sum."""

    bars: Sequence[Bar]
    total: str = ""


@dataclass(frozen=True)
class Log:
    """Lines of output or of source, kept as lines; `language` is what Markdown highlights them as."""

    lines: Sequence[str]
    language: str = "text"


@dataclass(frozen=True)
class Details:
    """Blocks that most readers skip: folded in Markdown, left out of terminal text with a word on where they are."""

    summary: str
    blocks: Sequence[Block]


Block = Heading | Paragraph | Items | Table | Bars | Log | Details


@dataclass
class Document:
    """Blocks in order."""

    blocks: list[Block] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self.blocks.append(Heading(text, level))

    def say(self, *parts: Cell) -> None:
        """Add a paragraph, unless it is empty."""
        if any(p.text if isinstance(p, Code) else p for p in parts):
            self.blocks.append(Paragraph(parts))

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        right: Sequence[int] = (),
        wide: int = 0,
        drop: Sequence[int] = (),
    ) -> None:
        """Add a table, unless it has no rows."""
        if rows:
            self.blocks.append(Table(headers, rows, frozenset(right), wide, drop))

    def items(self, items: Sequence[Sequence[Cell]], numbered: bool = False) -> None:
        """Add a list, unless it is empty."""
        if items:
            self.blocks.append(Items(items, numbered))

    def details(self, summary: str, inner: Document) -> None:
        """Add folded blocks, unless there are none."""
        if inner.blocks:
            self.blocks.append(Details(summary, inner.blocks))


def sentence(text: str) -> str:
    """`text` with a capital and a full stop; "" stays empty."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', ':')) else '.'}" if text else ""

"""Markdown that GitHub shows well: tables, bars in a code fence, folded details. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from costlab.app.analysis.views import RunReport
from costlab.app.figures import bar
from costlab.app.report.content import build_document
from costlab.app.report.document import (
    Bars,
    Block,
    Cell,
    Code,
    Details,
    Document,
    Heading,
    Items,
    Log,
    Paragraph,
    Table,
)
from costlab.app.text import md, md_code, plain

CELL = 240  # characters of one table cell
TEXT = 2000  # characters of one piece of running text
BAR = 36


def render_markdown(report: RunReport) -> str:
    """The whole report; ends with a line feed."""
    return to_markdown(build_document(report))


def to_markdown(doc: Document) -> str:
    """Any document as Markdown."""
    return "\n\n".join(_blocks(doc.blocks)) + "\n"


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        yield _block(block)


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {md(text, TEXT, inside=True)}"
        case Paragraph(parts):
            return _inline(parts, TEXT)
        case Items(items, numbered):
            return "\n".join(f"{f'{n}.' if numbered else '-'} {_inline(i, TEXT)}" for n, i in enumerate(items, 1))
        case Table():
            return _table(block)
        case Bars():
            return _fence(bar_lines(block, BAR))
        case Log(lines, language):
            return _fence([plain(line) for line in lines], language)
        case Details(summary, inner):
            body = "\n\n".join(_blocks(inner))
            return f"<details>\n<summary>{md(summary, CELL)}</summary>\n\n{body}\n\n</details>"


def _inline(parts: Sequence[Cell], limit: int) -> str:
    return "".join(_cell(p, limit, inside=n > 0) for n, p in enumerate(parts)).strip()


def _cell(cell: Cell, limit: int, *, inside: bool) -> str:
    return md_code(cell.text, limit) if isinstance(cell, Code) else md(cell, limit, inside=inside)


def _table_cell(cell: Cell) -> str:
    return md_code(cell.text, CELL, inside=True) if isinstance(cell, Code) else md(cell, CELL, inside=True)


def _table(table: Table) -> str:
    rule = ["---:" if n in table.right else "---" for n in range(len(table.headers))]
    rows = [[_table_cell(h) for h in table.headers], rule, *([_table_cell(c) for c in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _fence(lines: Sequence[str], language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks at the start of a line in it."""
    longest = max((len(s) - len(s.lstrip("`")) for s in (line.lstrip() for line in lines)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def bar_lines(chart: Bars, width: int, room: int | None = None) -> list[str]:
    """A bar chart as aligned lines of plain text; bars are at most `width` cells, lines at most `room` if given."""
    labels = [plain(b.label, 30) for b in chart.bars]
    notes = [f"  ({plain(b.note, 40)})" if b.note else "" for b in chart.bars]
    wide = max([*map(len, labels), 5])
    values = max([*(len(plain(b.value)) for b in chart.bars), len(plain(chart.total))], default=0)
    if room is not None:
        width = max(min(width, room - wide - values - 4 - max(map(len, notes), default=0)), 1)
    lines = [
        f"{label:<{wide}}  {plain(b.value):>{values}}  {bar(b.fraction, width)}{note}"
        for label, note, b in zip(labels, notes, chart.bars, strict=True)
    ]
    if chart.total:
        lines += ["─" * (wide + 2 + values), f"{'step':<{wide}}  {plain(chart.total):>{values}}"]
    return [line.rstrip() for line in lines]

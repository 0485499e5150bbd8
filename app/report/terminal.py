"""Plain text for terminals and pipes: no colour, no control characters, wrapped to a width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from costlab.app.analysis.views import RunReport
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
from costlab.app.report.markdown import bar_lines
from costlab.app.text import plain

GAP = "  "
NARROWEST = 40  # a terminal narrower than that gets lines this long


def render_text(report: RunReport, width: int = 80) -> str:
    """The report for a terminal of `width` columns; long lists are left to the Markdown report."""
    return to_text(build_document(report), width)


def to_text(doc: Document, width: int = 80) -> str:
    """Any document as text; ends with a line feed."""
    columns = max(width, NARROWEST)
    lines: list[str] = []
    for block in doc.blocks:
        lines += [*_block(block, columns), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def _block(block: Block, width: int) -> Iterator[str]:
    match block:
        case Heading(text, level):
            yield from _heading(plain(text), level, width)
        case Paragraph(parts):
            yield from wrap(_inline(parts), width)
        case Items(items, numbered):
            for n, item in enumerate(items, 1):
                yield from wrap(_inline(item), width, f"{n}. " if numbered else "- ")
        case Table():
            yield from _table(block, width)
        case Bars():
            yield from (plain(line, width) for line in bar_lines(block, width, width))
        case Log(lines):
            yield from (f"  {plain(line, width - 2)}" for line in lines)
        case Details(summary, _):
            yield from wrap(f"({plain(summary)}: see the Markdown report)", width)


def _heading(text: str, level: int, width: int) -> Iterator[str]:
    lines = list(wrap(text.upper() if level == 2 else text, width))
    yield from lines
    if level < 3:
        yield ("═" if level == 1 else "─") * width


def wrap(text: str, width: int, bullet: str = "") -> Iterator[str]:
    """`text` in lines of at most `width` characters, hanging behind `bullet`."""
    hanging = " " * len(bullet)
    yield from textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent=hanging) or [bullet.rstrip()]


def _inline(parts: Sequence[Cell]) -> str:
    return "".join(_text(p) for p in parts).strip()


def _text(cell: Cell) -> str:
    return plain(cell.text if isinstance(cell, Code) else cell)


def _table(table: Table, width: int) -> Iterator[str]:
    cells = [[_text(c) for c in row] for row in table.rows]
    titles = list(table.headers)
    keep = _fitting(titles, cells, table, width)
    titles, cells = [titles[k] for k in keep], [[row[k] for k in keep] for row in cells]
    right = [k in table.right for k in keep]
    widths = _widths(titles, cells, keep.index(table.wide), width)
    if any(titles):
        yield _row(titles, widths, right)
        yield GAP.join("─" * w for w in widths)
    for row in cells:
        yield from _lines(row, widths, right, keep.index(table.wide))


def _natural(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(titles[n]), *(len(row[n]) for row in cells)) for n in range(len(titles))]


def _fitting(titles: list[str], cells: list[list[str]], table: Table, width: int) -> list[int]:
    """The columns that fit; empty ones go, then others until the one that shrinks has room for a few words."""
    natural = _natural(titles, cells)
    keep = [n for n in range(len(titles)) if titles[n] == "" or any(row[n] not in ("", "–") for row in cells)]
    if table.wide not in keep:
        keep = sorted({*keep, table.wide})

    def needed(columns: list[int]) -> int:
        others = sum(min(natural[k], 28) if k not in table.right else natural[k] for k in columns if k != table.wide)
        return others + min(natural[table.wide], 24) + len(GAP) * (len(columns) - 1)

    going = [k for k in (*table.drop, *reversed(range(len(titles)))) if k in keep and k != table.wide]
    for k in dict.fromkeys(going):
        if needed(keep) <= width or len(keep) <= 2:
            break
        keep.remove(k)
    return keep


def _widths(titles: list[str], cells: list[list[str]], wide: int, width: int) -> list[int]:
    """Natural widths, the shrinking column cut first, then the widest others, until the row fits."""
    widths = _natural(titles, cells)
    room = width - len(GAP) * (len(widths) - 1)
    spare = sum(widths) - room
    if spare > 0:
        cut = min(spare, max(widths[wide] - 24, 0))
        widths[wide] -= cut
    while sum(widths) > room and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    return widths


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool], wide: int) -> Iterator[str]:
    """A row whose wide cell goes on below."""
    parts = textwrap.wrap(row[wide], widths[wide]) if row[wide].strip() == row[wide] else []
    first, *rest = parts or [row[wide]]
    yield _row([*row[:wide], first, *row[wide + 1 :]], widths, right)
    for part in rest[:3]:
        yield _row([part if n == wide else "" for n in range(len(row))], widths, right)


def _row(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = (plain(c, w) for c, w in zip(row, widths, strict=True))
    return GAP.join(f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(cells, widths, right, strict=True))

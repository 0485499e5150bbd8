"""Styled text as plain values: what panes hand to widgets, independent of Textual's markup.

A `Line` is a tuple of (text, tone) spans. A tone names a role, never a colour; the theme decides how it looks. Text is
made safe for a terminal here, once, so nothing downstream parses or escapes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Final, Literal, get_args

from rich.cells import cell_len, set_cell_size

from costlab.app import figures
from costlab.app.text import plain
from costlab.probes.records import FusionStatus

Tone = Literal["", "muted", "faint", "strong", "accent", "good", "warn", "bad"]
Span = tuple[str, Tone]
Line = tuple[Span, ...]
Align = Literal["left", "right"]

TONES: Final[tuple[Tone, ...]] = get_args(Tone)
EMPTY: Final[Line] = ()

_WORD = re.compile(r" +|\d[\d,.]* [%µa-zA-Z/]{1,4}(?![^\s,.;:)\]])|[^ ]+")
_STATUS: Final[dict[FusionStatus, tuple[str, Tone]]] = {
    "complete": ("● C", "good"),
    "partial": ("◐ P", "warn"),
    "broken": ("○ B", "bad"),
    "unknown": ("? U", "muted"),
}
_RUN_STATUS: Final[dict[str, tuple[str, Tone]]] = {
    "complete": ("● complete", "good"),
    "running": ("◍ running", "accent"),
    "failed": ("✗ failed", "bad"),
    "cancelled": ("◌ cancelled", "warn"),
    "incomplete": ("◐ incomplete", "warn"),
}


def line(*spans: str | Span) -> Line:
    """Build a line; bare strings take the default tone, control characters become visible placeholders."""
    pairs: list[Span] = [(s, "") if isinstance(s, str) else s for s in spans]
    return tuple((plain(text), tone) for text, tone in pairs if text)


def status(value: FusionStatus) -> Line:
    """Fusion status by shape, letter and tone."""
    text, tone = _STATUS[value]
    return ((text, tone),)


def status_tone(value: FusionStatus) -> Tone:
    """Tone of a fusion status."""
    return _STATUS[value][1]


def run_status(value: str) -> Line:
    """Status of a run by shape, word and tone."""
    text, tone = _RUN_STATUS.get(value, (f"? {value}", "muted"))
    return line((text, tone))


def bar(share: float | None, width: int, tone: Tone = "accent", target: float | None = None) -> Line:
    """A horizontal bar of `share` (0..1) in eighths of a cell, with an optional target mark."""
    if share is None or width <= 0:
        return EMPTY
    cells = figures.bar(share, width)
    if target is None:
        return ((cells, tone),) if cells else EMPTY
    mark = min(int(min(max(target, 0.0), 1.0) * width), width - 1)
    cells = cells.ljust(width)
    return ((cells[:mark], tone), ("│", "strong"), (cells[mark + 1 :], tone))


def stacked(parts: Iterable[tuple[float, str, Tone]], width: int) -> Line:
    """Segments drawn end to end, each (share of `width`, fill character, tone)."""
    spans: list[Span] = []
    position = 0.0
    for share, fill, tone in parts:
        start = round(position * width)
        position += max(share, 0.0)
        count = min(round(position * width), width) - start
        if count > 0:
            spans.append((fill * count, tone))
    return tuple(spans)


def decimals(whole: float) -> int:
    """Decimals that give `whole` three significant digits: 2 below 10, 1 below 100, more below 1."""
    if not math.isfinite(whole) or whole == 0:
        return 0
    return max(2 - math.floor(math.log10(abs(whole))), 0)


def beside(value: float, whole: float) -> str:
    """`value` with the decimals of `whole`, so that a column of parts can be added up by eye; never a false zero."""
    digits = decimals(whole)
    text = f"{value:,.{digits}f}"
    return f"<{10**-digits:,.{digits}f}" if value > 0 and float(text.replace(",", "")) == 0 else text


def length(spans: Line) -> int:
    """Width in terminal cells."""
    return sum(cell_len(text) for text, _ in spans)


def crop(spans: Line, width: int) -> Line:
    """Shorten to `width` cells, with an ellipsis where something was cut."""
    if length(spans) <= width:
        return spans
    if width <= 0:
        return EMPTY
    kept: list[Span] = []
    room = width - 1
    for text, tone in spans:
        size = cell_len(text)
        kept.append((text if size <= room else set_cell_size(text, room), tone))
        room -= min(size, room)
        if room == 0:
            break
    return (*kept, ("…", "muted"))


def crop_start(text: str, width: int) -> str:
    """Shorten `text` to `width` cells keeping its end: the end of a path or a name tells it apart."""
    if cell_len(text) <= width:
        return text
    end = text
    while end and cell_len(end) > max(width - 1, 0):
        end = end[1:]
    return ("…" + end) if width > 0 else ""


def fit(spans: Line, width: int, align: Align = "left") -> Line:
    """Crop or pad to exactly `width` cells."""
    cut = crop(spans, width)
    pad = " " * (width - length(cut))
    if not pad:
        return cut
    return (*cut, (pad, "")) if align == "left" else ((pad, ""), *cut)


def text_of(spans: Line) -> str:
    """The characters without tones."""
    return "".join(text for text, _ in spans)


def wrap(spans: Line, width: int) -> list[Line]:
    """Break at spaces into lines of at most `width` cells.

    A first span that ends in a space is a label: the lines after the first are indented to what follows it.
    """
    label = cell_len(spans[0][0]) if len(spans) > 1 and spans[0][0].endswith(" ") else 0
    indent = label if label <= width // 2 and width - label >= 2 else 0  # room for one wide character
    rows: list[list[Span]] = [[]]
    used = 0
    for word, tone in _words(spans):
        size = cell_len(word)
        if not word.strip() and used + size > width:
            continue
        if used + size > width and used > (indent if len(rows) > 1 else 0) and word.strip():
            rows.append([(" " * indent, "")])
            used = indent
        for piece in _pieces(word, width - indent):
            if used + cell_len(piece) > width and used > indent:
                rows.append([(" " * indent, "")])
                used = indent
            rows[-1].append((piece, tone))
            used += cell_len(piece)
    return [crop(_joined(row), width) for row in rows]


def _joined(spans: Iterable[Span]) -> Line:
    """Neighbours of one tone as one span: fewer escape sequences to send."""
    return tuple(("".join(t for t, _ in group), tone) for tone, group in groupby(spans, key=lambda s: s[1]))


def _words(spans: Line) -> Iterable[Span]:
    """Words and the runs of spaces between them, each with its tone; a number and its unit are one word."""
    for text, tone in spans:
        for part in _WORD.findall(text):
            yield part, tone


def _pieces(word: str, width: int) -> Iterable[str]:
    """A word longer than a line, in parts that fit."""
    while width > 0 and cell_len(word) > width:
        head = set_cell_size(word, width).rstrip() or word[:1]
        yield head
        word = word[len(head) :]
    yield word

"""Small trends drawn with block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int) -> str:
    """`values` in order as one line of at most `width` cells, from their minimum to their maximum.

    More values than cells: each cell shows the largest of its share, so that no spike is lost. Non-finite values are
    gaps.
    """
    return "".join(chart(values, width, 1)) if len(values) >= width else "".join(chart(values, len(values), 1))


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`values` as columns of block characters over `height` lines, from their minimum to their maximum.

    Few values are drawn several cells wide each, so that the chart uses the width.
    """
    if not values or width <= 0 or height <= 0:
        return []
    cells = _shrink(values, width)
    stretch = max(1, min(width // len(cells), 4))
    finite = [v for v in cells if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    heights = [_eighths(v, low, high, height) for v in cells]
    return ["".join(_slice(h, row) * stretch for h in heights) for row in reversed(range(height))]


def _eighths(value: float, low: float, high: float, height: int) -> int:
    """Eighths of a line that a value stands tall, at least one where there is a value."""
    if not math.isfinite(value):
        return 0
    if high <= low:
        return height * 4
    return 1 + round((value - low) / (high - low) * (height * 8 - 1))


def _slice(eighths: int, row: int) -> str:
    """The character of one column in line `row`, counted from the bottom."""
    inside = min(max(eighths - row * 8, 0), 8)
    return _LEVELS[inside - 1] if inside else " "


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_largest(values[a:b]) for a, b in pairwise(edges)]


def _largest(values: Sequence[float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=math.nan)

"""A chart of plain characters for reports: bandwidth over message size, sizes on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from costlab.app.figures import number, size
from costlab.app.text import plain

CURVES = "·:~="
MARKS = "ox#*+@"
HEIGHT = 12
LEAST, MOST = 1e-3, 1e24  # what is beyond is no size and no bandwidth
LABEL = 16  # longest text below the axis


@dataclass(frozen=True)
class Series:
    """Points (bytes, GB/s); a curve is drawn under the others, its points joined."""

    name: str
    points: Sequence[tuple[float, float]]
    curve: bool = False

    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn, by size."""
        return sorted((x, y) for x, y in self.points if LEAST < x < MOST and 0 <= y < MOST)


def chart(
    series: Sequence[Series], width: int = 72, height: int = HEIGHT, at: Callable[[float], str] = size
) -> list[str]:
    """Lines of the chart with its legend, `at` names a place on the size axis; none where there is nothing to draw."""
    drawable = [s for s in series if s.finite()]
    points = [p for s in drawable for p in s.finite()]
    if not points:
        return []
    low, high = math.log10(min(x for x, _ in points)), math.log10(max(x for x, _ in points))
    top = max(y for _, y in points) or 1.0
    room = max(width - 9, 20)
    grid = [[" "] * room for _ in range(height)]

    def put(x: float, y: float, mark: str) -> None:
        column = round((x - low) / (high - low) * (room - 1)) if high > low else room // 2
        grid[height - 1 - round(min(y / top, 1.0) * (height - 1))][column] = mark

    legend = []
    curves, own = [s for s in drawable if s.curve], [s for s in drawable if not s.curve]
    for n, one in [*enumerate(curves), *enumerate(own)]:
        mark = (CURVES if one.curve else MARKS)[n % len(CURVES if one.curve else MARKS)]
        legend.append(f"{mark} {plain(one.name, 40)}")
        for x, y in _joined(one, (high - low) / room) if one.curve else one.finite():
            put(math.log10(x), y, mark)
    rows = [f"{_label(n, height, top)[:8]:>8}│{''.join(row).rstrip()}" for n, row in enumerate(grid)]
    left, right = at(10**low)[:LABEL], at(10**high)[:LABEL]
    return [*rows, f"{'':8}└{'─' * room}", f"{'':9}{left}{right:>{max(room - len(left), 1)}}", *legend]


def _label(row: int, height: int, top: float) -> str:
    """The axis' three values: at the top with the unit, in the middle, at the bottom."""
    if row == 0:
        return f"{number(top)}"
    if row == 1:
        return "GB/s"
    return "0" if row == height - 1 else number(top / 2) if row == height // 2 else ""


def _joined(one: Series, step: float) -> list[tuple[float, float]]:
    """The curve's points with those in between, so that no column is skipped."""
    found = one.finite()
    filled = found[:1]
    for (x0, y0), (x1, y1) in pairwise(found):
        parts = max(1, math.ceil(math.log10(x1 / x0) / step)) if step > 0 else 1
        filled += [(x0 * (x1 / x0) ** (k / parts), y0 + (y1 - y0) * k / parts) for k in range(1, parts + 1)]
    return filled

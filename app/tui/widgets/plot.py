"""Charts through plotext, imported when the first one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from textual.app import ComposeResult
from textual.color import Color
from textual.containers import Container

from costlab.app import figures as fmt
from costlab.app.text import plain

MAX_POINTS = 200


@dataclass
class Points:
    """A series; NaN and infinite values are left out when drawn."""

    name: str
    marker: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    joined: bool = False  # a curve to lay points on

    def finite(self) -> tuple[list[float], list[float]]:
        """The drawable points, at most MAX_POINTS."""
        pairs = [(a, b) for a, b in zip(self.x, self.y, strict=True) if math.isfinite(a) and math.isfinite(b) and a > 0]
        pairs = pairs[:: max(1, math.ceil(len(pairs) / MAX_POINTS))]
        return [a for a, _ in pairs], [b for _, b in pairs]


def size_ticks(low: float, high: float, most: int = 8) -> tuple[list[float], list[str]]:
    """Positions (log10 of bytes) and labels of 1-2-5 steps around two sizes, at most `most` of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = [step * 10.0**d for d in range(first, last + 1) for step in steps]
        shown = [v for v in values if low * 0.7 <= v <= high * 1.4]
        if len(shown) <= most:
            break
    shown = shown[:: math.ceil(len(shown) / most)] if shown else [low]
    return [math.log10(v) for v in shown], [fmt.size(v) for v in shown]


def round_ticks(high: float, most: int = 5) -> list[float]:
    """Round values from 0 to at least `high`: 0, 50, 100, 150, 200 for 160."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


class BandwidthPlot(Container):
    """Bandwidth over message size, sizes on a logarithmic axis."""

    DEFAULT_CSS = "BandwidthPlot PlotextPlot { height: 1fr; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.points: list[Points] = []

    def compose(self) -> ComposeResult:
        """The plot is mounted with its first data."""
        yield from ()

    def show(self, points: Sequence[Points]) -> None:
        """Draw other points."""
        self.points = list(points)
        self.call_after_refresh(self._draw)

    def _colours(self) -> list[tuple[int, int, int]]:
        """The theme's series colours; series differ by marker too."""
        names = ("accent-text", "status-partial", "status-complete", "status-broken")
        return [Color.parse(self.app.theme_variables[name]).rgb for name in names]

    async def _draw(self) -> None:
        from textual_plotext import PlotextPlot

        drawable = [(p, *p.finite()) for p in self.points]
        drawable = [d for d in drawable if d[1]]
        if not drawable or not self.is_attached:
            return
        if not self.query(PlotextPlot):
            await self.mount(PlotextPlot())
        widget = self.query_one(PlotextPlot)
        plt = widget.plt
        plt.clear_figure()
        sizes = [x for _, xs, _ in drawable for x in xs]
        plt.xticks(*size_ticks(min(sizes), max(sizes)))
        colours = self._colours()
        for number, (points, xs, ys) in enumerate(drawable):
            logs = [math.log10(x) for x in xs]
            colour = colours[number % len(colours)]
            draw = plt.plot if points.joined else plt.scatter
            draw(logs, ys, marker=points.marker, label=plain(points.name), color=colour)
        ticks = round_ticks(max(y for _, _, ys in drawable for y in ys))
        plt.yticks(ticks, [f"{t:g}" for t in ticks])
        plt.ylim(0, ticks[-1])
        plt.xlim(math.log10(min(sizes)) - 0.1, math.log10(max(sizes)) + 0.1)
        plt.title("busbw in GB/s by size of one call")
        widget.refresh()

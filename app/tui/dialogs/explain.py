"""Where a figure comes from: measured, derived, modelled or quoted; by what, over which sample."""

from __future__ import annotations

from collections.abc import Sequence

from costlab.app import figures as fmt
from costlab.app.analysis.views import Source
from costlab.app.tui.cells import EMPTY, Line, Tone, line
from costlab.app.tui.dialogs.base import Message
from costlab.app.tui.widgets.strip import Named

SOURCES: dict[Source, tuple[str, Tone]] = {
    "measured": ("■ measured", "good"),
    "derived": ("◆ derived", "accent"),
    "modelled": ("◇ modelled", "warn"),
    "quoted": ("❝ quoted", "muted"),
}
MEANING = (
    line(("measured", "good"), ("  read from a clock, counter or allocator in this run", "muted")),
    line(("derived", "accent"), ("   computed from measured figures only", "muted")),
    line(("modelled", "warn"), ("  rests on an assumption that is named", "muted")),
    line(("quoted", "muted"), ("    taken from a table or document with its date", "muted")),
)


def figure_lines(named: Named) -> list[Line]:
    """Name, value, source, sample, method."""
    figure = named.figure
    facts = [f"n = {figure.n}"] if figure.n is not None else []
    if interval := fmt.interval(figure):
        facts.append(interval)
    head = line((named.name, "muted"), "  ", (fmt.figure(figure), "strong"), "  ", SOURCES[figure.source])
    sample = line(("  " + "  ".join(facts), "muted")) if facts else EMPTY
    return [(*head, *sample), line(("  ", ""), figure.how) if figure.how else EMPTY]


class Explain(Message):
    """The figure under the cursor, or all figures of the pane."""

    def __init__(self, pane: str, pointed: Named | None, figures: Sequence[Named]) -> None:
        rest = [] if pointed else list(figures)
        lines: list[Line] = []
        for named in [*([pointed] if pointed else []), *rest]:
            lines += [*figure_lines(named), EMPTY]
        super().__init__(f"where it comes from · {pane}", [*lines, *MEANING])

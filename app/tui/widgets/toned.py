"""Mixin for widgets that draw their own lines: tones to styles, lines to strips."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from costlab.app.tui.cells import TONES, Line

TONE_CLASSES = {f"tone--{tone}" for tone in TONES if tone}
TONE_CSS = """
    & > .tone--muted { color: $muted; }
    & > .tone--faint { color: $faint; }
    & > .tone--strong { text-style: bold; }
    & > .tone--accent { color: $accent-text; }
    & > .tone--good { color: $status-complete; }
    & > .tone--warn { color: $status-partial; }
    & > .tone--bad { color: $status-broken; }
"""


class Toned(Widget):
    """A widget that turns lines into strips with the theme's colours."""

    def strip_of(self, spans: Line, base: Style) -> Strip:
        """One strip of `spans` over the `base` style."""
        segments = [
            Segment(text, base + self.get_component_rich_style(f"tone--{tone}", partial=True) if tone else base)
            for text, tone in spans
        ]
        return Strip(segments)

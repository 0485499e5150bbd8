"""Draws the pictures of the README from a sample run: `python tools/screenshots.py [SAMPLE]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from costlab.app.tui.app import CostlabApp

DOCS = Path(__file__).resolve().parent.parent / "docs"
PANES = {"overview": "1", "fusion": "2", "comms": "3", "checkpoint": "4"}


async def draw(sample: str) -> None:
    """One SVG a pane, 120 x 36."""
    app = CostlabApp([], sample=sample)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause(2.0)
        await app.workers.wait_for_complete()
        for name, key in PANES.items():
            await pilot.press(key)
            await pilot.pause(1.5)
            (DOCS / f"{name}.svg").write_text(app.export_screenshot(title="costlab"), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(draw(sys.argv[1] if len(sys.argv) > 1 else "h200x2-llama-1b"))

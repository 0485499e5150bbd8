"""What the first paint costs: nothing heavy is imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, sys
from costlab.app.tui.app import CostlabApp

async def paint() -> None:
    app = CostlabApp()
    async with app.run_test() as pilot:
        await pilot.pause()
        assert app.pane.id == "overview"

asyncio.run(paint())
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
HEAVY = {"torch", "triton", "pandas", "numpy", "pyarrow", "plotext", "textual_plotext", "networkx", "typer", "jinja2"}


def test_the_first_paint_imports_nothing_heavy(tmp_path: Path) -> None:
    env = {**os.environ, "COSTLAB_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())

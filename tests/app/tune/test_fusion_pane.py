"""The Fusion pane's candidates and the layers before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from costlab.app.tui.widgets.table import Table
from costlab.app.tune.stored import write_tuning
from tests.app.make_run import write_example_run
from tests.app.tui.driving import column, find, make_app, opened, settle, shown
from tests.app.tune.examples import tuning


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    write_example_run(tmp_path / "run", run_id="run")
    return tmp_path / "run"


@pytest.mark.parametrize("size", [(80, 24), (140, 44)])
async def test_candidates_and_before_after(run: Path, size: tuple[int, int]) -> None:
    write_tuning(tuning(), run)
    app = make_app(run)
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await pilot.press("2", "p")
        await settle(pilot)
        table = find(app, "#tune-candidates", Table)
        assert app.focused is table
        assert column(table, "decision") == ["● kept", "○ dropped", "○ dropped"]
        assert column(table, "measured") == ["-3.5 %", "+0.1 %", "–"]
        assert column(table, "policies") == ["rs", "r?", "·?"]
        text = shown(app)
        assert "1 kept of 2" in text and "-3.4 % [-4.0, -2.8]" in text and "beyond the noise" in text
        await pilot.press("down", "down")
        await settle(pilot, lambda: "no fused kernel computes this" in shown(app))
        await pilot.press("b")
        await settle(pilot)
        layers = find(app, "#tune-layers", Table)
        assert app.focused is layers
        assert column(layers, "rate_after") == ["0.90", "0.40"] and column(layers, "ms_after")[1] == "–"
        await pilot.press("b")
        await settle(pilot)
        assert not app.pane.has_class("-tune") and app.focused is find(app, "#layers", Table)
        await pilot.press("p", "escape")
        await settle(pilot)
        assert not app.pane.has_class("-tune")


async def test_a_run_that_was_not_tuned_says_what_to_do(run: Path) -> None:
    app = make_app(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await pilot.press("2", "p")
        await settle(pilot)
        assert "This run was not tuned" in shown(app) and "costlab tune RUN" in shown(app)
        await pilot.press("b", "escape")
        await settle(pilot)
        assert not app.pane.has_class("-tune")

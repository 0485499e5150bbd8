"""The runs that come with costlab, as they ship: listed where nothing is stored, and opened."""

from __future__ import annotations

import pytest

from costlab.app.analysis.build import build_report
from costlab.app.report import render_markdown
from costlab.app.store import open_sample, sample_names
from costlab.app.tui import work
from tests.app.tui.driving import make_app, settle, shown


@pytest.fixture
def real_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "sample_names", sample_names)


@pytest.mark.usefixtures("real_samples")
async def test_an_empty_store_offers_the_samples() -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("7")
        await settle(pilot)
        assert "◇ recorded" in shown(app)
        for name in sample_names():
            assert name in shown(app)


@pytest.mark.parametrize("name", sample_names())
def test_every_sample_makes_a_whole_report(name: str, tmp_path: object) -> None:
    report = build_report(open_sample(name))
    assert report.steps is not None
    assert report.steps.step_ms.n == 20
    assert report.waterfall is not None
    assert sum(p.ms for p in report.waterfall.parts) == pytest.approx(report.waterfall.step_ms)
    assert report.run.status == "complete"
    assert not [note for note in report.run.notes if "could not be" in note]
    assert "matrix math" in render_markdown(report)


def test_there_are_runs_of_both_kinds_of_machine() -> None:
    assert {"h200-llama-1b", "h200-llama-1b-eager", "h200-resnet50"} <= set(sample_names())
    assert any(name.startswith("cpu") for name in sample_names())

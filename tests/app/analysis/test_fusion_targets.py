"""Fusion targets from files, and the gap to them in time and money."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from costlab.app.analysis import fusion_targets as ft
from costlab.app.analysis.views import ClassRow, CostView, Figure, FusionView
from costlab.app.cli import app


@given(st.integers(0, 10**12), st.floats(0, 1), st.floats(0.05, 1))
@example(1250001, 0.99999, 0.1875)
def test_closing_the_gap_reaches_the_target_and_no_more(moved: int, share: float, target: float) -> None:
    lost = round(moved * share)
    gap = ft.gap_bytes(moved, lost, target)
    assert 0 <= gap <= lost
    if moved > gap:
        reached = 1 - (lost - gap) / (moved - gap)
        rounding = 0.51 / (moved - gap) + 1e-12  # the gap is a whole number of bytes, the nearest
        assert reached >= target - rounding
        if gap:
            assert reached <= target + rounding or gap == lost


def test_a_users_rules_go_before_the_built_in_ones() -> None:
    own = ft.parse('default = 0.8\n[[class]]\npattern = "*RMS*"\ntarget = 0.5\n', "t.toml", ft.builtin())
    assert (own.of("RMSNorm"), own.of("LayerNorm"), own.of("Whatever")) == (0.5, 0.98, 0.8)


@pytest.mark.parametrize(
    "text",
    ["default = 1.5", "default = 0", "default = nan", "default = 'x'", "defualt = 0.9", "[[class]]\npattern = 'a'",
     "[[class]]\npattern = 'a'\ntarget = 90", "=", "[[class]]\npattern = '\\u001b[31m'\ntarget = 2"],
)  # fmt: skip
def test_a_bad_file_is_one_line_that_names_it(text: str) -> None:
    with pytest.raises(ft.TargetsError) as error:
        ft.parse(text, "mine.toml", ft.builtin())
    assert str(error.value).startswith("mine.toml") and "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_the_stores_file_is_read_and_a_broken_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))
    assert ft.active() == ft.builtin()
    (tmp_path / "targets.toml").write_text("default = 0.7")
    assert ft.active().of("Whatever") == 0.7
    (tmp_path / "targets.toml").unlink()
    (tmp_path / "targets.toml").write_text("default = 7")
    broken = ft.active()
    assert broken.of("Whatever") == 0.95 and "targets.toml" in broken.problem


def test_targets_that_cannot_be_read_end_with_code_5(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "last", "--targets", str(tmp_path / "none.toml")])
    assert done.exit_code == 5
    assert "none.toml cannot be read" in done.stderr


def test_the_gap_in_money_is_that_of_all_gpus_over_the_run() -> None:
    row = ClassRow(
        layer_class="norm", layers=1, status="partial", rate=0.5, strict_rate=0.5, target=0.9, ms=1.0, bytes=100,
        lost=50, structural=0, saves_ms=0.5, gap_ms=2.0,
    )  # fmt: skip
    view = FusionView(rate=None, strict_rate=None, target=None, status="partial", quality=None, classes=[row])
    price = Figure(value=3.6, unit="USD/GPU-hour", source="quoted", how="")
    cost = CostView(price_per_gpu_hour=price, gpus=8, run_steps=1000)
    assert ft.priced(view, cost).classes[0].gap_run_money == pytest.approx(2.0 * 8 * 3.6 / 3.6e6 * 1000)
    assert ft.priced(view, CostView(gpus=8, run_steps=1000)).classes[0].gap_run_money is None

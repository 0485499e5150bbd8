"""Every form of a what-if, and the forest plot."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.analysis.views import Figure
from costlab.app.report.whatif import (
    answer,
    axis_labels,
    axis_of,
    forest,
    interval_cells,
    limits,
    render_accuracy,
    render_static_dynamic,
    render_whatif,
    verdict,
)
from costlab.app.whatif.engine import WhatIf
from costlab.app.whatif.results import Arm, WhatIfResult
from costlab.app.whatif.spec import make_whatif
from costlab.app.whatif.static_dynamic import static_dynamic, static_dynamic_spec
from costlab.app.whatif.store import Accuracy
from costlab.app.whatif.toggles import Machine
from costlab.probes.spec import RunSpec
from tests.app.make_model import NASTY
from tests.app.whatif.fakes import FakeMachine, out_of_memory

BASE = RunSpec(ranks=1, dtype="fp32", steps=10)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> WhatIfResult:
    """SGD is 10 % faster, recomputation 20 % slower, whole-model compile does not fit, bf16 does nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSTLAB_HOME", str(tmp_path_factory.mktemp("home")))
        speeds = {"sgd": 0.9, "block": 1.2}
        machine = FakeMachine(lambda s: speeds.get(s.optimizer, 1) * speeds.get(s.recompute, 1), noise=0.002)
        machine.fail = lambda s: out_of_memory() if s.compile == "model" else None
        spec = make_whatif(BASE, ["sgd", "recompute", "compile-model", "bf16"], legs=3, machine=Machine(gpus=1))
        folder = tmp_path_factory.mktemp("whatif")
        return WhatIf(spec, folder, launcher=machine).run(lambda _: None)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_says_each_answer_within_the_width(result: WhatIfResult, width: int) -> None:
    text = render_whatif(result, "text", width)
    flat = " ".join(text.split())
    assert "sgd is 1" in flat or "sgd is 9" in flat
    assert "faster in step time" in flat
    assert "compile-model does not fit: it needs at least 1.61 GB more" in flat
    assert "bf16: no difference in step time that the noise allows to see" in flat
    assert max(map(len, text.splitlines())) <= width


def test_markdown_has_the_tables_and_keeps_every_leg(result: WhatIfResult) -> None:
    text = render_whatif(result, "md")
    assert "| sgd |" in text
    assert "Predicted, then measured" in text
    assert f"All {len(result.legs)} legs" in text
    assert text.count("```") == 2


def test_json_reads_back_to_the_same_result(result: WhatIfResult) -> None:
    text = render_whatif(result, "json")
    assert msgspec.json.decode(text, type=WhatIfResult) == result
    assert json.loads(text)["schema_version"] == 1


def test_a_stale_result_says_so(result: WhatIfResult) -> None:
    assert "Stale" in render_whatif(result, "text", stale=True)
    assert "Stale" not in render_whatif(result, "text")


def test_hostile_names_are_harmless(result: WhatIfResult) -> None:
    arms = [msgspec.structs.replace(a, name=a.name + NASTY, failure=NASTY) for a in result.variants]
    bad = msgspec.structs.replace(result, variants=arms, title=NASTY, notes=[NASTY])
    assert "\x1b" not in render_whatif(bad, "text")
    markdown = render_whatif(bad, "md")
    assert "\x1b" not in markdown
    assert "<script>" not in markdown.replace("`<script>", "")


def test_the_forest_has_a_line_for_each_arm_and_its_verdict(result: WhatIfResult) -> None:
    lines = forest(result)
    assert len(lines) == 1 + len(result.variants) + 1
    zero = {line.index("│") for line in lines if "│" in line}
    assert len(zero) == 1
    assert lines[1].endswith("● faster")
    assert lines[-1].startswith("A/A control")
    assert any("✗ does not fit" in line for line in lines)


def arm(value: float, low: float, high: float) -> Arm:
    change = Figure(value=value, unit="fraction", source="measured", how="", low=low, high=high)
    return Arm(name="x", verdict="faster", change=change)


SHARES = st.floats(-0.99, 50, allow_nan=False)


@given(st.lists(st.tuples(SHARES, SHARES, SHARES).map(sorted), min_size=1, max_size=5), st.integers(12, 80))
def test_any_intervals_can_be_drawn_with_estimate_and_ends_in_order(rows: list[list[float]], cells: int) -> None:
    arms = [arm(middle, low, high) for low, middle, high in rows]
    axis = axis_of(arms, cells)
    assert axis.low < 0 < axis.high
    for one in arms:
        drawn = interval_cells(one.change, axis)
        assert len(drawn) == cells
        assert drawn.count("■") == 1
        assert drawn.find("├") <= drawn.index("■")
        assert drawn.find("┤") == -1 or drawn.index("■") <= drawn.index("┤")
    labels = axis_labels(axis)
    assert len(labels) == cells
    assert "0" in labels


def test_a_control_wider_than_the_axis_is_cut_and_says_so() -> None:
    control = msgspec.structs.replace(arm(0.01, -0.9, 9.0), name="A/A control")
    variant = arm(-0.1, -0.12, -0.08)
    axis = axis_of([variant, control], 40)
    assert axis.high < 0.1
    drawn = interval_cells(control.change, axis)
    assert drawn[0] == "◂"
    assert drawn[-1] == "▸"
    assert "├" in interval_cells(variant.change, axis)


def test_an_interval_that_tells_nothing_is_cut_and_is_not_called_no_difference(result: WhatIfResult) -> None:
    wild = msgspec.structs.replace(arm(0.32, -1.0, 566_304.0), verdict="no difference")
    tame = arm(-0.07, -0.26, 0.18)
    axis = axis_of([wild, tame], 40)
    assert axis.high < 0.6, "it does not squeeze the others"
    assert interval_cells(wild.change, axis)[-1] == "▸"
    assert limits(wild.change) == "[-100.0, >+1000]"
    words = answer(result, msgspec.structs.replace(wild, step_ms=result.baseline.step_ms))
    assert "hides whatever it does" in words and "no difference" not in words
    calm = msgspec.structs.replace(tame, verdict="no difference", step_ms=result.baseline.step_ms)
    assert "no difference in step time that the noise allows to see" in answer(result, calm)


def test_what_is_not_told_yet_is_not_called_invalid(result: WhatIfResult) -> None:
    early = Arm(name="x", verdict="invalid")
    assert verdict(early) == "· too few rounds"
    assert verdict(msgspec.structs.replace(early, failure="it crashed")) == "! invalid"
    one = msgspec.structs.replace(result, status="running", rounds=1)
    assert "1 complete round of" in render_whatif(one, "text")


def test_what_was_not_measured_draws_only_zero() -> None:
    axis = axis_of([arm(-0.1, -0.2, 0.0)], 20)
    assert interval_cells(None, axis).strip() == "│"


def test_static_against_dynamic_shows_quoted_beside_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    spec = static_dynamic_spec(BASE, legs=2)
    machine = FakeMachine(lambda s: 1.0 if s.compile == "none" else 0.8)
    table = static_dynamic(WhatIf(spec, tmp_path, launcher=machine).run(lambda _: None))
    text = render_static_dynamic(table, "md")
    assert "1.25 x" in text
    assert "quoted, not measured" in text
    assert "0.69 x" in text
    assert json.loads(render_static_dynamic(table, "json"))["quoted"]["speedup"] == 2.0


def test_accuracy_is_a_table_or_a_sentence() -> None:
    assert "sgd" in render_accuracy([Accuracy(toggle="sgd", count=3, median_error=0.012, inside=2)])
    assert "1.2 points" in render_accuracy([Accuracy(toggle="sgd", count=3, median_error=0.012, inside=2)])
    assert "no prediction" in render_accuracy([])

"""Two runs beside each other."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.compare import Comparison, change_of, compare_reports, median_difference
from costlab.app.report import render_comparison_json, render_comparison_markdown, render_comparison_text
from costlab.app.report.compare import signed, verdict
from costlab.app.store import Run
from tests.app.make_run import write_example_run
from tests.app.report.examples import example_report


def compared(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    return compare_reports(example_report(run_id="a", **a), example_report(run_id="b", **b))


def test_a_faster_run_is_faster_and_says_where() -> None:
    c = compared({}, {"speed": 1.25, "seed": 5})
    assert c.comparable
    assert c.step is not None
    assert c.step.verdict == "better"
    assert c.step.change is not None and c.step.low is not None and c.step.high is not None
    assert c.step.low < c.step.change < c.step.high < 0
    parts = {p.name: p for p in c.parts}
    assert sum(p.change or 0 for p in c.parts) == pytest.approx(c.step.change)
    assert sum(p.of_total or 0 for p in c.parts) == pytest.approx(1)
    assert parts["matrix math"].ratio == pytest.approx(-0.2)
    assert parts["matrix math"].verdict == "better"
    assert parts["host-device copies"].verdict == "same"
    assert c.moved[0].startswith("matrix math shrank by 4.53 ms")
    loss = next(r for r in c.layers if r.path == "loss")
    assert loss.change_ms == pytest.approx((loss.ms_a or 0) * -0.2)
    assert {k.kind for k in c.collectives} == {"all_gather", "reduce_scatter"}
    throughput = next(h for h in c.headline if h.name == "throughput")
    assert throughput.verdict == "better"
    cost = next(h for h in c.headline if h.name.startswith("cost"))
    assert cost.verdict == "better"


def test_the_same_run_again_is_no_difference() -> None:
    c = compared({}, {"seed": 9})
    assert c.step is not None
    assert c.step.verdict == "same"
    assert c.moved == []
    assert "No difference" in verdict(c)
    assert {p.verdict for p in c.parts} == {"same"}
    of_step = [h for h in c.headline if h.name in ("throughput", "MFU") or h.name.startswith("cost")]
    assert len(of_step) == 3
    assert {h.verdict for h in of_step} == {"same"}


def test_a_difference_of_two_runs_is_said_to_be_of_these_two() -> None:
    c = compared({}, {"speed": 1.25, "seed": 5})
    assert "95 % interval" in verdict(c) and "costlab whatif" in verdict(c)
    assert c.step is not None
    few = msgspec.structs.replace(c, step=msgspec.structs.replace(c.step, low=None, high=None))
    assert "too few steps for an interval" in verdict(few)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ranks": 4}, "world size"),
        ({"gpu": "NVIDIA H100"}, "device"),
        ({"device": "cpu"}, "torch"),
        ({"layers": 8}, "parameters"),
        ({"status": "incomplete"}, "status"),
        ({"ranks": 4}, "tokens a step"),
    ],
)
def test_what_is_not_comparable_is_flagged(options: dict[str, Any], what: str) -> None:
    c = compared({}, options)
    assert not c.comparable
    assert what in [m.what for m in c.mismatches]
    assert all(m.effect for m in c.mismatches)
    text = render_comparison_text(c)
    assert "NOT COMPARABLE" in text


def test_two_unfinished_runs_are_flagged() -> None:
    c = compared({"status": "cancelled"}, {"status": "cancelled"})
    assert c.mismatches[0].effect == "neither run completed"


def test_options_that_differ_are_the_point_and_not_a_mismatch() -> None:
    c = compared({}, {"compile": "none"})
    assert c.comparable
    assert [(m.what, m.a, m.b) for m in c.options] == [("compile", "block", "none")]


def test_layers_align_though_folded_differently(tmp_path: Path) -> None:
    a = example_report()
    path = write_example_run(tmp_path / "b")
    import pyarrow.parquet as pq

    from costlab.probes.records import SpanRow
    from costlab.probes.tables import write_rows

    for rank in (0, 1):
        folder = path / f"rank-{rank:05d}"
        rows = [SpanRow(**r) for r in pq.read_table(folder / "spans.parquet").to_pylist()]
        for row in rows:
            if row.layer == "layers.2.attention" and row.kind == "layer":
                row.addressable_lost, row.ms = (row.addressable_lost or 0) + 4096 * 8192, (row.ms or 0) + 1.0
        write_rows(folder, SpanRow, rows)
    b = build_report(Run(path))
    assert a.fusion is not None and b.fusion is not None
    assert {r.path for r in b.fusion.layers if r.depth == 2} >= {"layers.0-1,3", "layers.2"}
    c = compare_reports(a, b)
    attention = next(r for r in c.layers if r.path == "layers.*.attention")
    assert attention.ms_a is not None
    assert attention.ms_b == pytest.approx(attention.ms_a + 2.0)  # forward and backward
    assert (attention.status_a, attention.rate_b) == ("partial", pytest.approx(attention.rate_a, abs=0.1))


def test_a_run_without_steps_compares_as_far_as_it_goes() -> None:
    c = compared({}, {"omit": frozenset({"steps", "spans", "kernels", "collectives", "memory"})})
    assert (c.step, c.parts, c.layers) == (None, [], [])
    assert "cannot be compared" in verdict(c)
    assert next(h for h in c.headline if h.name == "throughput").b is None
    assert render_comparison_text(c) and render_comparison_markdown(c) and render_comparison_json(c)


@pytest.mark.parametrize("form", ["text", "md"])
def test_every_form_shows_the_verdict_and_fits(form: str) -> None:
    c = compared({"hostile": True}, {"hostile": True, "speed": 2.0})
    text = render_comparison_text(c) if form == "text" else render_comparison_markdown(c)
    assert "B's step is" in text
    assert "\x1b" not in text and "\u202e" not in text
    if form == "text":
        assert max(map(len, text.splitlines())) <= 80


def test_json_is_the_comparison() -> None:
    data = json.loads(render_comparison_json(compared({}, {"speed": 2.0})))
    assert data["comparable"] is True
    assert data["step"]["change"] < 0
    assert data["parts"][0]["name"] == "matrix math"


def test_the_bootstrap_interval_holds_what_it_should() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(60):
        a, b = ([rng.gauss(mean, 1) for _ in range(20)] for mean in (100, 101))
        limits = median_difference(a, b)
        assert limits is not None
        hits += limits[0] <= 1.0 <= limits[1]
    assert hits >= 52  # 95 % of 60 is 57; 52 is five standard deviations below
    assert median_difference([1.0] * 5, [1.0] * 20) is None
    assert median_difference([1.0] * 6, [3.0] * 6) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("a", "b", "more", "floor", "result"),
    [
        (100.0, 90.0, False, 0.0, "better"),
        (100.0, 110.0, False, 0.0, "worse"),
        (100.0, 110.0, True, 0.0, "better"),
        (100.0, 100.4, False, 0.0, "same"),
        (0.01, 0.02, False, 0.2, "same"),
        (None, 1.0, False, 0.0, "unknown"),
        (0.0, 0.0, False, 0.0, "same"),
    ],
)
def test_verdicts_of_single_figures(a: float | None, b: float, more: bool, floor: float, result: str) -> None:
    assert change_of("x", "ms", a, b, more_is_better=more, floor=floor).verdict == result


def test_changes_carry_their_sign() -> None:
    assert [signed(v, "ms") for v in (1.5, -1.5, 0.0, None)] == ["+1.50 ms", "-1.50 ms", "±0 ms", "–"]


def test_shares_change_by_points_and_rates_without_a_unit() -> None:
    c = compared({}, {"speed": 2.0})
    text = render_comparison_markdown(c)
    assert re.search(r"\| MFU \| 46 % \| \d+ % \| \+[\d.]+ points \|", text)
    assert re.search(r"\| fusion rate \| 0.82 \| 0.82 \| ±0 \|", text)

"""`--shapes`, the claimed strategy table and the report."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from costlab.app.cli import app
from costlab.app.shapes.parse import ShapeProblem, parse_shapes, written
from costlab.app.shapes.report import render_shapes
from costlab.app.shapes.strategy import advise, strategies
from costlab.probes.shapes_spec import PathResult, Recompile, Shape, ShapeCost, ShapesResult, ShapesSpec

SEEN = [Shape(batch=4, seq=64, count=3), Shape(batch=4, seq=128)]


def path(name: str, times: tuple[float, float], first: float = 0.0, peak: int | None = None) -> PathResult:
    costs = [
        ShapeCost(batch=s.batch, seq=s.seq, count=s.count, step_ms=t, low_ms=t, high_ms=t, first_ms=t + first)
        for s, t in zip(SEEN, times, strict=True)
    ]
    return PathResult(path=name, shapes=costs, peak_bytes=peak, compile_s=2 * first / 1e3)  # type: ignore[arg-type]


def result(*paths: PathResult) -> ShapesResult:
    spec = ShapesSpec(shapes=tuple(SEEN))
    return ShapesResult(
        date="2026-01-01T00:00:00+00:00", device="NVIDIA H200", torch="2.11", spec=spec, title="llama",
        shapes=SEEN, recompile_limit=8, paths=list(paths),
    )  # fmt: skip


AS_CLAIMED = (
    path("static", (1.0, 2.0), 5000, 30),
    path("mark_dynamic", (2.0, 3.0), 4000, 20),
    path("eager", (4.0, 5.0), 0, 10),
)


@given(st.lists(st.builds(Shape, batch=st.integers(1, 999), seq=st.integers(0, 9999), count=st.integers(1, 99))))
def test_shapes_are_read_back_as_written(found: list[Shape]) -> None:
    if found:
        assert parse_shapes(",".join(map(written, found))) == tuple(found)


@pytest.mark.parametrize(
    "text", ["", "4x", "x128", "4x0", "0x4", "-4x8", "4x128*0", "4x128;8", "٤x8", "4x8x2", "\x1b[31m"]
)
def test_text_that_names_no_shapes(text: str) -> None:
    with pytest.raises(ShapeProblem) as error:
        parse_shapes(text)
    assert "\x1b" not in str(error.value)


def test_the_mean_step_is_weighted_by_how_often_a_shape_was_seen() -> None:
    assert AS_CLAIMED[0].step_ms == pytest.approx((3 * 1.0 + 2.0) / 4)


def test_claims_that_hold_and_claims_that_do_not() -> None:
    assert [r.holds for r in strategies(result(*AS_CLAIMED))] == [True, True, True]
    slow = path("static", (6.0, 7.0), 5000, 30)
    assert [r.holds for r in strategies(result(slow, *AS_CLAIMED[1:]))] == [False, False, False]


def test_steps_within_each_others_range_show_nothing() -> None:
    noisy = path("static", (1.0, 2.0))
    noisy.shapes = [
        ShapeCost(**{**{f: getattr(s, f) for f in s.__struct_fields__}, "high_ms": 90.0}) for s in noisy.shapes
    ]
    assert {r.holds for r in strategies(result(noisy, *AS_CLAIMED[1:]))} == {None}


def test_a_path_that_failed_is_compared_with_nothing_and_planned_for_by_nobody() -> None:
    broken = PathResult(path="mark_dynamic", problem="ConstraintViolationError: it specialises")
    found = result(AS_CLAIMED[0], broken, AS_CLAIMED[2])
    assert {r.holds for r in strategies(found)} == {None}
    assert "mark_dynamic" not in {p.name for p in advise(found, 100).plans}
    assert "it specialises" in render_shapes(found, "text", 100)


def test_compiles_decide_a_short_run_and_steps_a_long_one() -> None:
    found = result(*AS_CLAIMED)
    assert advise(found, 10).plans[0].name == "eager"
    assert advise(found, 1_000_000).plans[0].name in ("compile every shape", "pad to buckets")


def test_json_has_the_strategies_and_the_advice() -> None:
    data = json.loads(render_shapes(result(*AS_CLAIMED), "json", 1000))
    assert [s["claim"]["path"] for s in data["strategies"]] == ["static", "mark_dynamic", "eager"]
    assert data["paths"][0]["step_ms"] == pytest.approx(1.25)
    assert data["advice"]["bucketing"]["buckets"]


def test_a_guard_from_a_strangers_model_is_escaped() -> None:
    static = path("static", (1.0, 2.0))
    static.recompiles = [Recompile(guard="\x1b[31m|<b>x", source="a.py:1", seconds=1.0, shape="4 x 64")]
    assert "\x1b" not in render_shapes(result(static), "text", 10)
    assert "<b>" not in render_shapes(result(static), "md", 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-s", "4y8"], "is no shape"),
        (["-s", "4x8", "--dtype", "fp8"], "choose from fp32, bf16"),
        (["-s", "4x8", "--steps", "0"], "above zero"),
        (["-s", "4x8", "-w", "bert"], "no workload 'bert'"),
        (["-s", "4x8", "--size", "huge"], "llama has no size 'huge'"),
        (["-s", ",".join(f"{n}x8" for n in range(1, 66))], "65 different shapes"),
        (["-s", "4x8,\x1b[31m9"], "'9' is no shape"),
        (["-s", "no/such/sampler.py:pairs"], "no such file: no/such/sampler.py"),
    ],
)
def test_bad_options_end_with_one_line_and_code_2(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["shapes", *options])
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1

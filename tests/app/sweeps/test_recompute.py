"""The recomputation sweep over legs of known speed: order, Pareto set, refusals, plot, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.sweeps.recompute import (
    PolicyPoint,
    Sweep,
    answer,
    default_policies,
    mark_pareto,
    plot,
    render,
    worthwhile,
)
from costlab.probes.records import FailureInfo
from costlab.probes.spec import RunSpec, SpecError
from tests.app.whatif.fakes import FakeMachine

BASE = RunSpec(device="cpu", ranks=1, steps=10)
POINTS = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0.1, 1e4)), st.one_of(st.none(), st.floats(1e6, 1e12))), max_size=12
)


def points_of(pairs: list[tuple[float | None, float | None]]) -> list[PolicyPoint]:
    return [PolicyPoint(policy=f"p{n}", step_ms=t, peak_bytes=m) for n, (t, m) in enumerate(pairs)]


def test_rounds_alternate_and_every_leg_is_lean(tmp_path: Path) -> None:
    machine = FakeMachine(lambda s: {"none": 1.0, "block": 1.3}[s.recompute])
    told: list[str] = []
    found = Sweep(BASE, ["none", "block", "none"], 2, machine).run(tmp_path, told.append, lambda _: None)
    assert [s.recompute for s in machine.started] == ["none", "block", "block", "none"]
    assert all(s.lean and not s.checkpoint and not s.profile_steps for s in machine.started)
    none, block = found.points
    assert (none.legs, block.legs) == (2, 2) and len(told) == 4
    assert block.step_ms == pytest.approx(1.3 * none.step_ms, rel=0.02)  # type: ignore[operator]
    assert none.pareto and none.low_ms <= none.step_ms <= none.high_ms  # type: ignore[operator]


def test_a_policy_that_is_refused_is_a_row_with_its_reason_and_not_tried_again(tmp_path: Path) -> None:
    machine = FakeMachine()
    why = FailureInfo(kind="spec", rank=0, phase="build", message="the forward draws random numbers")
    machine.fail = lambda s: why if s.recompute.startswith("budget") else None
    found = Sweep(BASE, ["none", "budget:0.5"], 2, machine).run(tmp_path, lambda _: None, lambda _: None)
    assert [s.recompute for s in machine.started] == ["none", "budget:0.5", "none"]
    assert found.points[1].failure == why.message and not found.points[1].pareto
    text = render(found, "text")
    assert "cannot run" in text and "The forward draws random numbers." in text


def test_cancelling_keeps_what_was_complete(tmp_path: Path) -> None:
    machine = FakeMachine()
    sweep = Sweep(BASE, ["none", "block"], 2, machine)
    machine.on_leg = lambda leg: sweep.cancel() if leg.spec.recompute == "block" else None
    found = sweep.run(tmp_path, lambda _: None, lambda _: None)
    assert found.cancelled and len(machine.started) == 2
    assert found.points[0].step_ms is not None and found.points[1].step_ms is None
    assert "Cancelled" in render(found, "md")


@pytest.mark.parametrize(
    "policy", ["budget", "budget:", "budget:2", "budget:-1", "budget:nan", "blocks", "operator:1", ""]
)
def test_what_is_no_policy_is_refused_before_anything_runs(policy: str) -> None:
    with pytest.raises(SpecError, match="--recompute"):
        Sweep(BASE, [policy], 1)


def test_budgets_need_a_compiled_model() -> None:
    eager = msgspec.structs.replace(BASE, compile="none")
    assert [p for p in default_policies(BASE) if p not in default_policies(eager)] == [
        "budget:0.75", "budget:0.5", "budget:0.25",
    ]  # fmt: skip
    with pytest.raises(SpecError, match=r"torch\.compile"):
        Sweep(eager, ["budget:0.5"], 1)


@given(POINTS)
def test_a_point_on_the_front_is_beaten_by_none_and_one_beside_it_by_some(
    pairs: list[tuple[float | None, float | None]],
) -> None:
    marked = mark_pareto(points_of(pairs))
    whole = [p for p in marked if p.step_ms is not None and p.peak_bytes is not None]
    for point in marked:
        beaten = point not in whole or any(
            o.step_ms <= point.step_ms and o.peak_bytes <= point.peak_bytes  # type: ignore[operator]
            and (o.step_ms, o.peak_bytes) != (point.step_ms, point.peak_bytes)
            for o in whole
        )  # fmt: skip
        assert point.pareto is not beaten
    assert bool(whole) is any(p.pareto for p in marked)
    assert answer(marked)


@given(POINTS)
def test_the_plot_shows_every_point_and_keeps_its_width(pairs: list[tuple[float | None, float | None]]) -> None:
    points = mark_pareto(points_of(pairs))
    whole = [p for p in points if p.step_ms is not None and p.peak_bytes is not None]
    lines = plot(points)
    assert bool(lines) is bool(whole)
    assert all(len(line) <= 80 for line in lines)
    body = "".join(line.partition("│")[2] for line in lines)
    assert 0 < sum(c != " " for c in body) <= len(whole) or not whole


def test_the_command_says_what_is_wrong_in_one_line() -> None:
    def costlab(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "costlab.app", "sweep", "recompute", "--device", "cpu", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, done.stderr

    code, error = costlab("-P", "half")
    assert code == 2 and error.strip().splitlines()[-1].startswith("costlab: --recompute: 'half'")
    assert costlab("--rounds", "0")[0] == 2
    assert costlab("--format", "xml")[0] == 2
    code, error = costlab("--output", "/no/such/folder/sweep.md")
    assert code == 2 and error == "costlab: cannot write /no/such/folder/sweep.md: no such folder\n"


def test_json_has_the_points(tmp_path: Path) -> None:
    found = Sweep(BASE, ["none"], 1, FakeMachine()).run(tmp_path, lambda _: None, lambda _: None)
    data = json.loads(render(found, "json"))
    assert data["points"][0]["policy"] == "none" and data["points"][0]["pareto"] is True


def test_what_saves_less_than_a_hundredth_of_the_memory_is_not_advised() -> None:
    noise = mark_pareto(points_of([(50.0, 607e6), (56.0, 606e6), (74.0, 603e6)]))
    assert all(p.pareto for p in noise)
    assert "recomputing buys nothing here" in answer(noise)
    real = mark_pareto(points_of([(50.0, 607e6), (56.0, 604e6), (74.0, 400e6)]))
    assert [p.step_ms for p in worthwhile(real)] == [50.0, 74.0]
    assert "56.0 ms" not in answer(real)

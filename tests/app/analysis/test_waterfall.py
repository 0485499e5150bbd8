"""The waterfall sums to the step, whatever the profiler did."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from costlab.app.analysis.views import CheckpointView, CollectivesView, Figure, StepsView, WaterfallView
from costlab.app.analysis.waterfall import BUSY, COMMUNICATION, IDLE, OVERHEAD, PARTS, exact, fit, waterfall_view
from costlab.probes.records import PartRow
from tests.app.analysis.tables import frame


def steps(ms: float, per_rank: list[float] | None = None) -> StepsView:
    return StepsView(step_ms=Figure(value=ms, unit="ms", source="measured", how=""), per_rank_ms=per_rank or [ms])


def rows(parts: dict[str, float], rank: int = 0, count: int = 2) -> list[PartRow]:
    return [PartRow(rank=rank, step=s, name=n, ms=v) for s in range(count) for n, v in parts.items()]


def view_of(parts: list[PartRow], ms: float, **more: object) -> WaterfallView:
    view = waterfall_view(frame(PartRow, parts), steps(ms), more.get("comm"), more.get("checkpoint"))  # type: ignore[arg-type]
    assert view is not None
    return view


def test_part_names_are_the_probes() -> None:
    from costlab.probes.trace import waterfall as probes

    assert PARTS == probes.PARTS
    assert IDLE == probes.IDLE
    assert tuple(name for name, _ in probes.BUSY) == BUSY


def test_busy_parts_stay_and_idle_shrinks_to_the_unprofiled_step() -> None:
    profiled = {"matrix math": 60.0, "memory-bound kernels": 20.0, "idle: launch": 30.0, OVERHEAD: 10.0}
    view = view_of(rows(profiled), 100.0)
    assert {p.name: p.ms for p in view.parts} == pytest.approx(
        {"matrix math": 60.0, "memory-bound kernels": 20.0, "idle: launch": 15.0, OVERHEAD: 5.0}
    )
    assert [p.name for p in view.idle] == ["idle: launch"]
    assert sum(p.share for p in view.parts) == pytest.approx(1)
    assert view.profiled_steps == 2
    assert "divided like the 40.0 ms of idle time" in view.method


def test_busier_than_the_step_is_scaled_and_said() -> None:
    view = view_of(rows({"matrix math": 90.0, COMMUNICATION: 30.0, "idle: sync": 5.0}), 100.0)
    assert {p.name: p.ms for p in view.parts} == pytest.approx(
        {"matrix math": 75.0, COMMUNICATION: 25.0, "idle: sync": 0.0}
    )
    assert "scaled down" in view.method


def test_time_without_a_cause_is_not_given_one() -> None:
    view = view_of(rows({"matrix math": 90.0}), 100.0)
    assert {p.name: p.ms for p in view.parts} == pytest.approx({"matrix math": 90.0, "idle: other": 10.0})
    assert "no recorded cause" in view.method


def test_ranks_are_averaged_also_where_a_part_is_absent_on_one() -> None:
    parts = rows({"matrix math": 40.0, COMMUNICATION: 20.0}, 0) + rows({"matrix math": 50.0}, 1, count=3)
    view = view_of(parts, 100.0)
    shown = {p.name: p.ms for p in view.parts}
    assert (shown["matrix math"], shown[COMMUNICATION]) == pytest.approx((45.0, 10.0))
    assert "mean over 2 ranks" in view.method


def test_the_ranks_spread_is_that_of_the_timed_steps() -> None:
    table = frame(PartRow, rows({"matrix math": 1.0}))
    assert waterfall_view(table, steps(10.0, [9.0, 10.0, 9.5]), None) is not None
    assert waterfall_view(table, steps(10.0, [9.0, 10.0, 9.5]), None).rank_spread_ms == 1.0  # type: ignore[union-attr]


def test_exposed_communication_names_waiting_and_transfer() -> None:
    comm = CollectivesView(wait_ms=6.0, transfer_ms=18.0)
    view = view_of(rows({"matrix math": 50.0, COMMUNICATION: 20.0, "idle: launch": 30.0}), 72.0, comm=comm)
    # 5 of 20 ms wait; computing and transferring keep their 65 ms; 7 ms are left for what took 35 ms
    assert {p.name: p.ms for p in view.parts} == pytest.approx(
        {"matrix math": 50.0, COMMUNICATION: 16.0, "idle: launch": 6.0}
    )
    assert next(p.note for p in view.parts if p.name == COMMUNICATION) == "wait 1, transfer 15"
    assert view.wait_ms == pytest.approx(1.0)
    assert "waiting for peers" in view.method
    alone = view_of(rows({COMMUNICATION: 20.0}), 100.0, comm=CollectivesView(wait_ms=None, transfer_ms=3.0))
    assert alone.parts[0].note == ""


def test_the_checkpoint_stall_is_named_beside_the_step_not_in_it() -> None:
    view = view_of(rows({"matrix math": 50.0}), 100.0, checkpoint=CheckpointView(every_steps=500, per_step_ms=6.2))
    assert math.fsum(p.ms for p in view.parts) == pytest.approx(100)
    assert "not in it: checkpoint stall, 6.20 ms a step" in view.method


def test_profiled_steps_alone_are_shown_as_they_are() -> None:
    only = StepsView(step_ms=Figure(value=150.0, unit="ms", source="measured", how=""), profiled_only=True)
    parts = rows({"matrix math": 60.0, "idle: launch": 30.0}, 0) + rows({"matrix math": 80.0, "idle: launch": 50.0}, 1)
    view = waterfall_view(frame(PartRow, parts), only, None)
    assert view is not None
    assert {p.name: p.ms for p in view.parts} == pytest.approx({"matrix math": 70.0, "idle: launch": 40.0})
    assert view.step_ms == pytest.approx(110.0)
    assert "profiler's own cost included" in view.method


def test_without_steps_or_parts_there_is_no_waterfall() -> None:
    assert waterfall_view(frame(PartRow, []), steps(10.0), None) is None
    assert waterfall_view(frame(PartRow, rows({"matrix math": 1.0})), None, None) is None


@given(
    st.dictionaries(st.sampled_from([*PARTS, "something new"]), st.floats(0, 1e4, allow_subnormal=False), min_size=1),
    st.floats(0.01, 1e4),
    st.floats(0, 1),
)
@example({"matrix math": 0.0, "idle: launch": 2.2250738585072014e-308}, 4.0, 0.0)
def test_parts_sum_to_the_step_exactly_and_none_is_negative(
    profiled: dict[str, float], step_ms: float, waiting: float
) -> None:
    fitted, wait, method = fit(profiled, step_ms, waiting)
    parts = exact(fitted, step_ms)
    assert 0 <= wait <= parts.get(COMMUNICATION, 0.0) + 1e-9 * step_ms
    assert sum(parts.values()) == pytest.approx(step_ms, rel=1e-12)
    assert min(parts.values()) >= -1e-9 * step_ms
    assert set(profiled) <= set(parts)
    assert method

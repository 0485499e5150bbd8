"""Step time and what follows from it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.analysis.frames import finite, median_interval, quantile, real, total, truth, whole
from costlab.app.analysis.steps import slowest, steps_view
from costlab.probes.records import StepRow, WorkloadFacts
from tests.app.analysis.tables import frame

FACTS = WorkloadFacts(
    unit="tokens",
    units_per_step=16384,
    flops_per_step=100e12,
    flops_formula="6 N D",
    peak_tflops=800.0,
    peak_method="mm",
)


def timed(per_rank: Sequence[Sequence[float]], role: str = "timed") -> list[StepRow]:
    return [
        StepRow(rank=rank, step=step, role=role, ms=ms, loss=9.0 - step)  # type: ignore[arg-type]
        for rank, series in enumerate(per_rank)
        for step, ms in enumerate(series)
    ]


def test_losses_that_are_no_numbers_are_counted_by_step() -> None:
    rows = timed([[100] * 4, [100] * 4])
    rows[1].loss, rows[6].loss, rows[5].loss = math.nan, math.inf, math.nan
    view = steps_view(frame(StepRow, [*rows, StepRow(rank=0, step=9, role="control", ms=1.0)]), FACTS, 2)
    assert view is not None
    assert (view.loss_bad, view.loss_bad_from) == (2, 1)
    sound = steps_view(frame(StepRow, timed([[100, 110]])), FACTS, 1)
    assert sound is not None
    assert (sound.loss_bad, sound.loss_bad_from) == (0, None)


def test_collections_are_told_by_step_of_the_rank_that_collects_longest() -> None:
    rows = timed([[100, 100, 140, 100], [100, 101, 141, 160]])
    for row, paused in zip(rows, [0, 0, 30, 0, 0, 4.9, 50, 10], strict=True):
        row.gc_ms = paused
    rows.append(StepRow(rank=0, step=9, role="control", ms=900.0, gc_ms=800.0))
    view = steps_view(frame(StepRow, rows), FACTS, 2)
    assert view is not None
    assert view.step_ms.value == 121  # of 100, 101, 141, 160
    found = view.collector
    assert found is not None
    assert found.per_step_ms == pytest.approx((0 + 4.9 + 50 + 10) / 4)
    assert (found.longest_ms, found.rank, found.step) == (50, 1, 2)
    assert found.paused == 2  # 4.9 ms are less than 5 % of 121
    assert found.bound  # two steps are too few to compare with: 100, 96.1, 91, 150 without collections, median 98.05
    assert found.lost_ms == pytest.approx((141 - 98.05 + 10) / 4)  # the last took 62 more, of which 10 were collections


def test_steps_with_collections_are_compared_with_those_without() -> None:
    rows = timed([[100, 101, 99, 140, 300, 95]])
    for row, paused in zip(rows, [0, 0, 1, 30, 20, 20], strict=True):
        row.gc_ms = paused
    view = steps_view(frame(StepRow, rows), FACTS, 1)
    assert view is not None
    assert view.collector is not None
    assert (view.collector.paused, view.collector.bound) == (3, False)
    assert view.collector.lost_ms == pytest.approx((30 + 20 + 0) / 6)  # hidden from the last step


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_where_every_step_collects_the_loss_is_a_bound(hidden: float) -> None:
    rows = timed([[500.0 * (1 - hidden) + 100] * 8])
    for row in rows:
        row.gc_ms = 500.0 * (1 - hidden) + 20 * hidden
    view = steps_view(frame(StepRow, rows), FACTS, 1)
    assert view is not None
    assert view.collector is not None
    assert view.collector.bound
    assert view.collector.lost_ms == pytest.approx(500.0 * (1 - hidden) + 20 * hidden)


def test_collections_that_nobody_watched_are_not_none_at_all() -> None:
    rows = timed([[100, 100], [100, 100]])
    view = steps_view(frame(StepRow, rows), FACTS, 2)
    assert view is not None
    assert view.collector is None
    rows[3].gc_ms = 0.0
    view = steps_view(frame(StepRow, rows), FACTS, 2)
    assert view is not None
    assert view.collector is not None
    assert (view.collector.paused, view.collector.lost_ms) == (0, 0.0)


def test_a_step_is_as_long_as_on_its_slowest_rank() -> None:
    view = steps_view(frame(StepRow, timed([[100, 110, 100], [105, 100, 101]])), FACTS, 2)
    assert view is not None
    assert view.series_ms == [105, 110, 101]
    assert view.step_ms.value == 105
    assert (view.step_ms.source, view.step_ms.n) == ("measured", 3)
    assert view.per_rank_ms == [100, 101]
    assert (view.loss_first, view.loss_last) == (9.0, 7.0)


def test_steps_that_a_rank_lacks_are_left_out() -> None:
    rows = timed([[100, 110, 120], [100, 111]])
    assert slowest(frame(StepRow, rows), "timed") == [100, 111]


def test_only_timed_steps_count_and_profiled_ones_are_kept_apart() -> None:
    rows = timed([[100.0] * 8]) + timed([[130.0] * 3], "profiled") + timed([[9000.0]], "warmup")
    view = steps_view(frame(StepRow, rows), FACTS, 1)
    assert view is not None
    assert (view.step_ms.value, view.profiled_ms, view.step_ms.n) == (100.0, 130.0, 8)


def test_profiled_steps_stand_in_where_there_are_no_others_and_say_so() -> None:
    view = steps_view(frame(StepRow, timed([[130.0, 120.0, 125.0]], "profiled")), FACTS, 1)
    assert view is not None
    assert view.step_ms.value == view.profiled_ms == 125.0
    assert "profiled steps, the profiler's own cost included" in view.step_ms.how


def test_throughput_and_mfu_follow_from_the_formula() -> None:
    view = steps_view(frame(StepRow, timed([[100.0] * 10] * 2)), FACTS, 2)
    assert view is not None
    assert view.throughput is not None
    assert view.mfu is not None
    assert view.throughput.value == pytest.approx(163840)
    assert view.throughput.unit == "tokens/s"
    # 100 TFLOP in 0.1 s on two devices of 800 TFLOP/s
    assert view.mfu.value == pytest.approx(100 / (0.1 * 2 * 800))
    assert "6 N D" in view.mfu.how
    assert "800 TFLOP/s measured" in view.mfu.how


def test_what_is_not_known_is_none() -> None:
    view = steps_view(frame(StepRow, timed([[100.0] * 10])), WorkloadFacts(), 1)
    assert view is not None
    assert (view.throughput, view.mfu, view.peak_tflops, view.copy_gbps, view.host_ms) == (None,) * 5
    assert steps_view(frame(StepRow, []), FACTS, 1) is None
    assert steps_view(frame(StepRow, timed([[1.0]], "warmup")), FACTS, 1) is None


def test_the_interval_turns_round_for_rates() -> None:
    series = [100.0 + n for n in range(20)]
    view = steps_view(frame(StepRow, timed([series])), FACTS, 1)
    assert view is not None
    assert view.throughput is not None
    step, rate = view.step_ms, view.throughput
    assert step.low is not None and step.high is not None and rate.low is not None and rate.high is not None
    assert step.low < (step.value or 0) < step.high
    assert rate.low == pytest.approx(16384 / step.high * 1e3)
    assert rate.high == pytest.approx(16384 / step.low * 1e3)


@pytest.mark.parametrize(("n", "ranks"), [(5, None), (6, (0, 5)), (20, (5, 14)), (100, (39, 60))])
def test_order_statistics_of_the_binomial_tables(n: int, ranks: tuple[int, int] | None) -> None:
    values = [float(v) for v in range(n)]
    assert median_interval(values) == (None if ranks is None else tuple(float(r) for r in ranks))


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(7)
    hits = 0
    for _ in range(2000):
        interval = median_interval([rng.expovariate(1.0) for _ in range(15)])
        assert interval is not None
        hits += interval[0] <= math.log(2) <= interval[1]
    assert 0.945 <= hits / 2000 <= 0.985  # 96.5 % by construction at n = 15


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_agree_with_pandas(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(pd.Series(values).quantile(q)), abs=1e-6)


def test_nothing_measured_is_not_zero() -> None:
    nan = float("nan")
    assert [real(v) for v in (nan, None, "1", 2, math.inf)] == [None, None, None, 2.0, None]
    assert [whole(v) for v in (nan, 2.6)] == [None, 3]
    assert [truth(v) for v in (None, nan, 0, True)] == [None, None, False, True]
    assert finite([nan, 1, None]) == [1.0]
    assert total([nan, None]) is None
    assert total([nan, 0.0]) == 0.0

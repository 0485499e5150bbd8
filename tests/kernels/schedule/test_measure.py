"""How plans are measured: in turn, the slowest rank's time, hopeless and refused plans left out; alike on all ranks."""

from __future__ import annotations

import measure_cases as cases
from rank_pool import RankPool

from costlab.kernels.schedule import measure
from costlab.kernels.schedule.plan import Plan


def test_curves_are_alike_on_all_ranks(ranks: RankPool) -> None:
    found = ranks.run(cases.curves, 2)
    assert found[0] == found[1]
    points, noise, refused = found[0]
    assert points["backend"] == [4096, 65536]
    assert points["ring"][0] == 4096  # and the next one, unless it was hopeless
    assert list(noise) == [4096, 65536]
    assert "needs CUDA" in refused["two-shot"]


def test_calls_take_turns_and_start_with_another_one_each_round(ranks: RankPool) -> None:
    rounds = [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    for order, counted in ranks.run(cases.turns, 2):
        assert order == rounds
        assert counted == [2, 2, 2]  # two rounds warm up


def test_a_hopeless_plan_is_not_measured_further_but_the_library_is(ranks: RankPool) -> None:
    for points in ranks.run(cases.hopeless, 2, "ring"):
        assert points == {"backend": [4096, 8192], "ring": [4096]}
    for points in ranks.run(cases.hopeless, 2, "backend"):
        assert points == {"backend": [4096, 8192], "ring": [4096, 8192]}


def test_the_noise_is_that_of_what_decides() -> None:
    steady, wild = [1.0, 1.01, 0.99, 1.0], [5.0, 9.0, 2.0, 7.0]
    plans = [Plan("backend"), Plan("two-shot"), Plan("ring")]
    assert measure.error_of_median([2.0, 2.0, 2.0]) == 0
    quiet = measure.deciding_noise(plans, [[2 * s for s in steady], steady, wild])
    assert 0 < quiet < 0.02
    assert measure.deciding_noise(plans, [wild, steady, steady]) > 0.2

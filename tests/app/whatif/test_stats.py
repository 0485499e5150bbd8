"""The statistics on simulated what-ifs: false alarms, power, coverage, drift, early stopping."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.whatif import stats
from costlab.app.whatif.spec import BASELINE, CONTROL

TRIALS = 1500


def simulated(
    rng: random.Random,
    rounds: int,
    *,
    effect: float = 0.0,
    leg: float = 0.01,
    variant_leg: float | None = None,
    block: float = 0.05,
    drift: float = 0.0,
    outliers: float = 0.0,
) -> list[Mapping[str, float]]:
    """Log leg times with noise from leg to leg and round to round, a drift per leg, and legs that were disturbed."""
    out: list[Mapping[str, float]] = []
    for number in range(rounds):
        order = [BASELINE, "B", CONTROL][:: -1 if number % 2 else 1]
        base = rng.gauss(4.0, block)
        times = {}
        for place, arm in enumerate(order):
            noise = rng.gauss(0, (variant_leg or leg) if arm == "B" else leg)
            disturbed = abs(rng.gauss(0, 8 * leg)) if rng.random() < outliers else 0.0
            shift = math.log1p(effect) if arm == "B" else 0.0
            times[arm] = base + drift * (3 * number + place) + noise + disturbed + shift
        out.append(times)
    return out


def rates(rounds: int, trials: int = TRIALS, **options: float) -> tuple[float, float]:
    """Share of what-ifs called different, and of intervals that hold the truth."""
    rng, called, covered = random.Random(11), 0, 0
    truth = options.get("effect", 0.0)
    for _ in range(trials):
        data = simulated(rng, rounds, **options)  # type: ignore[arg-type]
        estimate, control = stats.effect(data, "B"), stats.effect(data, CONTROL)
        assert estimate is not None
        called += stats.decide(estimate, control) != "no difference"
        covered += estimate.low <= truth <= estimate.high
    return called / trials, covered / trials


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [(0.975, 1, 12.706205), (0.975, 2, 4.302653), (0.975, 5, 2.570582), (0.995, 10, 3.169273), (0.95, 30, 1.697261)],
)
def test_quantiles_are_those_of_the_tables(p: float, df: int, expected: float) -> None:
    assert stats.student_quantile(p, df) == pytest.approx(expected, abs=2e-6)


@given(st.floats(-30, 30), st.integers(1, 60))
def test_the_distribution_is_symmetric_and_between_zero_and_one(t: float, df: int) -> None:
    below = stats.student_cdf(t, df)
    assert -1e-12 <= below <= 1 + 1e-12
    assert below + stats.student_cdf(-t, df) == pytest.approx(1)


@pytest.mark.parametrize("rounds", [2, 3, 4, 6, 12])
def test_an_aa_whatif_is_called_different_in_at_most_2_in_40(rounds: int) -> None:
    called, covered = rates(rounds)
    assert called <= 0.025
    assert covered >= 0.97


@pytest.mark.parametrize("rounds", [3, 6])
def test_drift_and_disturbed_legs_raise_no_false_alarms(rounds: int) -> None:
    assert rates(rounds, drift=0.01)[0] <= 0.05
    assert rates(rounds, outliers=0.15)[0] <= 0.05


def test_a_noisier_variant_stays_near_its_level() -> None:
    assert rates(4, variant_leg=0.03)[0] <= 0.05
    assert rates(4, leg=0.03, variant_leg=0.01)[0] <= 0.02


@pytest.mark.parametrize(("effect", "least"), [(0.03, 0.9), (0.05, 0.99), (-0.05, 0.99), (0.10, 0.999)])
def test_real_differences_are_found(effect: float, least: float) -> None:
    called, covered = rates(4, effect=effect, leg=0.0075)
    assert called >= least
    assert covered >= 0.97


def test_steps_are_not_taken_for_replicates() -> None:
    """Treating the 20 steps of each leg as independent calls most A/A pairs different; the legs do not."""
    rng, wrong, trials = random.Random(3), 0, 300
    for _ in range(trials):
        a, b = ([rng.gauss(centre, 0.003) for _ in range(20)] for centre in (rng.gauss(0, 0.01), rng.gauss(0, 0.01)))
        error = math.sqrt((statistics.variance(a) + statistics.variance(b)) / 20)
        wrong += abs(statistics.fmean(a) - statistics.fmean(b)) > 2.02 * error
    assert wrong / trials > 0.5


def test_a_cluster_bootstrap_of_few_rounds_is_too_narrow() -> None:
    """Why the interval is Student's t: a percentile bootstrap over 4 rounds misses the truth more often than 10 %."""
    rng, missed, trials = random.Random(5), 0, 300
    for _ in range(trials):
        values = [r["B"] - (r[BASELINE] + r[CONTROL]) / 2 for r in simulated(rng, 4)]
        draws = sorted(statistics.fmean(rng.choices(values, k=4)) for _ in range(400))
        missed += not draws[10] <= 0 <= draws[389]
    assert missed / trials > 0.1


def stopped(rng: random.Random, most: int, level: float, effect: float) -> stats.Estimate:
    """The estimate with which a what-if that looks as planned ends."""
    data = simulated(rng, most, effect=effect, leg=0.02)
    for look in stats.looks_until(most):
        estimate = stats.effect(data[:look], "B", level)
        if stats.settled(estimate) or look == most:
            assert estimate is not None
            return estimate
    raise AssertionError("the last look is the end")


def test_stopping_early_raises_no_false_alarms_because_of_the_level() -> None:
    rng = random.Random(13)
    careful = [stopped(rng, 12, stats.look_level(12), 0.0) for _ in range(TRIALS)]
    naive = [stopped(rng, 12, 1 - stats.ALPHA, 0.0) for _ in range(TRIALS)]

    def alarms(found: list[stats.Estimate]) -> float:
        return sum(not e.low <= 0 <= e.high for e in found) / len(found)

    assert alarms(careful) <= 0.02
    assert alarms(naive) > alarms(careful) + 0.01


def test_stopping_early_keeps_coverage_and_saves_legs() -> None:
    rng = random.Random(17)
    found = [stopped(rng, 12, stats.look_level(12), 0.1) for _ in range(500)]
    assert sum(e.low <= 0.1 <= e.high for e in found) / 500 >= 0.95
    assert statistics.fmean(e.rounds for e in found) < 8


def test_an_equal_variant_stops_once_nothing_above_one_percent_is_left() -> None:
    rng = random.Random(19)
    data = simulated(rng, 3, leg=0.0005)
    estimate = stats.effect(data, "B", stats.look_level(12))
    assert stats.settled(estimate)
    assert stats.decide(estimate, stats.effect(data, CONTROL)) == "no difference"


def test_a_difference_smaller_than_the_aa_pair_is_no_difference() -> None:
    rounds = [{BASELINE: 0.0, "B": 0.06 + 0.0001 * n, CONTROL: 0.1 + 0.0001 * n} for n in range(6)]
    estimate, control = stats.effect(rounds, "B"), stats.effect(rounds, CONTROL)
    assert estimate is not None
    assert stats.decide(estimate, control) == "no difference"


def test_rounds_without_the_arm_are_left_out_and_one_round_says_nothing() -> None:
    full = {BASELINE: 0.0, CONTROL: 0.01, "B": 0.1}
    rounds = [full, {BASELINE: 0.0, CONTROL: 0.0}, full | {"B": 0.12}, {BASELINE: 5.0, "B": 9.0}]
    estimate = stats.effect(rounds, "B")
    assert estimate is not None
    assert estimate.rounds == 2
    assert stats.effect([full], "B") is None
    assert stats.decide(None, None) == "invalid"


def test_a_factorial_finds_main_effects_and_their_interaction() -> None:
    rng = random.Random(23)
    arms = {BASELINE: frozenset[str](), "a": frozenset({"a"}), "b": frozenset({"b"}), "a + b": frozenset({"a", "b"})}
    truth = {BASELINE: 0.0, CONTROL: 0.0, "a": -0.10, "b": 0.05, "a + b": -0.01}
    rounds = [
        {arm: base + shift + rng.gauss(0, 0.001) for arm, shift in truth.items()} for base in (1.0, 1.2, 0.9, 1.1)
    ]
    found = {e.factors: e.estimate for e in stats.factorial_effects(rounds, arms)}
    assert list(found) == [("a",), ("b",), ("a", "b")]
    expected = {("a",): (-0.10 - 0.06) / 2, ("b",): (0.05 + 0.09) / 2, ("a", "b"): (-0.01 - 0.05 + 0.10) / 2}
    for factors, value in expected.items():
        assert math.log1p(found[factors].change) == pytest.approx(value, abs=0.003)
        assert not found[factors].low <= 0 <= found[factors].high


def test_factorial_weights_are_contrasts() -> None:
    arms = {BASELINE: frozenset[str](), "a": frozenset({"a"}), "b": frozenset({"b"}), "a + b": frozenset({"a", "b"})}
    for subset in (frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})):
        assert sum(stats.factor_weights(arms, subset).values()) == pytest.approx(0)


@pytest.mark.parametrize(("most", "looks"), [(2, (2,)), (4, (3, 4)), (12, (3, 5, 8, 12)), (20, (3, 5, 8, 12, 20))])
def test_looks_end_with_the_last_round(most: int, looks: tuple[int, ...]) -> None:
    assert stats.looks_until(most) == looks
    assert stats.look_level(most) == pytest.approx(1 - stats.ALPHA / (len(looks) + 1))


def test_a_round_with_a_disturbed_leg_is_left_out_whichever_arm_it_hit() -> None:
    rng = random.Random(29)
    for arm in (BASELINE, "B", CONTROL):
        data = [dict(r) for r in simulated(rng, 4, leg=0.003)]
        data[2][arm] += 0.3
        kept = stats.undisturbed(data)
        assert kept == [data[0], data[1], data[3]]


@pytest.mark.parametrize("present", [(BASELINE,), (CONTROL,), (BASELINE, "B"), (CONTROL, "B")])
def test_a_round_that_ended_halfway_neither_hides_a_disturbance_nor_counts_as_one(present: tuple[str, ...]) -> None:
    data = [dict(r) for r in simulated(random.Random(29), 5, leg=0.003)]
    data[1]["B"] += 0.3
    half = {arm: data[4][arm] for arm in present}
    assert stats.undisturbed([*data[:4], half]) == [data[0], data[2], data[3], half]


def test_ordinary_noise_drift_and_effects_are_no_disturbance() -> None:
    rng, left_out = random.Random(31), 0
    for _ in range(300):
        data = simulated(rng, 4, leg=0.005, effect=0.4, drift=0.002)
        left_out += len(data) - len(stats.undisturbed(data))
    assert left_out / (300 * 4) < 0.04


def test_a_machine_that_disturbs_most_rounds_is_taken_as_it_is() -> None:
    rng = random.Random(37)
    data = [dict(r) for r in simulated(rng, 4, leg=0.002)]
    data[1]["B"] += 0.3
    data[3][BASELINE] += 0.4
    assert stats.undisturbed(data) == data
    assert stats.undisturbed(data[:2]) == data[:2]
    assert stats.undisturbed([]) == []


def test_leaving_disturbed_rounds_out_raises_no_false_alarms_and_keeps_power() -> None:
    rng, wrong, found, trials = random.Random(41), 0, 0, 600
    for _ in range(trials):
        for effect in (0.0, 0.05):
            data = stats.undisturbed(simulated(rng, 5, effect=effect, leg=0.005, outliers=0.03))
            verdict = stats.decide(stats.effect(data, "B"), stats.effect(data, CONTROL))
            wrong += effect == 0 and verdict != "no difference"
            found += effect > 0 and verdict == "slower"
    assert wrong / trials <= 0.03
    assert found / trials >= 0.97

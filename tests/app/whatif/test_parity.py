"""Losses: same, different, unknown, not comparable."""

from __future__ import annotations

import random

import msgspec
import pytest

from costlab.app.whatif.parity import judge
from costlab.app.whatif.results import LegRecord
from costlab.app.whatif.spec import BASELINE, CONTROL


def leg(arm: str, round_: int, losses: dict[int, float | None]) -> LegRecord:
    return LegRecord(
        arm=arm, round=round_, position=0, directory="", seed=round_, status="complete", seconds=1.0, losses=losses
    )


def legs(shift: float, *, rounds: int = 4, jitter: float = 1e-6, seed_spread: float = 0.05) -> list[LegRecord]:
    """Baseline losses that a seed moves by `seed_spread`, and a variant that moves them by `shift` at every seed."""
    rng, out = random.Random(2), []
    for number in range(rounds):
        level = 5.0 + rng.gauss(0, seed_spread)
        for arm, offset in ((BASELINE, 0.0), (CONTROL, 0.0), ("B", shift)):
            out.append(leg(arm, number, {s: level - 0.01 * s + offset + rng.gauss(0, jitter) for s in range(8)}))
    return out


def test_a_difference_far_below_the_seeds_is_the_same() -> None:
    found = judge(legs(1e-4), "B", {"compile": "none"})
    assert found.verdict == "same"
    assert found.difference == pytest.approx(1e-4, abs=1e-5)
    assert found.spread is not None
    assert 0.01 < found.spread < 0.2
    assert found.seeds == 4
    assert found.steps == 8
    assert found.rerun is not None
    assert found.rerun < 1e-5


def test_a_difference_above_the_seeds_is_different() -> None:
    found = judge(legs(0.5), "B", {"compile": "none"})
    assert found.verdict == "different"


def test_a_noisy_difference_is_unknown() -> None:
    assert judge(legs(0.0, rounds=2, jitter=0.3), "B", {}).verdict == "unknown"


def test_one_seed_is_unknown_unless_the_bits_agree() -> None:
    assert judge(legs(1e-4, rounds=1), "B", {}).verdict == "unknown"
    equal = judge(legs(0.0, rounds=1, jitter=0.0), "B", {})
    assert equal.verdict == "same"
    assert "last bit" in equal.why


def test_a_loss_that_is_no_number_is_different() -> None:
    records = [leg(BASELINE, 0, {0: 5.0, 1: 4.9}), leg("B", 0, {0: 5.0, 1: None})]
    found = judge(records, "B", {})
    assert found.verdict == "different"
    assert "step 1" in found.why


@pytest.mark.parametrize("option", ["batch", "seq", "dtype", "ranks", "optimizer", "lr"])
def test_other_data_or_arithmetic_is_not_comparable(option: str) -> None:
    found = judge(legs(0.5), "B", {option: "x"})
    assert found.verdict == "not comparable"
    assert option in found.why


def test_without_losses_nothing_is_claimed() -> None:
    assert judge([leg(BASELINE, 0, {}), leg("B", 0, {})], "B", {}).verdict == "unknown"


def test_gradients_name_the_worst_tensor_beside_the_aa_pair() -> None:
    norms = {"embed": 2.0, "head": 1.0, "bias": 1e-9}
    records = []
    for record in legs(0.0, rounds=2):
        own = norms if record.arm == BASELINE else norms | {"head": 1.1 if record.arm == "B" else 1.01}
        own = own | {"bias": 3e-9 if record.arm == "B" else 1e-9}
        records.append(msgspec.structs.replace(record, gradients=own if record.round == 0 else {}))
    found = judge(records, "B", {})
    assert found.worst_tensor == "head"
    assert found.worst == pytest.approx(0.1)
    assert found.worst_again == pytest.approx(0.01)
    assert found.gradient == pytest.approx((4 + 1.21) ** 0.5 / 5**0.5 - 1)


def test_gradients_that_were_not_recorded_are_not_zero() -> None:
    found = judge(legs(0.0), "B", {})
    assert found.worst is None
    assert found.gradient is None

"""What the planner chooses and says; the seed's table."""

from __future__ import annotations

import pytest

from costlab.kernels.schedule.errors import FabricError
from costlab.kernels.schedule.plan import OWN, Plan
from costlab.kernels.schedule.planner import MARGIN, Planner, interpolate, resource_text, size_text, time_text
from costlab.kernels.schedule.seed_table import bound, seed_table, verdict
from costlab.kernels.schedule.simulator import simulate
from costlab.kernels.schedule.topology import Link, uniform
from tests.work import counted

NVLINK = Link(3.4e-6, 370.8e9)
NDR = Link(14e-6, 48e9)
ETHERNET = Link(30e-6, 2.9e9)
MIB = 1 << 20
SIZES = [1 << e for e in range(16, 36)]


def test_hybrid_on_a_daisy_chain() -> None:
    planner = Planner(uniform(4, 8, NVLINK, Link(14e-6, 24e9), wiring="line"))
    choice = planner.choose(1 << 30)
    assert choice.plan.schedule == "hybrid"
    ring = choice.seconds("ring")
    assert ring is not None
    assert ring / choice.best.seconds > 1.8
    assert choice.sentence.startswith(f"hybrid in {choice.plan.chunks} chunks: modelled")
    assert "the lower bound is 44.7 ms" in choice.sentence
    assert "the cable from segment" in choice.sentence


def test_two_levels_between_two_hosts() -> None:
    choice = Planner(uniform(2, 4, NVLINK, ETHERNET), schedules=OWN).choose(256 * MIB)
    assert choice.plan.schedule in ("two-level", "hybrid")
    assert choice.best.source == "simulated"
    assert "1.00 x the message" in choice.sentence


def test_the_library_wins_small_messages_at_scale() -> None:
    assert Planner(uniform(128, 8, NVLINK, NDR, nics=8, step=10e-6)).choose(64 << 10).plan.schedule == "backend"


def test_a_chain_puts_the_slow_host_at_its_end() -> None:
    choice = Planner(uniform(4, 2, NVLINK, ETHERNET, slow={2: 0.25}), library="gloo").choose(64 * MIB)
    assert choice.plan.schedule == "hybrid"
    assert 2 in (choice.plan.order[0], choice.plan.order[-1])
    assert "over segments" in choice.best.describe()


def work_of_curves(segments: int) -> int:
    with counted() as work:
        rows = Planner(uniform(segments, 8, NVLINK, NDR, nics=8, step=10e-6)).table(SIZES)
    assert len(rows) == len(SIZES)
    for row in rows:
        assert {c.plan.schedule for c in row.candidates} == {"backend", *OWN}
        assert all(c.seconds >= row.bound * 0.999 for c in row.candidates)
    times = [row.best.seconds for row in rows]
    assert times == sorted(times)
    return work.calls


def test_the_work_of_curves_grows_no_faster_than_the_gpus() -> None:
    """64, 1,024 and 16,384 GPUs, each 16 times the one before; the seconds stand in the benchmarks."""
    few, some, many = (work_of_curves(segments) for segments in (8, 128, 2048))
    assert some < 17.6 * few
    assert many < 17.6 * some


def test_measured_curves_decide_alone() -> None:
    slow, fast = [(1024, 1e-4), (1 << 20, 2e-4)], [(1024, 3e-4), (1 << 20, 1e-4)]
    planner = Planner(uniform(1, 2, NVLINK, NDR), measured={Plan("backend"): slow, Plan("two-shot"): fast})
    assert planner.choose(1024).plan == Plan("backend")
    assert planner.choose(1 << 20).plan == Plan("two-shot")
    assert "measured" in planner.choose(1024).sentence
    assert planner.choose(1024).seconds("ring") is None


def test_interpolation() -> None:
    curve = [(1000, 1e-3), (100_000, 1e-1)]
    assert interpolate(curve, 10_000) == pytest.approx(1e-2)
    assert interpolate(curve, 10) == 1e-3
    assert interpolate(curve, 1_000_000) == pytest.approx(1.0)
    with pytest.raises(FabricError):
        interpolate([], 1)


def test_auto_chunks_are_near_the_simulated_best() -> None:
    fabric = uniform(4, 4, NVLINK, Link(14e-6, 24e9), wiring="line")
    planner = Planner(fabric)
    for nbytes in (4 * MIB, 64 * MIB):
        counts = [1, 2, 4, 8, 16, 32, 64, 128]
        times = {c: simulate(fabric, Plan("hybrid", chunks=c), nbytes).seconds for c in counts}
        chosen = planner.chunks("hybrid", nbytes)
        took = simulate(fabric, Plan("hybrid", chunks=chosen), nbytes).seconds
        assert took <= 1.1 * min(times.values())
        assert took <= 0.8 * times[1]


def test_rings_keep_their_scratch_small() -> None:
    plan = next(
        c.plan for c in Planner(uniform(1, 2, NVLINK, NDR)).choose(1 << 30).candidates if c.plan.schedule == "ring"
    )
    assert (1 << 30) / 2 / plan.chunks <= 32 * MIB


def test_the_seeds_table_is_impossible() -> None:
    assert bound(450e9) == pytest.approx(0.498, abs=0.001)
    rows = {row.schedule: row for row in seed_table()}
    assert not any(row.possible for row in rows.values() if row.schedule != "chain")
    assert [round(row.implied_peak / 1e9) for row in rows.values()] == [1155, 1185, 1354]
    assert "at least 498 ms on NVLink 4" in verdict()


def test_words() -> None:
    assert [time_text(t) for t in (2.5, 0.0123, 4.5e-6, 0.0)] == ["2.5 s", "12.3 ms", "4.5 us", "0 us"]
    assert [size_text(n) for n in (12, 2048, 5 * MIB, 3 << 30)] == ["12 B", "2 KiB", "5 MiB", "3 GiB"]
    assert resource_text(("tx", 3, 1)) == "NIC 1 of segment 3"
    assert resource_text(None) == "no link"


@pytest.mark.parametrize(
    ("ours", "noise", "chosen"),
    [
        (0.98e-4, 0.0, "backend"),
        (0.96e-4, 0.0, "backend"),
        (0.94e-4, 0.0, "two-shot"),
        (0.94e-4, 0.02, "backend"),
        (0.9e-4, 0.02, "two-shot"),
        (1.2e-4, 0.0, "backend"),
    ],
)
def test_a_measured_gain_within_margin_and_noise_leaves_the_library(ours: float, noise: float, chosen: str) -> None:
    curves = {Plan("backend"): [(MIB, 1e-4)], Plan("two-shot"): [(MIB, ours)]}
    choice = Planner(uniform(1, 2, NVLINK, NDR), measured=curves, noise={MIB: noise}).choose(MIB)
    assert choice.plan.schedule == choice.best.plan.schedule == choice.candidates[0].plan.schedule == chosen
    assert {c.plan.schedule for c in choice.candidates} == {"backend", "two-shot"}


def test_between_two_sizes_the_larger_noise_counts() -> None:
    planner = Planner(uniform(1, 2, NVLINK, NDR), noise={MIB: 0.03, 4 * MIB: 0.01, 16 * MIB: 0.02})
    sizes = (1024, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB)
    assert [round(planner.margin(n) - MARGIN, 6) for n in sizes] == [0.03, 0.03, 0.03, 0.01, 0.02, 0.02, 0.02]
    assert Planner(uniform(1, 2, NVLINK, NDR)).margin(MIB) == MARGIN


def test_a_plan_that_holds_up_compute_longer_than_the_library_is_no_candidate() -> None:
    fast, library = Plan("two-shot", chunks=2), Plan("backend")
    curves = {library: [(MIB, 1e-4)], Plan("two-shot"): [(MIB, 0.9e-4)], fast: [(MIB, 0.8e-4)]}
    beside = {library: [(MIB, 2e-4)], Plan("two-shot"): [(MIB, 1.9e-4)], fast: [(MIB, 2.1e-4)]}
    fabric = uniform(1, 2, NVLINK, NDR)
    assert Planner(fabric, measured=curves).choose(MIB).plan == fast
    assert Planner(fabric, measured=curves, beside=beside).choose(MIB).plan == Plan("two-shot")
    assert Planner(fabric, measured=curves, beside={fast: beside[fast]}).choose(MIB).plan == fast  # nothing to compare


def test_chunks_are_named() -> None:
    curves = {Plan("backend"): [(MIB, 1e-4)], Plan("two-shot", chunks=2): [(MIB, 0.5e-4)]}
    assert Planner(uniform(1, 2, NVLINK, NDR), measured=curves).choose(MIB).best.describe() == "two-shot in 2 chunks"

"""All-reduce over real process groups: every schedule, segmentation, dtype and size against exact sums."""

from __future__ import annotations

import all_reduce_cases as cases
import pytest
import torch
from rank_pool import RankPool

from costlab.kernels.schedule.plan import Layout, Plan

SIZES = [1, 7, 1000, 12345]
DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def layouts(world: int) -> list[Layout]:
    """Even, uneven, single and one-rank-a-segment cuts of a world, and one with ranks interleaved."""
    everyone = tuple(range(world))
    found: set[Layout] = {(everyone,), tuple((r,) for r in everyone)}
    if world >= 2:
        found.add((everyone[: world // 2], everyone[world // 2 :]))
    if world >= 3:
        found.add((everyone[:1], everyone[1:]))
    if world >= 4:
        found.add((everyone[0::2], everyone[1::2]))
        found.add((everyone[:1], everyone[1:3], everyone[3:]))
    if world >= 6:
        found.add(tuple(everyone[i : i + 2] for i in range(0, world, 2)))
    return sorted(found)


def plans(layout: Layout) -> list[Plan]:
    turned = (*range(1, len(layout)), 0)
    return [
        Plan("ring"),
        Plan("ring", chunks=3, channels=2, order=turned),
        Plan("chain", chunks=5, channels=2),
        Plan("two-level", chunks=1),
        Plan("two-level", chunks=3, order=turned),
        Plan("hybrid", chunks=1, order=turned),
        Plan("hybrid", chunks=4),
        Plan("backend"),
    ]


@pytest.mark.parametrize("world", range(1, 9))
def test_sums_are_exact(ranks: RankPool, world: int) -> None:
    done = 0
    for number, layout in enumerate(layouts(world)):
        chosen = plans(layout) if world < 6 else plans(layout)[number % 2 :: 2]
        rows = ranks.run(cases.exact_cases, world, layout, chosen, SIZES, [torch.float32])
        dtype = DTYPES[(number + world) % len(DTYPES)]
        rows += ranks.run(cases.exact_cases, world, layout, chosen, SIZES[1:2], [dtype])
        done += rows[0] + rows[-1]
    assert done > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(ranks: RankPool, dtype: torch.dtype) -> None:
    layout: Layout = ((0, 1), (2, 3))
    assert (
        ranks.run(cases.exact_cases, 4, layout, plans(layout), [9, 777], [dtype])
        == [14 if dtype == torch.int16 else 16] * 4
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_stays_in_bounds_and_bits_are_equal(ranks: RankPool, dtype: torch.dtype, op: str) -> None:
    layout: Layout = ((0,), (1, 2), (3, 4, 5))
    own = [p for p in plans(layout) if p.schedule != "backend"]
    assert ranks.run(cases.rounded_cases, 6, layout, own, 3001, dtype, op) == [len(own)] * 6


def test_the_backends_collectives_inside(ranks: RankPool) -> None:
    layout: Layout = ((0, 1, 2, 3), (4, 5, 6, 7))
    native = [Plan(s, chunks=c, inside="backend") for s in ("two-level", "hybrid") for c in (1, 3)]  # type: ignore[arg-type]
    assert ranks.run(cases.exact_cases, 8, layout, native, [1, 8, 1003], [torch.float32]) == [12] * 8


def test_shapes_and_strides(ranks: RankPool) -> None:
    assert ranks.run(cases.shapes, 4, ((0, 1), (2, 3))) == [18] * 4


def test_asynchronous_calls_keep_their_order(ranks: RankPool) -> None:
    assert ranks.run(cases.overlapped, 4, ((0, 1), (2, 3))) == [[True] * 5] * 4


def test_scratch_is_bounded(ranks: RankPool) -> None:
    """Two steps of a track: a ring's slice is S/N, a chain's chunk S/c, a lane's piece S/(c L)."""
    numel, layout = 1 << 16, ((0, 1), (2, 3))
    size = 4 * numel
    for held in ranks.run(cases.scratch, 4, layout, numel):
        assert held["ring 1"] <= 2 * size / 4 * 1.1
        assert held["ring 8"] <= 2 * size / 4 / 8 * 1.1
        assert held["chain 8"] <= 2 * size / 8 * 1.1
        assert held["hybrid 8"] <= 2 * 2 * size / 8 / 2 * 1.1


def test_traces_name_the_schedule(ranks: RankPool) -> None:
    said = "costlab::comm::all_reduce schedule={} bytes=256 dtype=float32 ranks=0,1"
    names = [said.format(schedule) for schedule in ("backend", "hybrid", "ring")]
    assert ranks.run(cases.tagged, 2, ((0,), (1,))) == [names] * 2

"""Programs on paper: every element summed once from every rank, whatever the sizes, segments and order of events."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import run

from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused
from costlab.kernels.schedule.executor import issue_order
from costlab.kernels.schedule.plan import OWN, Layout, Plan, check_layout, seed_chunks
from costlab.kernels.schedule.program import ALIGN, Kind, build, cut, tracks


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Layout, int]:
    world = draw(st.integers(1, 8))
    ranks = draw(st.permutations(range(world)))
    cuts = sorted(draw(st.sets(st.integers(1, world - 1)))) if world > 1 else []
    edges = [0, *cuts, world]
    layout = tuple(tuple(ranks[a:b]) for a, b in pairwise(edges))
    order = tuple(draw(st.permutations(range(len(layout))))) if draw(st.booleans()) else ()
    schedule = draw(st.sampled_from(OWN))
    plan = Plan(schedule, chunks=draw(st.integers(1, 5)), channels=draw(st.integers(1, 3)), order=order)
    return plan, layout, draw(st.integers(0, 40))


@settings(max_examples=1500, deadline=None)
@given(case=cases(), seed=st.integers(0, 1 << 30))
@example(case=(Plan("hybrid", chunks=3), ((0,), (1, 2), (3, 4, 5, 6, 7)), 7), seed=1)
def test_every_contribution_counts_once(case: tuple[Plan, Layout, int], seed: int) -> None:
    plan, layout, numel = case
    world = sum(map(len, layout))
    everything = Counter(range(world))
    for values in run(plan, layout, numel, seed):
        assert all(value == everything for value in values)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_issue_order_holds_every_step_once(case: tuple[Plan, Layout, int]) -> None:
    plan, layout, numel = case
    for rank in range(sum(map(len, layout))):
        program = build(plan, layout, numel, rank)
        order = issue_order(program)
        assert sorted(order) == sorted((t, i) for t, steps in program.items() for i in range(len(steps)))
        seen: Counter[str] = Counter()
        for track, number in order:
            assert number == seen[track]
            assert all(seen[t] >= n for t, n in program[track][number].after)
            seen[track] += 1
        assert set(program) <= set(tracks(plan))


@given(length=st.integers(0, 100_000), start=st.integers(0, 9), parts=st.integers(1, 9), unit=st.integers(1, 8))
def test_cut_is_a_partition(length: int, start: int, parts: int, unit: int) -> None:
    slices = cut(start, start + length, parts, unit)
    assert len(slices) == parts
    assert slices[0][0] == start
    assert slices[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(slices))
    assert all((b - a) % unit == 0 and b >= a for a, b in slices[:-1])
    longest, shortest = (f(b - a for a, b in slices) for f in (max, min))
    assert longest - shortest <= (ALIGN + 1) * unit


def traffic(plan: Plan, layout: Layout, numel: int) -> list[float]:
    """Elements each rank sends, for each element of the message."""
    world = sum(map(len, layout))
    return [
        sum(op.stop - op.start for steps in build(plan, layout, numel, r).values() for s in steps for op in s.ops
            if op.kind == Kind.SEND) / numel
        for r in range(world)
    ]  # fmt: skip


def test_traffic_is_that_of_the_algorithms() -> None:
    layout: Layout = ((0, 1), (2, 3), (4, 5), (6, 7))
    numel = 64 * 8 * 4 * 64
    assert traffic(Plan("ring"), layout, numel) == pytest.approx([2 * 7 / 8] * 8)
    assert traffic(Plan("chain", chunks=4), layout, numel) == pytest.approx([1, *[2] * 6, 1])
    assert traffic(Plan("two-level", chunks=4), layout, numel) == pytest.approx([1 + 2 * 3 / 4 / 2] * 8)
    assert traffic(Plan("hybrid", chunks=4), layout, numel) == pytest.approx([1.5, 1.5, *[2] * 4, 1.5, 1.5])


def test_the_seeds_chunk_rule() -> None:
    mib = 1 << 20
    assert seed_chunks(64 * mib - 1, 8) == 1
    assert seed_chunks(64 * mib, 7) == 1
    assert seed_chunks(64 * mib, 8) == 4
    assert seed_chunks(65 * mib, 8) == 5
    assert seed_chunks(1024 * mib, 64) == 64


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ScheduleRefused, match="unknown schedule"):
        Plan("tree")  # type: ignore[arg-type]
    with pytest.raises(ScheduleRefused, match="start at 1"):
        Plan("ring", chunks=0)
    with pytest.raises(ScheduleRefused, match="do not hold ranks"):
        check_layout(((0, 1), (1, 2)), (), 3)
    with pytest.raises(ScheduleRefused, match="not an order"):
        check_layout(((0,), (1,)), (0, 0), 2)
    with pytest.raises(ScheduleError, match="not made of point-to-point"):
        build(Plan("backend"), ((0, 1),), 8, 0)

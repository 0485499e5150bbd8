"""The recommended buckets: every shape has a home, and nothing else among the choices is cheaper."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.app.shapes import bucketing
from costlab.app.shapes.bucketing import Candidate, choose, covers, describe

shapes = st.lists(
    st.builds(
        Candidate,
        batch=st.integers(1, 8),
        seq=st.integers(1, 16),
        count=st.integers(1, 50),
        step_ms=st.floats(0.1, 100),
        compile_s=st.floats(0, 60),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda c: (c.batch, c.seq),
)
steps = st.integers(1, 1_000_000)


def linear(batch: int, seq: int, count: int = 1, compile_s: float = 10.0) -> Candidate:
    return Candidate(batch=batch, seq=seq, count=count, step_ms=batch * seq / 10, compile_s=compile_s)


@given(shapes, steps)
def test_every_shape_runs_in_one_bucket_that_is_as_large(found: list[Candidate], n: int) -> None:
    chosen = choose(found, n)
    homes = [(m, b) for b in chosen.buckets for m in b.members]
    assert sorted(m for m, _ in homes) == sorted((s.batch, s.seq) for s in found)
    assert all(b.batch >= m[0] and b.seq >= m[1] for m, b in homes)
    assert 0 <= chosen.padding < 1


@given(shapes, steps)
def test_no_choice_of_buckets_is_cheaper(found: list[Candidate], n: int) -> None:
    costs = []
    for size in range(1, len(found) + 1):
        for subset in combinations(range(len(found)), size):
            if all(any(covers(found[b], s) for b in subset) for s in found):
                costs.append(describe(found, subset, n).total_s)
    assert choose(found, n).total_s == pytest.approx(min(costs))


@settings(max_examples=50)
@given(shapes, steps)
def test_dropping_one_by_one_never_does_worse_than_all_shapes(found: list[Candidate], n: int) -> None:
    kept = bucketing._descend(found, n)
    everything = describe(found, range(len(found)), n).total_s
    assert describe(found, kept, n).total_s <= everything * (1 + 1e-9) + 1e-9


def test_a_short_run_pads_everything_and_a_long_one_compiles_every_shape() -> None:
    found = [linear(4, s) for s in (64, 96, 128)]
    assert [b.seq for b in choose(found, 1).buckets] == [128]
    assert [b.seq for b in choose(found, 10_000_000).buckets] == [64, 96, 128]


def test_a_rare_shape_is_padded_and_a_common_one_is_not() -> None:
    found = [linear(1, 100, count=1), linear(1, 200, count=1000), linear(1, 400, count=1000)]
    chosen = choose(found, 5_000)
    assert [(b.seq, b.members) for b in chosen.buckets] == [(200, [(1, 100), (1, 200)]), (400, [(1, 400)])]
    assert chosen.padding == pytest.approx(1 - (100 + 200_000 + 400_000) / (200 + 200_000 + 400_000))


def test_shapes_that_cannot_hold_each_other_both_stay() -> None:
    assert len(choose([linear(8, 64), linear(4, 128)], 1).buckets) == 2


def test_many_shapes_are_still_covered() -> None:
    found = [linear(4, 8 * i, compile_s=5.0) for i in range(1, 41)]
    chosen = choose(found, 20_000)
    assert not chosen.exact
    assert 1 < len(chosen.buckets) < 40
    assert sum(len(b.members) for b in chosen.buckets) == 40


def test_nothing_to_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="no shapes"):
        choose([], 10)

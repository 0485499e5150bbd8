"""Interval sets against counting on an integer grid."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from costlab.probes.trace.intervals import Intervals, clip, join, union

LENGTH = 60
pairs = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=25)


def grid(intervals: list[tuple[int, int]]) -> np.ndarray:
    cells = np.zeros(LENGTH, dtype=bool)
    for start, end in intervals:
        cells[start:end] = True
    return cells


def as_set(intervals: list[tuple[int, int]]) -> Intervals:
    return union(np.array([float(s) for s, _ in intervals]), np.array([float(e) for _, e in intervals]))


@given(pairs)
def test_union_covers_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    merged = as_set(intervals)
    assert merged.total == grid(intervals).sum()
    assert (merged.start[1:] > merged.end[:-1]).all()


@given(pairs, pairs, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_measures_within_a_window(a: list[tuple[int, int]], b: list[tuple[int, int]], start: int, end: int) -> None:
    both = grid(a) | grid(b)
    joined = join(as_set(a), as_set(b))
    assert joined.within(start, end) == both[start:end].sum()
    assert clip(joined, start, end).total == both[start:end].sum()
    assert joined.gaps(start, end).total == (~both)[start:end].sum()

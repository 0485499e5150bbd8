"""Sets of half-open time intervals as sorted, disjoint numpy arrays; shapes [n], float64, microseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Intervals:
    """Disjoint intervals in ascending order: `start[i] < end[i] < start[i + 1]`."""

    start: Floats
    end: Floats

    @property
    def total(self) -> float:
        """Sum of lengths, us."""
        return float(np.sum(self.end - self.start))

    def before(self, t: Floats) -> Floats:
        """Length of the set that lies before each `t`."""
        if not len(self.start):
            return np.zeros(len(t))
        length = np.concatenate(([0.0], np.cumsum(self.end - self.start)))
        i = np.searchsorted(self.start, t, side="right")
        tail = np.maximum(self.end[np.maximum(i - 1, 0)] - t, 0.0)
        return np.where(i > 0, length[i] - tail, 0.0)

    def covered(self, start: Floats, end: Floats) -> Floats:
        """Length of the set inside each [start, end)."""
        return np.asarray(np.maximum(self.before(end) - self.before(start), 0.0))

    def within(self, start: float, end: float) -> float:
        """Length of the set inside one [start, end)."""
        return float(self.covered(np.array([start]), np.array([end]))[0])

    def gaps(self, start: float, end: float) -> Intervals:
        """The complement inside [start, end)."""
        inside = clip(self, start, end)
        lows, highs = np.append(start, inside.end), np.append(inside.start, end)
        keep = highs > lows
        return Intervals(lows[keep], highs[keep])


EMPTY = Intervals(np.empty(0), np.empty(0))


def union(start: Floats, end: Floats) -> Intervals:
    """Merge any intervals; empty, inverted and touching ones included."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def join(*sets: Intervals) -> Intervals:
    """Union of sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    """The part inside [start, end)."""
    lows, highs = np.maximum(intervals.start, start), np.minimum(intervals.end, end)
    keep = highs > lows
    return Intervals(lows[keep], highs[keep])

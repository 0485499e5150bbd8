"""Repeats a transfer until its time budget is spent, and keeps the median and the best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from costlab.probes.links import Point

LEAST_REPEATS = 5
MOST_REPEATS = 200
WARM_UP = 2

Timed = Callable[[], float]  # does one transfer, returns its seconds
Agree = Callable[[float], float]  # the value all ranks use (the slowest rank's), or the identity


def alone(value: float) -> float:
    """Agreement of one process with itself."""
    return value


def point(size: int, once: Timed, budget_s: float, agree: Agree = alone) -> Point:
    """`once` repeated: twice to warm up, then five times or more within the budget; all ranks repeat as often."""
    for _ in range(WARM_UP):
        first = once()
    estimate = agree(max(first, 1e-7))
    count = int(min(max(budget_s / estimate, LEAST_REPEATS), MOST_REPEATS))
    times = [once() for _ in range(count)]
    return Point(bytes=size, seconds=statistics.median(times), best=min(times), repeats=count)


def points(sizes: Sequence[int], make: Callable[[int], Timed], budget_s: float, agree: Agree = alone) -> list[Point]:
    """One point a size; each size gets an equal part of the budget."""
    return [point(size, make(size), budget_s / len(sizes), agree) for size in sizes]


def wall(work: Callable[[], object]) -> float:
    """Seconds by the monotonic clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

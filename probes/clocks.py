"""How far the ranks' clocks lie apart and how well that is known, by round trips to rank 0 at a run's start and end.

The clock is CLOCK_REALTIME, which the profilers' timestamps follow. A round trip sent at t0, answered between t1 and t2
and back at t3 puts the offset at ((t1 - t0) + (t2 - t3)) / 2 within half of (t3 - t0) - (t2 - t1), however unequal its
two ways are (Cristian, Distributed Computing 3, 1989); the shortest round trip counts. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

RESOLUTION_US = 1.0  # of the profilers' timestamps

When = Literal["start", "end"]
RoundTrip = tuple[int, int, int, int]  # t0, t1, t2, t3 in ns: t0 and t3 by the asking rank, t1 and t2 by rank 0


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's clock against rank 0's: add `offset_us` to this rank's times to have rank 0's."""

    rank: int
    when: When
    offset_us: float
    uncertainty_us: float  # the true offset lies within this of `offset_us`
    round_trip_us: float | None = None  # the shortest, None for rank 0
    how: str = ""


def reading(rank: int, when: When, trips: Sequence[RoundTrip], one_kernel: bool = False) -> ClockReading:
    """The estimate from round trips; ranks under one kernel have one clock unless the round trips refute it.

    ValueError without round trips.
    """
    if not trips:
        raise ValueError("no round trips")
    t0, t1, t2, t3 = min(trips, key=lambda t: (t[3] - t[0]) - (t[2] - t[1]))
    offset, there_and_back = ((t1 - t0) + (t2 - t3)) / 2e3, max((t3 - t0) - (t2 - t1), 0) / 1e3
    doubt = max(there_and_back / 2, RESOLUTION_US)
    how = f"shortest of {len(trips)} round trips to rank 0"
    if one_kernel and abs(offset) <= doubt:
        offset, doubt = 0.0, RESOLUTION_US
        how = f"one kernel, one clock; {how} agrees"
    return ClockReading(
        rank=rank, when=when, offset_us=offset, uncertainty_us=doubt, round_trip_us=there_and_back, how=how
    )


class ClockDoubt(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the whole run: what its clock may be off by at any time between two readings."""

    rank: int
    offset_us: float  # mean of the readings
    drift_us: float | None  # from start to end, None with one reading
    uncertainty_us: float  # of a reading, and half of the drift


def doubts(readings: Sequence[ClockReading]) -> list[ClockDoubt]:
    """Per rank; a run that died has its first reading only."""
    found = []
    for rank in sorted({r.rank for r in readings}):
        mine = [r for r in readings if r.rank == rank]
        ends = {r.when: r for r in mine}
        drift = ends["end"].offset_us - ends["start"].offset_us if len(ends) == 2 else None
        mean = sum(r.offset_us for r in mine) / len(mine)
        worst = max(r.uncertainty_us for r in mine) + abs(drift or 0.0) / 2
        found.append(ClockDoubt(rank=rank, offset_us=mean, drift_us=drift, uncertainty_us=worst))
    return found

"""The ranks' clocks as a run's manifest has them: what they may be off by, and a sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from costlab.app.figures import number
from costlab.probes.clocks import ClockDoubt, ClockReading, doubts

EXTRA = "clocks"  # key of the manifest's `extra`
NOT_COMPARED = (
    "clocks of the ranks were not compared: wait and transfer come from durations, each on its rank's own clock, and a "
    "lead below 1 us names nobody"
)


def clock_doubts(stored: object) -> list[ClockDoubt]:
    """Per rank, from what the manifest holds; [] for nothing, or for what cannot be read as readings."""
    try:
        readings = msgspec.convert(stored, list[ClockReading])
    except msgspec.ValidationError:
        return []
    sane = [r for r in readings if abs(r.offset_us) < float("inf") and 0 <= r.uncertainty_us < float("inf")]
    return doubts(sane)


def pair_doubt_us(clocks: Sequence[ClockDoubt]) -> float | None:
    """The largest error of a difference between two ranks' times; None with fewer than two clocks."""
    worst = sorted((c.uncertainty_us for c in clocks), reverse=True)[:2]
    return sum(worst) if len(worst) == 2 else None


def clock_sentence(clocks: Sequence[ClockDoubt]) -> str:
    """Offsets and what they are known to, over the run."""
    doubt = pair_doubt_us(clocks)
    if doubt is None:
        return NOT_COMPARED
    offset = max(abs(c.offset_us) for c in clocks)
    drift = max((abs(c.drift_us) for c in clocks if c.drift_us is not None), default=None)
    when = "at the start only" if drift is None else f"at start and end, drift {number(drift)} us"
    return (
        f"clocks: offsets to rank 0 up to {number(offset)} us, measured by round trips {when}; two ranks' times "
        f"compare within {number(doubt)} us, which waits carry as ±, and a smaller lead names nobody"
    )

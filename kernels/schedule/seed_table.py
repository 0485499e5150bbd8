"""The article's all-reduce table (128 GB in 218, 305 and 176 ms) against what the wire allows. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

MESSAGE = 128e9  # bytes, as the article states it
RANKS = 8
NVLINK4 = 450e9  # bytes/s and direction of a GPU, line rate
NVLINK5 = 900e9
_ROWS = (("ring", 0.218, 0.89), ("chain", 0.305, 0.62), ("ring/chain hybrid", 0.176, 0.94))


@dataclass(frozen=True, slots=True)
class SeedRow:
    """One claim: seconds and bandwidth use as printed, and the link bandwidth that they imply together."""

    schedule: str
    seconds: float
    used: float
    achieved: float  # bytes/s through each rank's port that the time needs
    implied_peak: float  # achieved / used

    @property
    def possible(self) -> bool:
        """Whether any NVLink generation to date carries it."""
        return self.achieved <= NVLINK5


def bound(bandwidth: float, ranks: int = RANKS, nbytes: float = MESSAGE) -> float:
    """Least seconds of an all-reduce: each rank sends and receives 2(n-1)/n of the message (Patarasuk & Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth


def seed_table() -> tuple[SeedRow, ...]:
    """The article's rows with what they would need."""
    return tuple(
        SeedRow(name, seconds, used, (need := bound(1.0) / seconds), need / used) for name, seconds, used in _ROWS
    )


def verdict() -> str:
    """Why the table is impossible, with the numbers."""
    peaks = ", ".join(f"{row.implied_peak / 1e9:.0f}" for row in seed_table())
    return (
        f"128 GB over {RANKS} GPUs takes at least {bound(NVLINK4) * 1e3:.0f} ms on NVLink 4 "
        f"({NVLINK4 / 1e9:.0f} GB/s a direction) and {bound(NVLINK5) * 1e3:.0f} ms on NVLink 5; the article's 218, 305 "
        f"and 176 ms would need links of {peaks} GB/s, three different machines, and 128 GB do not fit its 80 GB GPUs."
    )

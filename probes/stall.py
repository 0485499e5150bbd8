"""How much longer training took because of an interruption, with a bootstrap interval."""

from __future__ import annotations

from typing import NamedTuple

RESAMPLES = 2000


class Stall(NamedTuple):
    """Milliseconds lost, and the 95 % interval."""

    ms: float
    low: float
    high: float


def stall(control: list[float], window: list[float], blocked_ms: float, seed: int = 0) -> Stall:
    """`blocked_ms` plus the extra time of the `window` steps against the median of the `control` steps (all ms).

    The window happened once, so it is not resampled; what could have come out differently is the control median
    and the ordinary scatter of as many steps. Both are drawn from the control steps.
    """
    import numpy as np

    if not control or not window:
        raise ValueError("a stall needs control steps and steps around the interruption")
    base = np.asarray(control, dtype=float)
    n = len(window)
    extra = blocked_ms + float(sum(window)) - n * float(np.median(base))
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(base, (RESAMPLES, len(base))), axis=1)
    centred = base - base.mean()
    scatter = centred.std(ddof=1) * np.sqrt(n) * rng.standard_normal(RESAMPLES) if len(base) > 1 else 0.0
    draws = extra + n * (float(np.median(base)) - medians) + scatter
    low, high = np.quantile(draws, (0.025, 0.975))
    return Stall(extra, min(float(low), extra), max(float(high), extra))

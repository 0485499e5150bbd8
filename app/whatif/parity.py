"""Numerics parity: are a variant's losses the baseline's, judged by what a change of seed does to the baseline.

All legs of a round share a seed, so the difference D of two legs' mean losses within a round is free of the seed; the
standard deviation S of the baseline's mean loss over rounds is what another seed would have done. It is an equivalence
test (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987) with S as the margin: "same" if the 95 % interval
of mean D lies within +-S, "different" if it excludes zero and does not, "unknown" otherwise. S comes from few seeds and
is shown. Equal losses to the last bit are "same" whatever the number of seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from costlab.app.whatif.results import LegRecord, Parity
from costlab.app.whatif.spec import BASELINE, CONTROL
from costlab.app.whatif.stats import student_quantile

# Other data, other arithmetic or another algorithm: the losses are meant to differ.
INCOMPARABLE = {
    "batch": "other data",
    "accumulation": "other data",
    "seq": "other data",
    "ranks": "other data",
    "workload": "another model",
    "size": "another model",
    "dtype": "other arithmetic",
    "optimizer": "another algorithm",
    "lr": "another algorithm",
    "warmup": "other training steps",
    "steps": "other training steps",
}

Losses = Mapping[int, float | None]


def judge(legs: Sequence[LegRecord], arm: str, options: Mapping[str, Any]) -> Parity:
    """Parity of `arm` from the complete legs."""
    reasons = [f"{key} was changed: {INCOMPARABLE[key]}" for key in options if key in INCOMPARABLE]
    if reasons:
        return Parity(verdict="not comparable", why="; ".join(reasons))
    by = {(leg.round, leg.arm): leg.losses for leg in legs if leg.status == "complete" and leg.losses}
    shared = [r for r in sorted({r for r, _ in by}) if {(r, BASELINE), (r, arm)} <= by.keys()]
    pairs = [(by[r, BASELINE], by[r, arm]) for r in shared]
    broken = _not_finite(pairs)
    if broken is not None:
        return Parity(verdict="different", why=f"the loss of step {broken} is not a finite number", seeds=len(pairs))
    differences = [_difference(a, b) for a, b in pairs]
    known = [d for d in differences if d]
    if not known:
        return Parity(verdict="unknown", why="no losses of the same steps were recorded")
    again = [_difference(by[r, BASELINE], by[r, CONTROL]) for r, name in by if name == CONTROL and (r, BASELINE) in by]
    found = _weigh(known, [d for d in again if d], [_finite(a) for a, _ in pairs])
    return msgspec.structs.replace(found, **_gradients(legs, arm))


def _gradients(legs: Sequence[LegRecord], arm: str) -> dict[str, Any]:
    """Gradient norms of the first round that has them: the whole and the worst tensor, beside the A/A pair's worst.

    A tensor counts relative to its own norm, or to a thousandth of the largest where its own is smaller: a gradient
    that is nearly zero has no direction to lose.
    """
    by = {(leg.round, leg.arm): leg.gradients for leg in legs if leg.gradients}
    for number in sorted({r for r, name in by if name == arm}):
        if (number, BASELINE) in by:
            base, own = by[number, BASELINE], by[number, arm]
            whole = [math.sqrt(sum(v * v for v in g.values())) for g in (base, own)]
            worst, tensor = _worst(base, own)
            again = by.get((number, CONTROL))
            return {
                "gradient": whole[1] / whole[0] - 1 if whole[0] else None,
                "worst": worst,
                "worst_tensor": tensor,
                "worst_again": _worst(base, again)[0] if again else None,
            }
    return {}


def _worst(base: Mapping[str, float], other: Mapping[str, float]) -> tuple[float | None, str]:
    floor = max(base.values(), default=0.0) / 1000
    apart = [(abs(other[t] - v) / max(v, floor), t) for t, v in base.items() if t in other and max(v, floor) > 0]
    worst, tensor = max(apart, default=(None, ""))
    return worst, tensor


def _not_finite(pairs: Iterable[tuple[Losses, Losses]]) -> int | None:
    """The first step whose loss is finite in the baseline and not in the variant."""
    return next((s for a, b in pairs for s, v in b.items() if v is None and a.get(s) is not None), None)


def _difference(a: Losses, b: Losses) -> list[float]:
    out = []
    for step, x in a.items():
        y = b.get(step)
        if x is not None and y is not None:
            out.append(y - x)
    return out


def _finite(losses: Losses) -> list[float]:
    return [v for v in losses.values() if v is not None]


def _weigh(differences: list[list[float]], again: list[list[float]], baseline: list[list[float]]) -> Parity:
    means = [statistics.fmean(d) for d in differences]
    largest = max(abs(v) for d in differences for v in d)
    rerun = max((abs(v) for d in again for v in d), default=None)
    levels = [statistics.fmean(b) for b in baseline if b]
    spread = statistics.stdev(levels) if len(levels) > 1 else None
    middle = statistics.fmean(means)
    low = high = None
    if len(means) > 1:
        reach = student_quantile(0.975, len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
        low, high = middle - reach, middle + reach
    verdict, why = _verdict(largest, low, high, spread)
    return Parity(
        verdict=verdict,
        why=why,
        difference=middle,
        low=low,
        high=high,
        largest=largest,
        rerun=rerun,
        spread=spread,
        seeds=len(means),
        steps=min(map(len, differences)),
    )


def _verdict(largest: float, low: float | None, high: float | None, spread: float | None) -> tuple[Any, str]:
    if largest == 0:
        return "same", "all losses are equal to the last bit"
    if low is None or high is None or spread is None:
        return "unknown", "one seed: there is nothing to judge the difference by"
    if -spread <= low and high <= spread:
        return "same", "the difference is smaller than what another seed makes"
    if not low <= 0 <= high:
        return "different", "the difference is larger than what another seed makes"
    return "unknown", "too few seeds to tell the difference from what another seed makes"

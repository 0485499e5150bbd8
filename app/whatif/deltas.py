"""What else changed: memory, traffic, kernels, fusion, energy and money of a variant against the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from costlab.app.analysis.compare import Change, change_of
from costlab.app.analysis.cost import money_per_ms
from costlab.app.analysis.views import Figure, RunReport
from costlab.app.whatif.results import LegRecord
from costlab.app.whatif.spec import BASELINE, CONTROL

MARGIN = 3.0  # two normal differences have such a ratio or a larger one in 20 of 100 cases
COLLECTOR_SHARE = 0.005  # of the step, from which garbage collection is told
Getter = Callable[[RunReport], float | None]


def _value(item: Figure | None) -> float | None:
    return item.value if item else None


def _traced(r: RunReport) -> bool:
    """Whether the trace holds the step's collectives: a planned schedule's may be missing (older runs and torches)."""
    stock = r.run.spec.get("schedule", "stock") == "stock"
    return stock or (r.collectives is not None and any(row.schedule for row in r.collectives.rows))


def _bytes(r: RunReport) -> float | None:
    return _value(r.collectives.bytes_per_step) if r.collectives and _traced(r) else None


def _exposed(r: RunReport) -> float | None:
    return r.collectives.exposed_ms if r.collectives and _traced(r) else None


def _launches(r: RunReport) -> float | None:
    return sum(k.calls for k in r.fusion.kernels) if r.fusion and r.fusion.kernels else None


def _rate(r: RunReport) -> float | None:
    return _value(r.fusion.rate) if r.fusion else None


def _compile(r: RunReport) -> float | None:
    return _value(r.compile.cold_s) if r.compile else None


def _stall(r: RunReport) -> float | None:
    return r.checkpoint.per_step_ms if r.checkpoint else None


def _save_stall(r: RunReport) -> float | None:
    stall = _value(r.checkpoint.stall) if r.checkpoint else None
    return None if stall is None else max(stall, 0.0)  # less is noise: a share of it would mean nothing


def _save_bytes(r: RunReport) -> float | None:
    return r.checkpoint.bytes if r.checkpoint else None


# Of the profiled first legs: name, unit, where it is, whether more is better.
_FIGURES: tuple[tuple[str, str, Getter, bool], ...] = (
    ("communicated bytes", "B", _bytes, False),
    ("exposed communication", "ms", _exposed, False),
    ("kernels", "count", _launches, False),
    ("fusion rate", "rate", _rate, True),
    ("cold compile", "s", _compile, False),
    ("checkpoint stall per step", "ms", _stall, False),
    ("checkpoint stall of a save", "ms", _save_stall, False),
    ("checkpoint bytes", "B", _save_bytes, False),
)

_OF_SAVES = (_stall, _save_stall, _save_bytes)


def typical(legs: Sequence[LegRecord], arms: Sequence[str], field: str) -> float | None:
    """Median of a leg's figure over all complete legs of `arms`."""
    values = [getattr(leg, field) for leg in legs if leg.arm in arms and leg.status == "complete"]
    known = [float(v) for v in values if v is not None]
    return statistics.median(known) if known else None


def deltas(
    legs: Sequence[LegRecord],
    arm: str,
    before: RunReport | None,
    after: RunReport | None,
    again: RunReport | None = None,
) -> list[Change]:
    """All changes of which one side at least was measured; of a save only where the variant saved.

    Memory and energy are medians over all legs, garbage collection is a mean over them; the rest is of the profiled
    legs, one each. What changes no more than three times as much as between the baseline's leg and the control's, whose
    report is `again`, or within a figure's own interval, is "same".
    """
    out = []
    for name, unit, field in (("peak memory", "B", "peak_bytes"), ("energy per step", "J", "step_joules")):
        base, first, second = (typical(legs, arms, field) for arms in ([BASELINE, CONTROL], [BASELINE], [CONTROL]))
        change = change_of(name, unit, base, typical(legs, [arm], field))
        out.append(_beside(change, change_of(name, unit, first, second)))
    out += _collections(legs, arm)
    if before is not None and after is not None:
        told = [f for f in _FIGURES if f[2] not in _OF_SAVES or f[2](after) is not None]
        out += [_figure(which, before, after, again) for which in told]
    return [c for c in out if c.a is not None or c.b is not None]


def _collections(legs: Sequence[LegRecord], arm: str) -> list[Change]:
    """Garbage collection where it matters. It is rare: a mean over legs, not a median, which is often that of none."""
    base, first, second, own = (_mean(legs, arms) for arms in ([BASELINE, CONTROL], [BASELINE], [CONTROL], [arm]))
    step = typical(legs, [BASELINE, CONTROL], "step_ms") or 0.0
    if max(base or 0.0, own or 0.0) < COLLECTOR_SHARE * step:
        return []
    name = "garbage collection per step"
    return [_beside(change_of(name, "ms", base, own), change_of(name, "ms", first, second))]


def _mean(legs: Sequence[LegRecord], arms: Sequence[str]) -> float | None:
    known = [leg.gc_ms for leg in legs if leg.arm in arms and leg.status == "complete" and leg.gc_ms is not None]
    return statistics.fmean(known) if known else None


def _figure(
    which: tuple[str, str, Getter, bool], before: RunReport, after: RunReport, again: RunReport | None
) -> Change:
    name, unit, get, more = which
    change = change_of(name, unit, get(before), get(after), more_is_better=more)
    if get in (_stall, _save_stall) and _overlap(_stall_of(before), _stall_of(after)):
        change = msgspec.structs.replace(change, verdict="same")
    return change if again is None else _beside(change, change_of(name, unit, get(before), get(again)))


def _stall_of(r: RunReport) -> Figure | None:
    return r.checkpoint.stall if r.checkpoint else None


def _overlap(a: Figure | None, b: Figure | None) -> bool:
    if a is None or b is None or a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high


def _beside(change: Change, alike: Change) -> Change:
    """The change with what two legs that are alike differ by; one such pair says little, hence the margin."""
    if alike.ratio is None:
        return change
    told = change.ratio is None or abs(change.ratio) > MARGIN * abs(alike.ratio)
    return msgspec.structs.replace(change, again=alike.ratio, verdict=change.verdict if told else "same")


def money_change(report: RunReport | None, base: tuple[float, int, int], arm: tuple[float, int, int]) -> Change | None:
    """Cost per 1 M units before and after, at the baseline's price; each side is (step ms, units a step, ranks)."""
    cost = report.cost if report else None
    price = _value(cost.price_per_gpu_hour) if cost else None
    if report is None or cost is None or price is None or not base[1] or not arm[1]:
        return None
    before, after = (money_per_ms(price, ranks) * ms * 1e6 / units for ms, units, ranks in (base, arm))
    return change_of(f"cost per 1 M {report.run.unit}", cost.currency, before, after)

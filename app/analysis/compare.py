"""Two runs beside each other: what cannot be compared, what moved, and by how much of the whole change."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

from costlab.app.analysis.frames import total as total_of
from costlab.app.analysis.frames import whole
from costlab.app.analysis.layers import status_of
from costlab.app.analysis.views import CollectiveView, Figure, LayerRow, RunInfo, RunReport, View
from costlab.probes.records import SCHEMA_VERSION, FusionStatus

Verdict = Literal["better", "worse", "same", "unknown"]
_INDICES = re.compile(r"(?<![^.])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^.])")
_DRAWS = 2000
_SAME_SHARE = 0.005  # a change of a figure without interval that counts as none
_PART_FLOOR = 0.002  # of the step, the same for a part


class Mismatch(View, frozen=True, kw_only=True):
    """Something that differs between the runs and makes figures incomparable; `effect` says which."""

    what: str
    a: str
    b: str
    effect: str


class Change(View, frozen=True, kw_only=True):
    """One figure in both runs. `change` is b - a, `ratio` change / a, `of_total` its share of the step's change."""

    name: str
    unit: str
    a: float | None
    b: float | None
    change: float | None = None
    ratio: float | None = None
    of_total: float | None = None
    verdict: Verdict = "unknown"
    low: float | None = None  # 95 % interval of `change`
    high: float | None = None
    again: float | None = None  # `ratio` between two runs that are alike, where that was measured


class LayerChange(View, frozen=True, kw_only=True):
    """One layer in both runs, aligned by module FQN with indices as "*"; times and bytes per step."""

    path: str
    status_a: FusionStatus | None
    status_b: FusionStatus | None
    rate_a: float | None
    rate_b: float | None
    ms_a: float | None
    ms_b: float | None
    change_ms: float | None
    of_total: float | None


class CollectiveChange(View, frozen=True, kw_only=True):
    """One kind of collective in both runs; bytes of one rank and ms, per step."""

    kind: str
    group_size: int
    dtype: str
    bytes_a: int | None
    bytes_b: int | None
    ms_a: float | None
    ms_b: float | None
    exposed_a: float | None
    exposed_b: float | None


class Comparison(View, frozen=True, kw_only=True):
    """Run b against run a, the baseline."""

    schema_version: int = SCHEMA_VERSION
    a: RunInfo
    b: RunInfo
    comparable: bool
    mismatches: list[Mismatch]
    options: list[Mismatch]  # options that differ, without making the runs incomparable
    step: Change | None
    headline: list[Change]
    parts: list[Change]
    memory: list[Change]
    layers: list[LayerChange]
    collectives: list[CollectiveChange]
    moved: list[str]  # parts that make up most of the change, in words
    note: str = ""


def compare_reports(a: RunReport, b: RunReport) -> Comparison:
    """Compare two reports; figures of one that the other lacks are kept with None."""
    mismatches = find_mismatches(a, b)
    step = step_change(a, b)
    total = step.change if step else None
    parts = _parts(a, b, step)
    return Comparison(
        a=a.run,
        b=b.run,
        comparable=not mismatches,
        mismatches=mismatches,
        options=_options(a, b),
        step=step,
        headline=_headline(a, b, step),
        parts=parts,
        memory=_memory(a, b),
        layers=_layers(a, b, total),
        collectives=_collectives(a, b),
        moved=_moved(parts, step),
        note="the interval covers the noise within each run, not between runs: only a paired re-run does",
    )


compare = compare_reports


def find_mismatches(a: RunReport, b: RunReport) -> list[Mismatch]:
    """What makes times, throughput or memory of the two runs incomparable."""

    def gpus(r: RunReport) -> str:
        return ", ".join(sorted({g.name for g in r.environment.gpus})) or r.environment.cpu or r.environment.device

    time, work = "times are of other hardware or software", "a step does other work: compare throughput, not step time"
    wanted = [
        ("status", a.run.status, b.run.status, "a run that did not complete has gaps"),
        ("workload", _workload(a.run), _workload(b.run), work),
        (f"{a.run.unit} a step", str(a.run.units_per_step), str(b.run.units_per_step), work),
        ("parameters", str(a.run.parameters), str(b.run.parameters), work),
        ("world size", str(a.run.ranks), str(b.run.ranks), "communication, memory and cost scale with it"),
        ("device", gpus(a), gpus(b), time),
        ("torch", a.environment.torch, b.environment.torch, time),
        ("CUDA", a.environment.cuda or "", b.environment.cuda or "", time),
        ("NCCL", a.environment.nccl or "", b.environment.nccl or "", time),
    ]
    out = [Mismatch(what=w, a=x, b=y, effect=effect) for w, x, y, effect in wanted if x != y]
    if a.run.status == b.run.status != "complete":
        out.insert(0, Mismatch(what="status", a=a.run.status, b=b.run.status, effect="neither run completed"))
    return out


def _workload(run: RunInfo) -> str:
    return f"{run.workload} {run.size}".strip()


def _options(a: RunReport, b: RunReport) -> list[Mismatch]:
    names = [*a.run.spec, *(k for k in b.run.spec if k not in a.run.spec)]
    pairs = [(n, str(a.run.spec.get(n, "")), str(b.run.spec.get(n, ""))) for n in names]
    return [Mismatch(what=n, a=x, b=y, effect="") for n, x, y in pairs if x != y]


def change_of(
    name: str,
    unit: str,
    a: float | None,
    b: float | None,
    total: float | None = None,
    *,
    more_is_better: bool = False,
    floor: float = 0.0,
) -> Change:
    """A figure's change; without an interval, less than 0.5 % of it or less than `floor` counts as the same."""
    if a is None or b is None:
        return Change(name=name, unit=unit, a=a, b=b)
    change = b - a
    ratio = change / abs(a) if a else None
    small = abs(change) <= max(_SAME_SHARE * max(abs(a), abs(b)), floor)
    verdict: Verdict = "same" if small else "better" if (change > 0) == more_is_better else "worse"
    of_total = change / total if total else None
    return Change(name=name, unit=unit, a=a, b=b, change=change, ratio=ratio, of_total=of_total, verdict=verdict)


def step_change(a: RunReport, b: RunReport) -> Change | None:
    """Difference of the median steps with a bootstrap interval; inside it, zero means no difference."""
    if a.steps is None or b.steps is None:
        return None
    plain = change_of("step time", "ms", a.steps.step_ms.value, b.steps.step_ms.value)
    limits = median_difference(a.steps.series_ms, b.steps.series_ms)
    if limits is None or plain.change is None:
        return plain
    low, high = limits
    verdict: Verdict = "same" if low <= 0 <= high else "better" if high < 0 else "worse"
    return Change(
        name=plain.name,
        unit="ms",
        a=plain.a,
        b=plain.b,
        change=plain.change,
        ratio=plain.ratio,
        verdict=verdict,
        low=low,
        high=high,
    )


def median_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of median(b) - median(a); None for fewer than 6 steps in either."""
    if min(len(a), len(b)) < 6:
        return None
    rng = random.Random(0)
    draws = sorted(median(rng.choices(b, k=len(b))) - median(rng.choices(a, k=len(a))) for _ in range(_DRAWS))
    return draws[int(0.025 * _DRAWS)], draws[int(0.975 * _DRAWS) - 1]


def _value(item: Figure | None) -> float | None:
    return item.value if item else None


def _headline(a: RunReport, b: RunReport, step: Change | None) -> list[Change]:
    def pick(r: RunReport) -> dict[str, tuple[Figure | None, bool]]:
        return {
            "throughput": (r.steps.throughput if r.steps else None, True),
            "MFU": (r.steps.mfu if r.steps else None, True),
            "fusion rate": (r.fusion.rate if r.fusion else None, True),
            "communicated bytes": (r.collectives.bytes_per_step if r.collectives else None, False),
            "cold compile": (r.compile.cold_s if r.compile else None, False),
            "energy per step": (r.energy.per_step if r.energy else None, False),
            f"cost per 1 M {a.run.unit}": (r.cost.per_million if r.cost else None, False),
        }

    left, right = pick(a), pick(b)
    by_step = {"throughput", "MFU", f"cost per 1 M {a.run.unit}"} if step and step.verdict == "same" else set()
    out = []
    for name, (x, more) in left.items():
        y = right[name][0]
        unit = (x or y).unit if (x or y) is not None else ""  # type: ignore[union-attr]
        change = change_of(name, unit, _value(x), _value(y), more_is_better=more)
        told = name not in by_step or change.change is None
        out.append(change if told else msgspec.structs.replace(change, verdict="same"))
    stall = [r.checkpoint.per_step_ms if r.checkpoint else None for r in (a, b)]
    out.append(change_of("checkpoint stall per step", "ms", *stall))
    return [c for c in out if c.a is not None or c.b is not None]


def _parts(a: RunReport, b: RunReport, step: Change | None) -> list[Change]:
    """Parts of the step; what moved by less than the step's own noise counts as the same."""
    left = {p.name: p.ms for p in a.waterfall.parts} if a.waterfall else {}
    right = {p.name: p.ms for p in b.waterfall.parts} if b.waterfall else {}
    if not left or not right:
        return []
    names = [*left, *(n for n in right if n not in left)]
    floor, total = _PART_FLOOR * (a.waterfall.step_ms if a.waterfall else 0.0), step.change if step else None
    if step and step.low is not None and step.high is not None:
        floor = max(floor, (step.high - step.low) / 2)
    return [change_of(n, "ms", left.get(n, 0.0), right.get(n, 0.0), total, floor=floor) for n in names]


def _memory(a: RunReport, b: RunReport) -> list[Change]:
    out = [change_of("peak memory", "B", *(_value(r.memory.peak) if r.memory else None for r in (a, b)))]
    left = {p.phase: p for p in a.memory.phases} if a.memory else {}
    right = {p.phase: p for p in b.memory.phases} if b.memory else {}
    for phase in [*left, *(p for p in right if p not in left)]:
        values = [s[phase].allocated_peak or s[phase].host_peak if phase in s else None for s in (left, right)]
        out.append(change_of(f"peak in {phase}", "B", *values))
    return [c for c in out if c.a is not None or c.b is not None]


def _aligned(rows: Iterable[LayerRow]) -> dict[str, list[LayerRow]]:
    """Lines by FQN with every index as "*", so that siblings folded differently still meet."""
    out: dict[str, list[LayerRow]] = {}
    for row in rows:
        out.setdefault(_INDICES.sub("*", row.path), []).append(row)
    return out


def _side(rows: list[LayerRow] | None) -> tuple[FusionStatus | None, float | None, float | None]:
    """Status, rate and ms of aligned lines taken together."""
    if not rows:
        return None, None, None
    size, lost = sum(r.bytes or 0 for r in rows), sum(r.lost or 0 for r in rows)
    rate = 1 - lost / size if size else None
    times = [r.ms for r in rows if r.ms is not None]
    status = rows[0].status if len(rows) == 1 else status_of(rate, (), [r.status for r in rows])
    return status, rate, sum(times) if times else None


def _layers(a: RunReport, b: RunReport, total: float | None) -> list[LayerChange]:
    if a.fusion is None or b.fusion is None:
        return []
    left, right = _aligned(a.fusion.layers), _aligned(b.fusion.layers)
    out = []
    for path in [*left, *(p for p in right if p not in left)]:
        (status_a, rate_a, ms_a), (status_b, rate_b, ms_b) = _side(left.get(path)), _side(right.get(path))
        change = ms_b - ms_a if ms_a is not None and ms_b is not None else None
        out.append(
            LayerChange(
                path=path,
                status_a=status_a,
                status_b=status_b,
                rate_a=rate_a,
                rate_b=rate_b,
                ms_a=ms_a,
                ms_b=ms_b,
                change_ms=change,
                of_total=change / total if change is not None and total else None,
            )
        )
    return out


def _collectives(a: RunReport, b: RunReport) -> list[CollectiveChange]:
    Key = tuple[str, int, str]

    def group(r: RunReport) -> dict[Key, list[CollectiveView]]:
        out: dict[Key, list[CollectiveView]] = {}
        for row in r.collectives.rows if r.collectives else []:
            out.setdefault((row.kind, row.group_size, row.dtype), []).append(row)
        return out

    left, right = group(a), group(b)
    keys = [*left, *(k for k in right if k not in left)]
    return [_collective(*key, left.get(key, []), right.get(key, [])) for key in keys]


def _collective(
    kind: str, group_size: int, dtype: str, a: list[CollectiveView], b: list[CollectiveView]
) -> CollectiveChange:
    return CollectiveChange(
        kind=kind,
        group_size=group_size,
        dtype=dtype,
        bytes_a=whole(total_of(r.bytes_step for r in a)),
        bytes_b=whole(total_of(r.bytes_step for r in b)),
        ms_a=total_of(r.ms for r in a),
        ms_b=total_of(r.ms for r in b),
        exposed_a=total_of(r.exposed_ms for r in a),
        exposed_b=total_of(r.exposed_ms for r in b),
    )


def _moved(parts: list[Change], step: Change | None) -> list[str]:
    """The parts that moved most, largest first; nothing when the steps do not differ."""
    if step is None or not step.change or step.verdict == "same":
        return []
    moved = sorted((p for p in parts if p.change), key=lambda p: -abs(p.change or 0.0))
    out = []
    for part in moved[:4]:
        change = part.change or 0.0
        if abs(change) < 0.02 * abs(step.change):
            continue
        share = f"{100 * abs(change / step.change):.0f} % of the change"
        against = "" if change * step.change > 0 else ", against it"
        out.append(f"{part.name} {'grew' if change > 0 else 'shrank'} by {abs(change):.3g} ms ({share}{against})")
    return out

"""Step time, throughput and MFU from the unprofiled steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.frames import finite, median_interval, quantile, real
from costlab.app.analysis.views import CollectorView, Figure, StepsView
from costlab.probes.records import WorkloadFacts

if TYPE_CHECKING:
    import pandas as pd

PAUSE = 0.05  # share of the median step from which collections in one step are told
LEAST_OTHERS = 3  # steps without such collections that those with them are compared to


def steps_view(steps: pd.DataFrame, facts: WorkloadFacts, ranks: int) -> StepsView | None:
    """The timed steps of a run; None where none was measured. A step's time is its slowest rank's.

    A run that has profiled steps only, such as an imported trace, is shown by those, and its figures say so.
    """
    role = "timed" if (steps.role == "timed").any() else "profiled"
    series = slowest(steps, role)
    if not series:
        return None
    step = step_figure(series, steps["rank"].nunique(), role)
    timed = steps[steps.role == role]
    by_rank = timed.groupby("rank").ms.median().sort_index()
    host = finite(timed.host_ms)
    profiled = slowest(steps, "profiled")
    losses = steps[steps.loss.notna()].sort_values(["rank", "step"], kind="stable")
    losses = losses[losses["rank"] == losses["rank"].min()]
    bad = without_loss(steps)
    return StepsView(
        step_ms=step,
        p10_ms=quantile(series, 0.1),
        p90_ms=quantile(series, 0.9),
        throughput=_throughput(step, facts),
        mfu=_mfu(step, facts, ranks),
        series_ms=series,
        per_rank_ms=[float(v) for v in by_rank],
        host_ms=quantile(host, 0.5) if host else None,
        profiled_ms=quantile(profiled, 0.5) if profiled else None,
        loss_first=real(losses.loss.iloc[0]) if len(losses) else None,
        loss_last=real(losses.loss.iloc[-1]) if len(losses) else None,
        loss_bad=len(bad),
        loss_bad_from=bad[0] if bad else None,
        collector=collector_view(timed, step.value),
        peak_tflops=_machine(facts.peak_tflops, "TFLOP/s", facts.peak_method or "matrix product on one device"),
        profiled_only=role == "profiled",
        copy_gbps=_machine(facts.copy_gbps, "GB/s", "device copy on one device, bytes read plus bytes written"),
    )


def collector_view(timed: pd.DataFrame, median_ms: float | None) -> CollectorView | None:
    """What the collector took of the timed steps; None where no rank watched it, or there is no step time."""
    watched = timed[timed.gc_ms.notna() & timed.ms.notna()]
    if watched.empty or not median_ms:
        return None
    by_step = watched.groupby("step")[["gc_ms", "ms"]].max()
    longest = watched.sort_values("gc_ms", kind="stable").iloc[-1]
    paused = by_step[by_step.gc_ms >= PAUSE * median_ms]
    others = by_step[by_step.gc_ms < PAUSE * median_ms]
    bound = len(others) < LEAST_OTHERS and len(paused) > 0
    without = float((by_step.ms - by_step.gc_ms).median() if bound else others.ms.median())
    lost = (paused.ms - without).clip(lower=0.0).clip(upper=paused.gc_ms)
    return CollectorView(
        per_step_ms=float(by_step.gc_ms.mean()),
        longest_ms=float(longest.gc_ms),
        rank=int(longest["rank"]),
        step=int(longest.step),
        paused=len(paused),
        lost_ms=float(lost.sum()) / len(by_step),
        bound=bound,
    )


def without_loss(steps: pd.DataFrame) -> list[int]:
    """Timed steps whose loss is not a finite number on some rank; a run records one for each."""
    timed = steps[steps.role == "timed"]
    return sorted({int(n) for n, loss in zip(timed.step, timed.loss, strict=True) if real(loss) is None})


def slowest(steps: pd.DataFrame, role: str) -> list[float]:
    """ms of each step of `role` on its slowest rank, in step order; steps that some rank lacks are left out."""
    chosen = steps[(steps.role == role) & steps.ms.notna()]
    if chosen.empty:
        return []
    by_step = chosen.groupby("step")["ms"].agg(["max", "count"])
    full = by_step[by_step["count"] == by_step["count"].max()]
    return [float(v) for v in full["max"].sort_index()]


def step_figure(series: list[float], ranks: int, role: str = "timed") -> Figure:
    """Median with its interval; `series` must not be empty."""
    kind = "unprofiled steps" if role == "timed" else "profiled steps, the profiler's own cost included"
    interval = median_interval(series)
    of = ", slowest rank of each" if ranks > 1 else ""
    how = f"median of the {kind}{of}" + ("; 95 % interval by order statistics" if interval else "")
    low, high = interval or (None, None)
    return Figure(value=quantile(series, 0.5), unit="ms", source="measured", how=how, n=len(series), low=low, high=high)


def _inverse(step: Figure, factor: float, unit: str, how: str) -> Figure | None:
    """`factor` / step time in seconds, the interval turned round."""
    if not step.value or not factor:
        return None

    def turn(ms: float | None) -> float | None:
        return factor / (ms / 1e3) if ms else None

    return Figure(
        value=turn(step.value),
        unit=unit,
        source="derived",
        how=how,
        n=step.n,
        low=turn(step.high),
        high=turn(step.low),
    )


def _throughput(step: Figure, facts: WorkloadFacts) -> Figure | None:
    how = f"{facts.units_per_step:,} {facts.unit} a step on all ranks together / step time"
    return _inverse(step, facts.units_per_step, f"{facts.unit}/s", how)


def _mfu(step: Figure, facts: WorkloadFacts, ranks: int) -> Figure | None:
    flops, peak = facts.flops_per_step, facts.peak_tflops
    if not flops or not peak or not ranks:
        return None
    formula = f" ({facts.flops_formula})" if facts.flops_formula else ""
    method = f" ({facts.peak_method})" if facts.peak_method else ""
    how = (
        f"{flops / 1e12:,.4g} TFLOP a step{formula} / (step time x {ranks} rank{'s' if ranks > 1 else ''}"
        f" x {peak:,.4g} TFLOP/s measured in this run{method})"
    )
    return _inverse(step, flops / (ranks * peak * 1e12), "fraction", how)


def _machine(value: float | None, unit: str, how: str) -> Figure | None:
    return None if not value else Figure(value=value, unit=unit, source="measured", how=how)

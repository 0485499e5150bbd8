"""Splits the unprofiled step without remainder: busy parts as measured, what is left by the profiled idle causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.views import CheckpointView, CollectivesView, Part, StepsView, WaterfallView
from costlab.app.figures import ms

if TYPE_CHECKING:
    import pandas as pd

COMMUNICATION = "exposed communication"
IDLE = ("idle: launch", "idle: sync", "idle: data", "idle: other")
OVERHEAD = "framework overhead"
BUSY = ("matrix math", "memory-bound kernels", "other kernels", COMMUNICATION, "host-device copies")
ALONE = "parts as in the profiled steps, the profiler's own cost included, since no other steps were recorded"
PARTS = (*BUSY, *IDLE, OVERHEAD)


def waterfall_view(
    parts: pd.DataFrame,
    steps: StepsView | None,
    collectives: CollectivesView | None,
    checkpoint: CheckpointView | None = None,
) -> WaterfallView | None:
    """The step's parts in ms, summing to the step; None without unprofiled and profiled steps.

    Device time is taken as the profiled steps show it, since the profiler slows the host and not the device. The rest
    of the unprofiled step is divided like the profiled idle time.
    """
    if steps is None or not steps.step_ms.value or parts.empty:
        return None
    profiled = mean_parts(parts)
    step_ms = sum(profiled.values()) if steps.profiled_only else steps.step_ms.value
    fitted, method = (profiled, ALONE) if steps.profiled_only else fit(profiled, step_ms)
    ranks = parts["rank"].nunique()
    over = f"; mean over {ranks} ranks" if ranks > 1 else ""
    rows = [
        Part(name=n, ms=v, share=v / step_ms, note=_note(n, v, collectives)) for n, v in exact(fitted, step_ms).items()
    ]
    return WaterfallView(
        step_ms=step_ms,
        parts=rows,
        idle=[p for p in rows if p.name in IDLE],
        method=method + over + _stall(checkpoint),
        profiled_steps=parts.step.nunique(),
        rank_spread_ms=max(steps.per_rank_ms) - min(steps.per_rank_ms) if len(steps.per_rank_ms) > 1 else None,
    )


def mean_parts(parts: pd.DataFrame) -> dict[str, float]:
    """Part -> ms, mean over the profiled steps of each rank, then over ranks; in the order of PARTS, others after."""
    per_rank = parts.groupby(["rank", "name"]).ms.sum().div(parts.groupby("rank").step.nunique(), level="rank")
    by_name = per_rank.groupby("name").sum() / parts["rank"].nunique()
    means = {str(n): max(float(v), 0.0) for n, v in by_name.items()}
    return {n: means[n] for n in [*(n for n in PARTS if n in means), *sorted(set(means) - set(PARTS))]}


def fit(profiled: dict[str, float], step_ms: float) -> tuple[dict[str, float], str]:
    """Profiled parts brought to the length of the unprofiled step, and how that was done."""
    rest = {n: v for n, v in profiled.items() if n in IDLE or n == OVERHEAD}
    busy = {n: v for n, v in profiled.items() if n not in rest}
    working, waiting = sum(busy.values()), sum(rest.values())
    left = step_ms - working
    if left < 0:
        method = (
            f"the device was busy for {ms(working)} of a profiled step, longer than the unprofiled step: "
            "busy parts are scaled down to it, idle time cannot be told"
        )
        return {n: v * step_ms / working for n, v in busy.items()} | dict.fromkeys(rest, 0.0), method
    if waiting <= 0:
        method = "busy parts as in the profiled steps; the rest of the unprofiled step has no recorded cause"
        return busy | rest | {"idle: other": left}, method
    method = (
        "busy parts as in the profiled steps; the rest of the unprofiled step, "
        f"{ms(left)}, divided like the {ms(waiting)} of idle time in the profiled steps"
    )
    return busy | {n: v * left / waiting for n, v in rest.items()}, method


def exact(parts: dict[str, float], step_ms: float) -> dict[str, float]:
    """The same parts, the last one above zero absorbing what rounding left, so that their sum is `step_ms` itself."""
    out = dict(parts)
    last = next((n for n in reversed(out) if out[n] > 0), next(iter(out)))
    for _ in range(4):
        out[last] += step_ms - sum(out.values())
    return out


def _stall(checkpoint: CheckpointView | None) -> str:
    """The checkpoint stall beside the parts: a plain step has none."""
    if checkpoint is None or not checkpoint.per_step_ms:
        return ""
    every = f"{checkpoint.every_steps:,}"
    return f"; not in it: checkpoint stall, {ms(checkpoint.per_step_ms)} a step at one synchronous save in {every}"


def _note(name: str, exposed: float, collectives: CollectivesView | None) -> str:
    """Wait and transfer of exposed communication, divided like those of all communication."""
    if name != COMMUNICATION or collectives is None or collectives.wait_ms is None or collectives.transfer_ms is None:
        return ""
    whole = collectives.wait_ms + collectives.transfer_ms
    if whole <= 0:
        return ""
    wait = exposed * collectives.wait_ms / whole
    return f"wait {wait:.3g}, transfer {exposed - wait:.3g}"

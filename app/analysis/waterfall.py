"""Splits the unprofiled step without remainder.

Computing and transferring take as long as in the profiled steps: a profiler slows the host, not the device. Waiting,
for peers or for the host, is what the profiler stretches: the rest of the unprofiled step is divided among the kinds
of waiting in the proportions of the profiled steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
    """The step's parts in ms, summing to the step; None without unprofiled and profiled steps."""
    if steps is None or not steps.step_ms.value or parts.empty:
        return None
    profiled = mean_parts(parts)
    step_ms = sum(profiled.values()) if steps.profiled_only else steps.step_ms.value
    waiting = waiting_share(collectives)
    fit_ = Fit(profiled, profiled.get(COMMUNICATION, 0.0) * (waiting or 0.0), ALONE)
    if not steps.profiled_only:
        fit_ = fit(profiled, step_ms, waiting or 0.0)
    ranks = parts["rank"].nunique()
    over = f"; mean over {ranks} ranks" if ranks > 1 else ""
    rows = [
        Part(name=n, ms=v, share=v / step_ms, note=_note(n, v, fit_.wait_ms) if waiting is not None else "")
        for n, v in exact(fit_.parts, step_ms).items()
    ]
    return WaterfallView(
        step_ms=step_ms,
        parts=rows,
        idle=[p for p in rows if p.name in IDLE],
        method=fit_.method + over + _stall(checkpoint),
        profiled_steps=parts.step.nunique(),
        wait_ms=None if waiting is None else fit_.wait_ms,
        rank_spread_ms=max(steps.per_rank_ms) - min(steps.per_rank_ms) if len(steps.per_rank_ms) > 1 else None,
    )


def mean_parts(parts: pd.DataFrame) -> dict[str, float]:
    """Part -> ms, mean over the profiled steps of each rank, then over ranks; in the order of PARTS, others after."""
    per_rank = parts.groupby(["rank", "name"]).ms.sum().div(parts.groupby("rank").step.nunique(), level="rank")
    by_name = per_rank.groupby("name").sum() / parts["rank"].nunique()
    means = {str(n): max(float(v), 0.0) for n, v in by_name.items()}
    return {n: means[n] for n in [*(n for n in PARTS if n in means), *sorted(set(means) - set(PARTS))]}


class Fit(NamedTuple):
    """Parts of the unprofiled step in ms, how much of its exposed communication is waiting, and how it was done."""

    parts: dict[str, float]
    wait_ms: float
    method: str


def fit(profiled: dict[str, float], step_ms: float, waiting: float = 0.0) -> Fit:
    """Profiled parts brought to the unprofiled step's length; `waiting` is the share of communication that waits."""
    wait = profiled.get(COMMUNICATION, 0.0) * waiting
    idle = {n: v for n, v in profiled.items() if n in IDLE or n == OVERHEAD}
    busy = {n: v for n, v in profiled.items() if n not in idle}
    if wait:
        busy[COMMUNICATION] -= wait
    working, quiet = sum(busy.values()), sum(idle.values()) + wait
    left = step_ms - working
    if left < 0:
        method = (
            f"the device computed and transferred for {ms(working)} of a profiled step, longer than the unprofiled "
            "step: these parts are scaled down to it, idle time and waiting cannot be told"
        )
        return Fit({n: v * step_ms / working for n, v in busy.items()} | dict.fromkeys(idle, 0.0), 0.0, method)
    if quiet <= 1e-9 * left:  # by less than this, no proportion can be told
        method = "busy parts as in the profiled steps; the rest of the unprofiled step has no recorded cause"
        return Fit(busy | idle | {"idle: other": left}, 0.0, method)
    scale = left / quiet
    kinds = "idle time and waiting for peers" if wait else "idle time"
    method = (
        f"busy parts{' and transfers' if wait else ''} as in the profiled steps; the rest of the unprofiled step, "
        f"{ms(left)}, divided like the {ms(quiet)} of {kinds} in the profiled steps"
    )
    parts = {n: idle[n] * scale if n in idle else busy[n] for n in profiled}
    if wait:
        parts[COMMUNICATION] += wait * scale
    return Fit(parts, wait * scale, method)


def waiting_share(collectives: CollectivesView | None) -> float | None:
    """Share of communication time that is waiting for the last rank; None where one rank alone was recorded."""
    if collectives is None or collectives.wait_ms is None or collectives.transfer_ms is None:
        return None
    whole = collectives.wait_ms + collectives.transfer_ms
    return collectives.wait_ms / whole if whole > 0 else None


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
    how = "synchronous save" if checkpoint.chosen == "sync" else f"save with {checkpoint.chosen}"
    return f"; not in it: checkpoint stall, {ms(checkpoint.per_step_ms)} a step at one {how} in {every}"


def _note(name: str, exposed: float, wait: float) -> str:
    """Wait and transfer of exposed communication."""
    return f"wait {wait:.3g}, transfer {max(exposed - wait, 0.0):.3g}" if name == COMMUNICATION else ""

"""What a planned all-reduce should do to the step: the alpha-beta model on the bandwidth that the run reached."""

from __future__ import annotations

import math

from costlab.app.analysis.views import CollectiveView, RunReport
from costlab.app.whatif.results import Prediction
from costlab.kernels.schedule.cost import Library
from costlab.kernels.schedule.errors import FabricError, ScheduleError
from costlab.kernels.schedule.plan import ALL_BUT_SYMMETRIC, Schedule
from costlab.kernels.schedule.planner import Choice, Planner
from costlab.kernels.schedule.topology import Fabric, Link, uniform
from costlab.probes.spec import RunSpec

# Seconds before a message's first byte is there, and of host time for a step of ours: NCCL's tuner and measured on
# NVLink; gloo over loopback, measured on a few machines.
_ALPHA = {"nccl": 3.4e-6, "gloo": 30e-6}
_STEP = {"nccl": 10e-6, "gloo": 60e-6}
_SYMMETRIC: tuple[Schedule, ...] = ("one-shot", "two-shot")


def schedule(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    """The run's all-reduces by the planned schedule instead of the library's, exposed in the same share as now.

    None without all-reduces in the baseline, on several hosts (their links were not measured), or from a baseline that
    is planned already.
    """
    view = report.collectives
    if view is None or base.schedule != "stock" or other.schedule == "stock" or base.nnodes > 1:
        return None
    rows = [r for r in view.rows if r.kind.replace("_", "").replace("-", "").lower() == "allreduce" and _known(r)]
    if not rows or not view.total_ms or view.exposed_ms is None or not report.steps or not report.steps.step_ms.value:
        return None
    library: Library = "gloo" if report.environment.device == "cpu" else "nccl"
    saved, chosen = 0.0, []
    for row in rows:
        try:
            choice = _planner(row, other.schedule, library).choose(row.bytes_in or 1)
        except (ScheduleError, FabricError):
            return None
        stock = _stock(row, library, choice)
        saved += row.calls * (stock - choice.best.seconds) * 1e3
        chosen.append(choice.plan.schedule if choice.plan.schedule == "backend" else choice.best.describe())
    change = -saved * view.exposed_ms / view.total_ms / report.steps.step_ms.value
    named = ", ".join(c for c in dict.fromkeys(chosen) if c != "backend")
    words = f"{named} instead of {library}'s own" if named else f"nothing is faster than {library}'s own, which stays"
    return Prediction(
        change=max(change, -0.99), how=f"alpha-beta model at the bus bandwidth measured: {words}; exposed as now"
    )


def _known(row: CollectiveView) -> bool:
    return bool(row.bytes_in and row.busbw_gbps and row.group_size > 1 and math.isfinite(row.busbw_gbps))


def _fabric(row: CollectiveView, library: Library) -> Fabric:
    link = Link(_ALPHA[library], (row.busbw_gbps or 1.0) * 1e9)
    return uniform(1, row.group_size, link, link, step=_STEP[library])


def _planner(row: CollectiveView, wanted: str, library: Library) -> Planner:
    named: tuple[Schedule, ...]
    if wanted == "auto":
        named = (*ALL_BUT_SYMMETRIC, *_SYMMETRIC) if library == "nccl" else ALL_BUT_SYMMETRIC
    elif wanted == "symmetric":
        named = _SYMMETRIC
    else:  # on one host the hybrid is the two-level schedule: there is nothing between
        named = ("two-level",) if wanted == "hybrid" else (wanted,)  # type: ignore[assignment]
    return Planner(_fabric(row, library), library, named)


def _stock(row: CollectiveView, library: Library, choice: Choice) -> float:
    """The library's own call on the same fabric, seconds."""
    own = choice.seconds("backend")
    if own is not None:
        return own
    return Planner(_fabric(row, library), library, ("backend",)).choose(row.bytes_in or 1).best.seconds

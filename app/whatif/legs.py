"""One leg: a short run of its own in a fresh process group, and what is kept of it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from costlab.app.whatif.results import LegRecord
from costlab.app.whatif.spec import BASELINE, CONTROL, WhatIfSpec
from costlab.probes.records import AnyEvent, GradientRow, Manifest, StepRow
from costlab.probes.spec import RunSpec

if TYPE_CHECKING:
    from costlab.app.analysis.views import RunReport
    from costlab.app.store import Run

SAVES_S = 20.0  # for an arm's saves, where the user gives no --checkpoint-budget
MEMORY_KINDS = ("out-of-memory", "host-out-of-memory")
_SIZE = r"([\d.]+) ?([KMGT]i?B|bytes)"
_POWERS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Launching(Protocol):
    """What the engine needs of a launcher."""

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """Run to the end; blocks."""

    def cancel(self) -> None:
        """Ask the run to stop; safe from any thread."""


LauncherFactory = Callable[[RunSpec, Path], Launching]


def leg_spec(whatif: WhatIfSpec, arm: str, round_: int, id_: str = "") -> RunSpec:
    """Options of one leg of the what-if of this id.

    All legs of a round have the same seed, each round its own: differences within a round are at equal data and
    weights, differences between rounds show what the seed does. Only an arm's first leg is profiled and, where its
    saves are compared (`saves`), saves checkpoints. The first round compiles cold and measures the machine; later ones
    are lean and find what their arm's first leg compiled; all-reduces are timed once, for all arms. Eager and lean legs
    warm up two steps longer: the others compile twice, two steps each, and a timed step must be the same training step
    in every leg for its loss to be comparable.
    """
    spec = whatif.arm(arm)
    first = round_ == 0
    return msgspec.structs.replace(
        spec,
        seed=spec.seed + round_,
        profile_steps=spec.profile_steps if first else 0,
        checkpoint=first and spec.checkpoint and saves(whatif, arm),
        chosen_save_only=True,
        checkpoint_budget_s=spec.checkpoint_budget_s or SAVES_S,
        warmup=spec.warmup + (2 if round_ or spec.compile == "none" else 0),
        keep_raw=False,
        lean=round_ > 0,
        cache_salt=f"{id_}/{arm}" if id_ else "",
    )


def saves(whatif: WhatIfSpec, arm: str) -> bool:
    """Whether an arm's first leg saves, where the what-if does: how a save differs is then told of that arm.

    The baseline does, and of the variants those that save in another way; all of them where none does, since saving was
    asked for. What combines items that are arms themselves is not asked again for what one of them alone answers.
    """
    if arm in (BASELINE, CONTROL):
        return arm == BASELINE
    codecs = {name: whatif.arm(name).checkpoint_codec for name in whatif.arms() if name != CONTROL}
    if len(set(codecs.values())) == 1:
        return True
    factors = next(v.factors for v in whatif.variants if v.name == arm)
    answered = any(codecs.get(factor) == codecs[arm] for factor in factors if factor != arm)
    return codecs[arm] != codecs[BASELINE] and not answered


def leg_directory(arm: str, round_: int) -> str:
    """Where a leg's run is kept, below the what-if's directory."""
    slug = re.sub(r"[^a-z0-9]+", "-", arm.lower()).strip("-")[:40] or "arm"
    return f"legs/r{round_ + 1:02d}-{slug}"


def read_leg(
    path: Path, *, arm: str, round_: int, position: int, seed: int, seconds: float, directory: str
) -> tuple[LegRecord, RunReport]:
    """What a leg measured, and its report."""
    from costlab.app.analysis.build import build_report
    from costlab.app.store import Run

    run = Run(path)
    report = build_report(run)
    failure, steps = run.manifest.failure, report.steps
    series = steps.series_ms if steps else []
    energy = report.energy.per_step if report.energy else None
    peak = report.memory.peak if report.memory else None
    record = LegRecord(
        arm=arm,
        round=round_,
        position=position,
        directory=directory,
        seed=seed,
        status="complete" if run.status == "complete" else "cancelled" if run.status == "cancelled" else "failed",
        seconds=seconds,
        step_ms=statistics.median(series) if series else None,
        steps=len(series),
        units_per_step=report.run.units_per_step,
        losses=losses_of(run),
        peak_bytes=peak.value if peak else None,
        step_joules=energy.value if energy else None,
        gc_ms=steps.collector.per_step_ms if steps and steps.collector else None,
        gradients=gradients_of(run),
        failure=failure.message if failure else "",
        failure_kind=failure.kind if failure else "",
        advice=failure.advice if failure else "",
    )
    return record, report


def losses_of(run: Run) -> dict[int, float | None]:
    """Loss of each timed step, the mean over ranks; None where it is not a finite number on some rank."""
    table = run.table(StepRow.table, StepRow)
    timed = table[table.role == "timed"]
    sums: dict[int, list[float]] = {}
    for step, loss in zip(timed.step, timed.loss, strict=True):
        sums.setdefault(int(step), []).append(float(loss))
    return {step: mean if math.isfinite(mean := statistics.fmean(v)) else None for step, v in sorted(sums.items())}


def gradients_of(run: Run) -> dict[str, float]:
    """Gradient norms by tensor; empty where the run did not record them."""
    table = run.table(GradientRow.table, GradientRow)
    first = table[table["rank"] == table["rank"].min()]
    return {str(t): float(n) for t, n in zip(first.tensor, first.norm, strict=True) if math.isfinite(n)}


def missing_bytes(message: str) -> float | None:
    """Bytes an out-of-memory message shows to be lacking: what was asked for less what was free; None where it is mute.

    CUDA's allocator: "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB of which 1.20 GiB is free".
    It is a lower bound: the allocation that failed need not have been the last.
    """
    wanted = re.search(rf"[Tt]ried to allocate {_SIZE}", message)
    free = re.search(rf"of which {_SIZE} is free", message)
    if wanted is None or free is None:
        return None
    lacking = _bytes(wanted) - _bytes(free)
    return lacking if lacking > 0 else None


def _bytes(match: re.Match[str]) -> float:
    unit = match[2].lower()
    return float(match[1]) * float(1024 ** _POWERS[unit[0]])

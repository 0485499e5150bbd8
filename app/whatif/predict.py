"""Predict, then check: what a toggle should do to the step time, from the baseline's own measurements.

Each model is stated in `how`. Where there is no honest model there is no prediction: the effect of compiling, of
another dtype's matrix math or of autotuning does not follow from what the baseline shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from costlab.app.analysis.views import RunReport
from costlab.app.whatif.predict_schedule import schedule
from costlab.app.whatif.results import Prediction
from costlab.probes.spec import RunSpec

Model = Callable[[RunReport, RunSpec, RunSpec], Prediction | None]

# Passes over memory per parameter: AdamW reads weight, gradient and two moments and writes all but the gradient.
_ACCESSES = {"adamw": 7, "sgd": 5}
# Options that the timed steps do not contain.
_SAVES = ("checkpoint", "checkpoint_codec", "checkpoint_steps", "checkpoint_every")
_NO_EFFECT = (*_SAVES, "lr", "profile_steps", "run_steps")


def predict(report: RunReport | None, base: RunSpec, options: Mapping[str, Any]) -> Prediction | None:
    """The relative change of the step time (of the time per unit where a step does other work), None without a model.

    Several options are taken to act independently: their ratios multiply.
    """
    import msgspec

    if report is None or report.steps is None or not report.steps.step_ms.value:
        return None
    parts = []
    for key, value in options.items():
        if getattr(base, key) == value:
            continue
        other = msgspec.structs.replace(base, **{key: value})
        part = _MODELS[key](report, base, other) if key in _MODELS else None
        if part is None:
            return None
        parts.append(part)
    return _joined(parts)


def checked(prediction: Prediction | None, change: float, low: float, high: float) -> Prediction | None:
    """The prediction with its error, once measured."""
    if prediction is None:
        return None
    return Prediction(
        change=prediction.change,
        how=prediction.how,
        error=change - prediction.change,
        inside=low <= prediction.change <= high,
    )


def _joined(parts: list[Prediction]) -> Prediction | None:
    if not parts:
        return None
    ratio = 1.0
    for part in parts:
        ratio *= 1 + part.change
    more = "; taken to act independently" if len(parts) > 1 else ""
    return Prediction(change=ratio - 1, how="; ".join(p.how for p in parts) + more)


def _step(report: RunReport) -> float:
    assert report.steps is not None
    return report.steps.step_ms.value or 0.0


def _part(report: RunReport, name: str) -> float | None:
    if report.waterfall is None:
        return None
    every = (*report.waterfall.parts, *report.waterfall.idle)
    return next((p.ms for p in every if p.name == name), None)


def _idle(report: RunReport, cause: str) -> float | None:
    """ms a step of one cause of idleness."""
    if report.waterfall is None or not report.waterfall.idle:
        return None
    return sum(p.ms for p in report.waterfall.idle if cause in p.name)


def _cudagraphs(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    launch = _idle(report, "launch")
    if launch is None or not other.cudagraphs or base.cudagraphs:
        return None
    return Prediction(
        change=-launch / _step(report), how="the device's waiting for launches goes: a graph replays without them"
    )


def _kernels(report: RunReport, chosen: Callable[[str, str], bool]) -> float | None:
    """Share of the step of kernels by (phase, layer); None where no such kernel was measured.

    Device kernels last as long with the profiler as without, host operators do not: those are compared with the
    profiled step.
    """
    if report.fusion is None or report.steps is None:
        return None
    busy = [k.ms for k in report.fusion.kernels if k.category != "communication" and chosen(k.phase, k.layer)]
    whole = report.steps.profiled_ms if report.environment.device == "cpu" else _step(report)
    return min(sum(busy) / whole, 1.0) if busy and whole else None


def _recompute(report: RunReport, _base: RunSpec, other: RunSpec) -> Prediction | None:
    """Turning it off has no model: the forward kernels seen then hold both passes."""
    forward = _kernels(report, lambda phase, layer: phase == "forward" and bool(layer))
    if forward is None or other.recompute != "block":  # what the finer policies recompute does not follow from it
        return None
    return Prediction(change=forward, how="the layers' forward kernels run once more in backward")


def _optimizer(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    spent = _kernels(report, lambda phase, _layer: phase == "optimizer")
    if spent is None:
        return None
    before, after = _ACCESSES[base.optimizer], _ACCESSES[other.optimizer]
    return Prediction(
        change=spent * (after / before - 1),
        how=f"the optimizer's kernels are bound by memory: {after} instead of {before} accesses a parameter",
    )


def _batch(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    """Time per unit: what does not grow with the batch is spread over more of it."""
    now = base.batch or _batch_of(report, base)
    if not now or not other.batch:
        return None
    exposed, launch = _part(report, "exposed communication"), _idle(report, "launch")
    shares = [_kernels(report, lambda phase, _layer: phase == "optimizer")]
    shares += [None if ms is None else ms / _step(report) for ms in (exposed, launch)]
    if all(s is None for s in shares):
        return None
    constant = min(sum(s or 0.0 for s in shares), 1.0)
    return Prediction(
        change=constant * (now / other.batch - 1),
        how="optimizer, exposed communication and launch waits are spread over the batch, the rest grows with it",
    )


def _accumulation(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    """Time per unit: the optimizer, and DDP's communication, come once for more micro-batches."""
    optimizer = _kernels(report, lambda phase, _layer: phase == "optimizer")
    exposed = _part(report, "exposed communication") if base.parallel == "ddp" else 0.0
    if optimizer is None or exposed is None:
        return None
    constant = min(optimizer + exposed / _step(report), 1.0)
    once = "optimizer and exposed communication" if base.parallel == "ddp" else "the optimizer"
    return Prediction(
        change=constant * (base.accumulation / other.accumulation - 1),
        how=f"{once} once for {other.accumulation} micro-batches, the rest for each",
    )


def _batch_of(report: RunReport, base: RunSpec) -> float:
    """The batch a rank had by default, 0 where it does not follow from what is known."""
    micro = report.run.ranks * base.accumulation
    each = report.run.units_per_step / micro if micro else 0.0
    if report.run.unit == "samples":
        return each
    return each / base.seq if base.seq else 0.0


def _parallel(report: RunReport, base: RunSpec, other: RunSpec) -> Prediction | None:
    """Bytes on the wire at the bandwidth measured, exposed as much as now."""
    view = report.collectives
    if view is None or report.run.ranks < 2 or "hsdp" in (base.parallel, other.parallel):
        return None
    if "powersgd" in (base.grad_compression, other.grad_compression):
        return None
    rows = [r for r in view.rows if r.busbw_gbps and r.transfer_ms]
    if not rows or not view.total_ms or view.exposed_ms is None:
        return None
    transfer = sum(r.transfer_ms or 0.0 for r in rows)
    wire = sum((r.busbw_gbps or 0.0) * (r.transfer_ms or 0.0) for r in rows) * 1e6
    before, after = (_wire_bytes(report, s) for s in (base, other))
    if not before or not wire:
        return None
    change = (after - before) / (wire / transfer) * view.exposed_ms / view.total_ms
    return Prediction(
        change=change / _step(report),
        how=f"{after / before:.2f}x the bytes on the wire at the bus bandwidth measured, exposed in the same share",
    )


def _wire_bytes(report: RunReport, spec: RunSpec) -> float:
    """Bytes one rank sends in a step, as nccl-tests count for bus bandwidth; parameters are kept in fp32."""
    count, n = report.run.parameters, report.run.ranks
    if spec.parallel == "ddp":
        return 2 * (n - 1) / n * (4 if spec.grad_compression == "none" else 2) * count
    gathered = 2 * count * (2 if spec.dtype == "bf16" else 4) * spec.accumulation
    return (n - 1) / n * (gathered + 4 * count)


def _fused(report: RunReport, _base: RunSpec, other: RunSpec) -> Prediction | None:
    if other.fused and report.environment.device == "cpu":
        return Prediction(change=0.0, how="fused kernels need a CUDA device with Triton: none is put in here")
    root = report.fusion.layers[0] if report.fusion and report.fusion.layers else None
    if root is None or root.path or root.saves_ms is None or not other.fused:
        return None
    loss = _eager_loss(report)
    how = "all bytes lost to fusions that were missed and could be had, at the measured copy bandwidth"
    if loss:
        how += "; and the loss's eager kernels, since logits are no longer written"
    return Prediction(change=-min((root.saves_ms + loss) / _step(report), 1.0), how=how)


def _eager_loss(report: RunReport) -> float:
    """ms a step of an eager cross-entropy's memory-bound kernels, which no fusion trace holds; 0 for other losses."""
    kernels = report.fusion.kernels if report.fusion else []
    own = [k for k in kernels if k.layer == "loss" and k.category == "memory" and not k.name.startswith("triton_")]
    return sum(k.ms for k in own) if any("nll_loss" in k.name for k in own) else 0.0


def _plan(report: RunReport, _base: RunSpec, other: RunSpec) -> Prediction | None:
    """The plan's own predictions, added up; they are of the run it was tuned on."""
    from costlab.kernels.fused.plan import PlanError, read

    if not other.plan:
        return None
    try:
        kept = read(other.plan).kept()
    except PlanError:
        return None
    known = [r.predicted_ms for r in kept]
    if not kept or any(ms is None for ms in known):
        return None
    saved = sum(ms for ms in known if ms is not None)
    return Prediction(
        change=-min(saved / _step(report), 1.0),
        how=f"the plan's {len(kept)} predictions added up, each from the trace it was tuned on",
    )


def _none(_report: RunReport, _base: RunSpec, _other: RunSpec) -> Prediction | None:
    return Prediction(change=0.0, how="the timed steps do not contain it")


_MODELS: dict[str, Model] = {
    "cudagraphs": _cudagraphs,
    "recompute": _recompute,
    "optimizer": _optimizer,
    "batch": _batch,
    "parallel": _parallel,
    "grad_compression": _parallel,
    "schedule": schedule,
    "accumulation": _accumulation,
    "fused": _fused,
    "plan": _plan,
    **dict.fromkeys(_NO_EFFECT, _none),
}

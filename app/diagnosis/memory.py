"""Device memory that is left over, or nearly used up."""

from __future__ import annotations

from costlab.app.analysis.views import Finding, MemoryView
from costlab.app.analysis.waterfall import COMMUNICATION, IDLE, OVERHEAD
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, share, size

FREE_SHARE, TIGHT_SHARE, RECOMPUTE_SHARE = 0.25, 0.05, 0.4
KEEP_FREE = 0.10  # of the device, left unused by a suggested batch
MOST_GROWTH = 8  # times the batch; beyond it nothing in this run tells how memory grows
WORTH_SHARE = 0.01


def _free(view: MemoryView | None) -> tuple[float, float] | None:
    """(headroom, device total) in bytes, None where unknown."""
    if view is None or view.headroom is None or view.headroom.value is None or not view.device_total:
        return None
    return view.headroom.value, float(view.device_total)


def larger_batch(context: Context) -> int | None:
    """The batch doubled as often as memory allows, None where unknown or not even once.

    What grows is taken as the step's peak less the memory of the built model, in proportion to the batch.
    """
    view, batch = context.report.memory, int(context.option("batch", 0) or 0)
    room = _free(view)
    if view is None or room is None or not batch:
        return None
    phases = {p.phase: p for p in view.phases}
    step, built = phases.get("measure"), phases.get("build")
    if step is None or step.reserved_peak is None:
        return None
    fixed = (built.allocated_peak or 0) if built else 0
    grows = max(step.reserved_peak - fixed, 1)
    usable = room[0] - KEEP_FREE * room[1]
    factor = 1
    while factor < MOST_GROWTH and grows * (2 * factor - 1) <= usable:
        factor *= 2
    return batch * factor if factor > 1 else None


def room(context: Context) -> list[Finding]:
    """At least a quarter of the device is free and a larger batch would spread fixed costs."""
    room_ = _free(context.report.memory)
    batch, larger = int(context.option("batch", 0) or 0), larger_batch(context)
    if room_ is None or room_[0] < FREE_SHARE * room_[1] or larger is None:
        return []
    fixed = sum(context.parts.get(n, 0.0) for n in (COMMUNICATION, *IDLE, OVERHEAD))
    saved = fixed * (1 - batch / larger)
    if (context.share_of(saved) or 0.0) < WORTH_SHARE:
        return []
    return [
        context.finding(
            "memory-free",
            f"{size(room_[0])} of device memory is never used: the batch can grow from {batch} to about {larger}",
            [
                f"free at the peak of a step: {share(room_[0] / room_[1])} of {size(room_[1])}",
                f"idle time and exposed communication, {ms(fixed)} a step, would be spread over more work",
            ],
            f"Raise the batch per rank (--batch {larger}) and the learning rate with it, or spend the memory "
            "elsewhere: keep parameters gathered after forward, recompute less.",
            saves_ms=saved,
            how="idle time and exposed communication stay as they are while the batch grows; per present batch",
            proves=f"--batch {larger}",
        )
    ]


def tight(context: Context) -> list[Finding]:
    """Less than 5 % of the device is free at the peak."""
    room_ = _free(context.report.memory)
    if room_ is None or room_[0] >= TIGHT_SHARE * room_[1]:
        return []
    proves = "--recompute block" if context.option("recompute", "none") == "none" else ""
    also = " (--recompute block)" if proves else ""
    return [
        context.finding(
            "memory-full",
            f"Only {size(room_[0])} of device memory is left: a longer sequence or a fragment more ends the run",
            [f"free at the peak of a step: {share(room_[0] / room_[1])} of {size(room_[1])}"],
            f"Recompute activations{also}, lower the batch per rank, or set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation.",
            severity="medium",
            source="measured",
            proves=proves,
        )
    ]


def recompute(context: Context) -> list[Finding]:
    """Activations are recomputed although 40 % of the device is free."""
    room_ = _free(context.report.memory)
    if room_ is None or context.option("recompute", "none") == "none" or room_[0] < RECOMPUTE_SHARE * room_[1]:
        return []
    compute = context.parts.get("matrix math", 0.0) + context.parts.get("memory-bound kernels", 0.0)
    return [
        context.finding(
            "recompute-unneeded",
            "Activations are recomputed although memory is left",
            [
                f"free at the peak of a step: {share(room_[0] / room_[1])} of {size(room_[1])}",
                f"compute of a step, recomputation included: {ms(compute)}",
            ],
            "Turn recomputation off (--recompute none), or on for fewer blocks.",
            saves_ms=compute / 4 if compute else None,
            how="a recomputed forward pass is a quarter of forward + forward + backward, backward taken as two",
            proves="--recompute none",
        )
    ]

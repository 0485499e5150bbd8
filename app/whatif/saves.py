"""What a variant changes about saving: the stall of a save and the bytes it writes, foretold and measured.

The step itself holds no save, so its time says nothing of a checkpoint codec. The stall is that of the way of saving
that each arm asks for, in the leg that saves (one of each arm), with the interval of that one save.
"""

from __future__ import annotations

from costlab.app.analysis.checkpoint import chosen_mode
from costlab.app.analysis.compare import change_of
from costlab.app.analysis.views import CheckpointLine, CheckpointView, Figure, RunReport
from costlab.app.whatif.results import SaveEffect
from costlab.probes.spec import RunSpec

# Stored bits of a parameter's fp32 weight and of its fp32 optimizer state; scales of 16x16 blocks included.
_WEIGHT = {"dcp": 32.0, "exact": 32.0, "fp8": 8.125}
_MOMENTS = {
    "adamw": {"dcp": 64.0, "exact": 64.0, "fp8": 8.125 + 8.0},
    "sgd": {"dcp": 32.0, "exact": 32.0, "fp8": 8.125},
}


def save_effect(before: RunReport | None, after: RunReport | None, base: RunSpec, arm: RunSpec) -> SaveEffect | None:
    """None where the arm saves as the baseline does, or where neither leg saved."""
    if base.checkpoint_codec == arm.checkpoint_codec or before is None or before.checkpoint is None:
        return None
    view = after.checkpoint if after is not None else None
    stall, size = _foretold_stall(before.checkpoint, arm), _foretold_bytes(before.checkpoint, base, arm)
    load = _line(view, chosen_mode(arm.checkpoint_codec), "load")
    save = _line(view, chosen_mode(arm.checkpoint_codec), "save")
    return SaveEffect(
        before=chosen_mode(base.checkpoint_codec),
        after=chosen_mode(arm.checkpoint_codec),
        stall=change_of("stall of a save", "ms", _stall(before.checkpoint), _stall(view)),
        stall_before=before.checkpoint.stall,
        stall_after=view.stall if view else None,
        bytes=change_of("bytes of a save", "B", before.checkpoint.bytes, view.bytes if view else None),
        predicted_stall=stall,
        stall_how="this way of saving was measured in the baseline's leg too" if stall is not None else "",
        predicted_bytes=size,
        bytes_how="stored bits of weights and moments; norms, biases and headers left out" if size is not None else "",
        restored=None if load is None else load.within_bound if load.lossy else load.identical,
        lossy=load.lossy if load else arm.checkpoint_codec == "fp8",
        update_error=save.update_error if save else None,
        note=_why_not(view, save),
    )


def _why_not(view: CheckpointView | None, save: CheckpointLine | None) -> str:
    if save is not None and not save.ok:
        return save.note
    return view.note if view is not None and view.stall is None else ""


def _stall(view: CheckpointView | None) -> float | None:
    return view.stall.value if view is not None and view.stall is not None else None


def _line(view: CheckpointView | None, mode: str, op: str) -> CheckpointLine | None:
    return next((c for c in view.lines if c.mode == mode and c.op == op), None) if view else None


def _foretold_stall(view: CheckpointView, arm: RunSpec) -> Figure | None:
    found = _line(view, chosen_mode(arm.checkpoint_codec), "save")
    return found.stall if found is not None and found.ok else None


def _foretold_bytes(view: CheckpointView, base: RunSpec, arm: RunSpec) -> float | None:
    if view.bytes is None:
        return None
    before, after = (_WEIGHT[s.checkpoint_codec] + _MOMENTS[s.optimizer][s.checkpoint_codec] for s in (base, arm))
    return view.bytes * after / before

"""Peak memory by phase and what is left of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.frames import largest, whole
from costlab.app.analysis.views import Figure, MemoryPhase, MemoryView

if TYPE_CHECKING:
    import pandas as pd

STEPS = "measure"


def memory_view(rows: pd.DataFrame) -> MemoryView | None:
    """Memory of the largest rank; None where none was recorded."""
    if rows.empty:
        return None
    phases = [_phase(str(name), group) for name, group in rows.groupby("phase", sort=False)]
    steps = next((p for p in phases if p.phase == STEPS), None)
    device_total = whole(largest(rows.device_total))
    on_device = any(p.allocated_peak is not None for p in phases)
    return MemoryView(
        peak=_peak(steps, phases, on_device),
        headroom=_headroom(steps, device_total),
        device_total=device_total,
        phases=phases,
        note="" if on_device else "no device allocator: host memory of the largest rank is shown",
    )


def _phase(name: str, rows: pd.DataFrame) -> MemoryPhase:
    return MemoryPhase(
        phase=name,
        allocated_peak=whole(largest(rows.allocated_peak)),
        reserved_peak=whole(largest(rows.reserved_peak)),
        host_peak=whole(largest(rows.host_peak)),
    )


def _peak(steps: MemoryPhase | None, phases: list[MemoryPhase], on_device: bool) -> Figure | None:
    """Of the timed steps, else of the whole run."""
    chosen = [steps] if steps else phases
    value = largest(p.allocated_peak if on_device else p.host_peak for p in chosen)
    if value is None:
        return None
    what = "device allocator" if on_device else "resident host memory"
    when = "during the timed steps" if steps else "over all phases"
    return Figure(value=value, unit="B", source="measured", how=f"peak of the {what} {when}, largest rank")


def _headroom(steps: MemoryPhase | None, device_total: int | None) -> Figure | None:
    if steps is None or steps.reserved_peak is None or device_total is None:
        return None
    how = "device memory less the peak that the allocator had reserved during the timed steps, largest rank"
    return Figure(value=device_total - steps.reserved_peak, unit="B", source="derived", how=how)

"""Energy of the timed steps from the devices' own counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.frames import largest, total, whole
from costlab.app.analysis.views import EnergyView, Figure

if TYPE_CHECKING:
    import pandas as pd


def energy_view(rows: pd.DataFrame, ranks: int) -> EnergyView:
    """Energy per step and average power, all devices together; empty with a note where there is no counter."""
    measured = rows[rows.phase == "measure"]
    joules, seconds, steps = total(measured.joules), largest(measured.seconds), whole(largest(measured.steps))
    if joules is None or not steps:
        return EnergyView(note="not measured: no energy counter was read")
    reporting = measured["rank"].nunique()
    source = ", ".join(sorted({s for s in measured.source if s}))
    devices = f"{reporting} device{'s' if reporting > 1 else ''}"
    how = f"{source or 'energy counter'} over the timed steps and those that lead into them, {devices}"
    return EnergyView(
        per_step=Figure(value=joules / steps, unit="J", source="measured", how=how, n=steps),
        average_w=Figure(value=joules / seconds, unit="W", source="measured", how=how, n=steps) if seconds else None,
        note="" if reporting >= ranks else f"{ranks - reporting} of {ranks} devices gave no energy and are not counted",
    )

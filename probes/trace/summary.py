"""Whole-trace facts that need no step annotations: device time in all, and what the events say of their rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costlab.probes.trace import classify as c
from costlab.probes.trace.columns import CATEGORY, DEVICE, TraceEvents
from costlab.probes.trace.host import Host
from costlab.probes.trace.intervals import union
from costlab.probes.trace.work import device_work


@dataclass(slots=True, frozen=True)
class DeviceTotals:
    """Device activity of a whole trace, ms, by interval union."""

    span_ms: float  # from the first device event's start to the last one's end
    busy_ms: float  # any device event
    compute_ms: float  # kernels other than communication; no copies


def device_totals(events: TraceEvents) -> DeviceTotals | None:
    """None without device events."""
    if not events.is_cat(*DEVICE).any():
        return None
    work = device_work(Host(events))
    start, end = events.start[work.event], events.end[work.event]
    kernel = events.cat[work.event] == CATEGORY["kernel"]
    computes = kernel & (np.array(work.category, dtype=object) != c.COMMUNICATION)
    return DeviceTotals(
        span_ms=float(end.max() - start.min()) / 1000,
        busy_ms=union(start, end).total / 1000,
        compute_ms=union(start[computes], end[computes]).total / 1000,
    )


def ranks_in_events(events: TraceEvents) -> set[int]:
    """Global ranks that the collectives' metadata gives for the recording process; empty where it says nothing."""
    found = set()
    for message in events.messages.values():
        members = (message.group_ranks or "").split(",")
        place = message.group_rank
        if place is not None and 0 <= place < len(members) == message.group_size and members[place].isdigit():
            found.add(int(members[place]))
    return found

"""Splits a step's wall time into parts that sum to it, by interval union with priorities."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from costlab.probes.trace import classify as c
from costlab.probes.trace import host as h
from costlab.probes.trace.columns import NONE
from costlab.probes.trace.host import Host
from costlab.probes.trace.intervals import EMPTY, Floats, Intervals, join, union
from costlab.probes.trace.model import StepWindow
from costlab.probes.trace.work import Work

MATMUL = "matrix math"
MEMORY = "memory-bound kernels"
OTHER = "other kernels"
COMMUNICATION = "exposed communication"
COPIES = "host-device copies"
IDLE_LAUNCH = "idle: launch"
IDLE_SYNC = "idle: sync"
IDLE_DATA = "idle: data"
IDLE_OTHER = "idle: other"
OVERHEAD = "framework overhead"

BUSY = ((MATMUL, c.MATMUL), (MEMORY, c.MEMORY), (OTHER, c.OTHER), (COMMUNICATION, c.COMMUNICATION), (COPIES, c.COPY))
IDLE = (IDLE_LAUNCH, IDLE_SYNC, IDLE_DATA, IDLE_OTHER)
PARTS = (*(name for name, _ in BUSY), *IDLE, OVERHEAD)

Sets = dict[str, Intervals]  # category -> when any work of it ran


def busy_sets(start: Floats, end: Floats, category: list[str]) -> Sets:
    """When work of each category ran, as unions."""
    labels = np.array(category, dtype=object)
    return {kind: union(start[labels == kind], end[labels == kind]) for _, kind in BUSY}


def computing(sets: Sets) -> Intervals:
    """When anything that hides communication ran."""
    return join(*(sets.get(kind, EMPTY) for kind in (c.MATMUL, c.MEMORY, c.OTHER)))


def busy_parts(sets: Sets, window: StepWindow) -> tuple[dict[str, float], Intervals]:
    """Part -> us within the window, each moment counted once for the first part in BUSY's order; and their union."""
    parts: dict[str, float] = {}
    covered, before = EMPTY, 0.0
    for name, kind in BUSY:
        covered = join(covered, sets.get(kind, EMPTY))
        now = covered.within(window.start, window.end)
        parts[name], before = max(now - before, 0.0), max(now, before)
    return parts, covered


def parts_of(sets: Sets, idle: IdleCauses | None, window: StepWindow) -> dict[str, float]:
    """All parts of one window in us, summing to its length; without `idle` the rest is framework overhead."""
    parts, busy = busy_parts(sets, window)
    rest = max(window.end - window.start - sum(parts.values()), 0.0)
    if idle is None:
        return parts | {OVERHEAD: rest}
    causes = idle.within(busy.gaps(window.start, window.end))
    total = sum(causes.values())
    scale = rest / total if total > 0 else 0.0  # one, but for rounding
    return parts | {name: us * scale for name, us in causes.items()}


class IdleCauses:
    """Why the device had nothing to do, gap by gap.

    The cause is sought in the host thread that launched the first work after the gap: it was loading data most of
    the time until that launch, or in a synchronising call at some time, or simply late. Work launched before the gap
    began waited for a stream, an event or the device's own latency: other.
    """

    def __init__(self, host: Host, work: Work) -> None:
        events = host.events
        order = np.argsort(events.start[work.event], kind="stable")
        event, self._issuer = work.event[order], work.issuer[order]
        self._host = host
        self._starts = events.start[event]
        reach = np.maximum.accumulate(events.end[event]) if len(event) else np.empty(0)
        self._gap_start = np.concatenate(([0.0], reach[:-1])) if len(event) else np.empty(0)
        self._last = float(reach[-1]) if len(event) else 0.0
        self._sync: dict[int, Intervals] = {}
        self._data: dict[int, Intervals] = {}

    def within(self, gaps: Intervals) -> dict[str, float]:
        """Cause -> us over some gaps."""
        causes = self._causes(gaps)
        length = gaps.end - gaps.start
        return {name: float(length[causes == i].sum()) for i, name in enumerate(IDLE)}

    def _causes(self, gaps: Intervals) -> NDArray[np.int64]:
        """Index into IDLE for each gap, judged over the whole gap though a window may show a part of it."""
        following = np.searchsorted(self._starts, gaps.end - 1e-6, side="left")
        has_next = following < len(self._starts)
        at = np.minimum(following, max(len(self._starts) - 1, 0))
        began = np.where(has_next, self._gap_start[at], self._last) if len(self._starts) else gaps.start
        began = np.minimum(began, gaps.start)
        issuer = np.where(has_next, self._issuer[at], NONE) if len(self._starts) else np.full(len(began), NONE)
        out = np.full(len(began), IDLE.index(IDLE_OTHER), dtype=np.int64)
        threads = np.where(issuer == NONE, self._host.main_thread, self._thread(issuer))
        ended = ~has_next  # nothing follows: whatever the training thread did until the gap's end
        until = np.where(ended, gaps.end, np.minimum(self._launched(issuer), gaps.end))
        late = (issuer != NONE) & (self._returned(issuer) > began)
        for thread in np.unique(threads).tolist():
            mine = (threads == thread) & (late | ended)
            out[mine] = self._cause(thread, began[mine], until[mine], ended[mine])
        return out

    def _thread(self, issuer: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._host.events.thread[np.maximum(issuer, 0)].astype(np.int64)

    def _launched(self, issuer: NDArray[np.int64]) -> Floats:
        return self._host.events.start[np.maximum(issuer, 0)]

    def _returned(self, issuer: NDArray[np.int64]) -> Floats:
        return self._host.events.end[np.maximum(issuer, 0)]

    def _cause(self, thread: int, began: Floats, until: Floats, ended: NDArray[np.bool_]) -> NDArray[np.int64]:
        until = np.maximum(until, began)
        data = self._ranges(self._data, h.DATA, thread).covered(began, until) > 0.5 * (until - began)
        sync = self._ranges(self._sync, h.SYNC, thread).covered(began, until) > 0
        quiet = np.where(ended, IDLE.index(IDLE_OTHER), IDLE.index(IDLE_LAUNCH))
        return np.where(data, IDLE.index(IDLE_DATA), np.where(sync, IDLE.index(IDLE_SYNC), quiet))

    def _ranges(self, cache: dict[int, Intervals], pattern: re.Pattern[str], thread: int) -> Intervals:
        if thread not in cache:
            cache[thread] = self._host.busy(pattern, tuple({thread, self._host.main_thread}))
        return cache[thread]

"""What the host was doing at a moment: enclosing annotations, operators and autograd nodes of each thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costlab.probes.trace.columns import CATEGORY, NONE, TraceEvents
from costlab.probes.trace.intervals import Floats, Intervals, union

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

STEP = re.compile(r"costlab::step::(\d+)")
PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)")
PHASE = re.compile(r"costlab::phase::(\w+)")
LAYER = re.compile(r"costlab::layer::(.*)")
FRAME = re.compile(r"costlab::frame::(.*)")
COMM = re.compile(r"costlab::comm::(.*)")
FSDP = re.compile(r"FSDP::\w+(?: \((.*)\)| for (.*))?")
COMPILED = re.compile(r"CompiledFunction(?:Backward)?|## Call CompiledFxGraph .*")
OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#.*")
DATA = re.compile(r"costlab::phase::data|enumerate\(DataLoader\)#.*")
SYNC = re.compile(
    r"(?:cuda|hip|cu)(?:Stream|Device|Event|Ctx|Thread)Synchronize|(?:cuda|hip)(?:Memcpy|Memcpy2D|MemcpyWithStream|Free|HostFree)"
    r"|aten::(?:item|_local_scalar_dense|is_nonzero|nonzero)"
)


@dataclass(slots=True)
class Timeline:
    """The innermost of a thread's nested ranges as a step function of time."""

    times: Floats
    values: Indices

    def at(self, t: Floats) -> Indices:
        """Event index at each time, NONE outside all ranges."""
        if not len(self.times):
            return np.full(len(t), NONE, dtype=np.int64)
        i = np.searchsorted(self.times, t, side="right") - 1
        return np.where(i >= 0, self.values[i], NONE)


def timeline(index: Indices, start: Floats, end: Floats) -> Timeline:
    """Build from ranges sorted by start, the longer first; a range that outlives its parent is cut at neither end."""
    times: list[float] = []
    values: list[int] = []
    stack: list[tuple[int, float]] = []
    for i, s, e in zip(index.tolist(), start.tolist(), end.tolist(), strict=True):
        while stack and stack[-1][1] <= s:
            _pop(stack, times, values)
        times.append(s)
        values.append(i)
        stack.append((i, e))
    while stack:
        _pop(stack, times, values)
    return Timeline(np.array(times), np.array(values, dtype=np.int64))


def _pop(stack: list[tuple[int, float]], times: list[float], values: list[int]) -> None:
    _, end = stack.pop()
    times.append(max(end, times[-1]))
    values.append(stack[-1][0] if stack else NONE)


class Host:
    """Index over the host events of one trace. Times are us from the trace's base."""

    def __init__(self, events: TraceEvents) -> None:
        self.events = events
        self.is_op = events.is_cat(CATEGORY["cpu_op"])
        self.is_annotation = self.is_op | events.is_cat(CATEGORY["user_annotation"])
        self._timelines: dict[str, dict[int, Timeline]] = {}

    def matching(self, test: Callable[[str], object]) -> Mask:
        """Host ranges (operators and annotations, not device-side copies of them) whose name passes `test`."""
        wanted = np.array([bool(test(name)) for name in self.events.names], dtype=bool)
        return self.is_annotation & wanted[self.events.name] if len(wanted) else self.is_annotation

    def innermost(self, kind: str, mask: Callable[[], Mask], threads: Indices, times: Floats) -> Indices:
        """Innermost range of a kind around each (thread, time); `mask` chooses the kind's ranges and is asked once."""
        if kind not in self._timelines:
            self._timelines[kind] = self._build(mask())
        out = np.full(len(times), NONE, dtype=np.int64)
        for thread, line in self._timelines[kind].items():
            here = threads == thread
            if here.any():
                out[here] = line.at(times[here])
        return out

    def _build(self, mask: Mask) -> dict[int, Timeline]:
        chosen = np.flatnonzero(mask)
        threads = self.events.thread[chosen]
        lines = {}
        for thread in np.unique(threads).tolist():
            index = chosen[threads == thread]
            lines[thread] = timeline(index, self.events.start[index], self.events.end[index])
        return lines

    def named(self, kind: str, pattern: re.Pattern[str], threads: Indices, times: Floats) -> Indices:
        """Innermost range whose whole name matches `pattern`."""
        return self.innermost(kind, lambda: self.matching(pattern.fullmatch), threads, times)

    def operator(self, threads: Indices, times: Floats) -> Indices:
        """Innermost operator."""
        return self.innermost("op", lambda: self.is_op, threads, times)

    def node(self, threads: Indices, times: Floats) -> Indices:
        """Innermost autograd node that knows its forward operator."""
        return self.innermost("node", lambda: self.is_backward_node, threads, times)

    @cached_property
    def is_backward_node(self) -> Mask:
        """Autograd nodes: operators with a sequence number and the thread of their forward."""
        return self.is_op & (self.events.sequence >= 0) & (self.events.forward_thread > 0)

    @cached_property
    def _forward_of(self) -> dict[int, int]:
        """Sequence number -> the last forward operator that carries it, the one that created the node."""
        forward = np.flatnonzero(self.is_op & (self.events.sequence >= 0) & ~self.is_backward_node)
        return dict(zip(self.events.sequence[forward].tolist(), forward.tolist(), strict=True))

    def forward_operator(self, nodes: Indices) -> Indices:
        """Forward operator of each autograd node, NONE where there is no node or its forward was not recorded."""
        unique, inverse = np.unique(nodes, return_inverse=True)
        found = [
            NONE if n == NONE else self._forward_of.get(int(self.events.sequence[n]), NONE) for n in unique.tolist()
        ]
        return np.array(found, dtype=np.int64)[inverse] if found else nodes

    @cached_property
    def main_thread(self) -> int:
        """The training thread: the one with step annotations, else the busiest with operators; NONE without any."""
        for pattern in (STEP, PROFILER_STEP):
            steps = np.flatnonzero(self.matching(pattern.fullmatch))
            if len(steps):
                return int(self.events.thread[steps[0]])
        ops = self.events.thread[self.is_op]
        return int(np.bincount(ops).argmax()) if len(ops) else NONE

    @cached_property
    def autograd_threads(self) -> set[int]:
        """Threads other than the training thread that run autograd nodes."""
        return {int(t) for t in np.unique(self.events.thread[self.is_backward_node])} - {self.main_thread}

    def busy(self, pattern: re.Pattern[str], threads: tuple[int, ...]) -> Intervals:
        """Union of the ranges and runtime calls named by `pattern` on some threads."""
        wanted = np.array([bool(pattern.fullmatch(name)) for name in self.events.names], dtype=bool)
        host = self.is_annotation | self.events.is_cat(CATEGORY["cuda_runtime"], CATEGORY["cuda_driver"])
        mask = host & wanted[self.events.name] & np.isin(self.events.thread, threads)
        return union(self.events.start[mask], self.events.end[mask])

    def text(self, index: Indices, pattern: re.Pattern[str]) -> list[str]:
        """First group of the pattern in each event's name, "" for NONE and where the group is absent."""
        cache: dict[int, str] = {NONE: ""}
        out = []
        for i in index.tolist():
            if i not in cache:
                match = pattern.fullmatch(self.events.names[self.events.name[i]])
                cache[i] = next((g for g in match.groups() if g is not None), "") if match else ""
            out.append(cache[i])
        return out

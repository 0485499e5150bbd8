"""Where in the model and the step work was issued from: step, phase, layer, frame."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from costlab.probes.trace import host as h
from costlab.probes.trace.columns import NONE
from costlab.probes.trace.host import Host, Indices
from costlab.probes.trace.intervals import Floats
from costlab.probes.trace.model import StepWindow

_LAYER = re.compile(rf"{h.LAYER.pattern}|{h.FSDP.pattern}")
COSTLAB, PROFILER = "costlab", "profiler"  # who annotated the steps
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}


@dataclass(slots=True)
class Places:
    """One entry per piece of work."""

    step: list[int]  # NONE outside all windows
    phase: list[str]
    layer: list[str]
    frame: list[str]
    compiled: list[bool]


def locate(host: Host, threads: Indices, times: Floats, windows: list[StepWindow], blocks: list[str]) -> Places:
    """Place each piece of work by the thread and time that issued it.

    The layer is that of the innermost module annotation (costlab's, or FSDP's own with a module name); work of an
    autograd node belongs to the layer of its forward operator, unless a layer was entered again inside the node
    (recomputation). `frame` is given to work of compiled graphs only.
    """
    node = host.node(threads, times)
    forward = host.forward_operator(node)
    near = host.named("layer", _LAYER, threads, times)
    own = near >= np.maximum(node, 0)  # events are sorted by start: of two around the same moment the later is inside
    layer_event = np.where((near != NONE) & own, near, _at_forward(host, "layer", _LAYER, forward))
    layers = host.text(layer_event, _LAYER)
    compiled = host.named("compiled", h.COMPILED, threads, times) != NONE
    frame_event = host.named("frame", h.FRAME, threads, times)
    frame_event = np.where(frame_event == NONE, _at_forward(host, "frame", h.FRAME, forward), frame_event)
    frames = host.text(frame_event, h.FRAME)
    return Places(
        step=steps_at(windows, times),
        phase=_phases(host, threads, times, node),
        layer=layers,
        frame=[_frame(c, i, f, x, blocks) for c, i, f, x in zip(compiled, frame_event, frames, layers, strict=True)],
        compiled=compiled.tolist(),
    )


def _at_forward(host: Host, kind: str, pattern: re.Pattern[str], forward: Indices) -> Indices:
    """Innermost range around forward operators."""
    at = np.maximum(forward, 0)
    if not len(host.events):
        return forward
    found = host.named(kind, pattern, host.events.thread[at].astype(np.int64), host.events.start[at])
    return np.where(forward == NONE, NONE, found)


def _frame(compiled: bool, event: int, name: str, layer: str, blocks: list[str]) -> str:
    """The annotated frame, else the longest compiled block that holds the layer."""
    if not compiled:
        return ""
    if event != NONE:
        return name
    return max((b for b in blocks if layer == b or layer.startswith(f"{b}.")), key=len, default="")


def _phases(host: Host, threads: Indices, times: Floats, node: Indices) -> list[str]:
    """By annotation on the issuing thread, else on the training thread, else by what autograd or optimizer show."""
    event = host.named("phase", h.PHASE, threads, times)
    main = np.full(len(threads), host.main_thread, dtype=np.int64)
    event = np.where(event == NONE, host.named("phase", h.PHASE, main, times), event)
    optimizer = host.named("optimizer", h.OPTIMIZER, threads, times) != NONE
    autograd = (node != NONE) | np.isin(threads, list(host.autograd_threads))
    seen = zip(host.text(event, h.PHASE), (event != NONE).tolist(), autograd.tolist(), optimizer.tolist(), strict=True)
    return [_phase(*s) for s in seen]


def _phase(name: str, annotated: bool, in_autograd: bool, in_optimizer: bool) -> str:
    if annotated:
        return _PHASES.get(name, "other")
    return "backward" if in_autograd else "optimizer" if in_optimizer else "other"


def find_windows(host: Host) -> tuple[list[StepWindow], str]:
    """The recorded steps and how they were told: costlab's annotations, else torch.profiler's, else none ("")."""
    for pattern, how in ((h.STEP, COSTLAB), (h.PROFILER_STEP, PROFILER)):
        found = np.flatnonzero(host.matching(pattern.fullmatch))
        if len(found):
            return _distinct(host, found, host.text(found, pattern)), how
    return [], ""


def _distinct(host: Host, index: Indices, numbers: list[str]) -> list[StepWindow]:
    """In time order, without overlap: the same step may be annotated on several threads."""
    windows: list[StepWindow] = []
    for i, number in zip(index.tolist(), numbers, strict=True):
        start, end = float(host.events.start[i]), float(host.events.end[i])
        if end > start and (not windows or start >= windows[-1].end):
            windows.append(StepWindow(int(number[:18]), start, end))
    return windows


def steps_at(windows: list[StepWindow], times: Floats) -> list[int]:
    """Step number at each time, NONE outside all windows."""
    if not windows:
        return [NONE] * len(times)
    starts = np.array([w.start for w in windows])
    ends = np.array([w.end for w in windows])
    numbers = np.array([w.step for w in windows], dtype=np.int64)
    i = np.searchsorted(starts, times, side="right") - 1
    inside = (i >= 0) & (times < ends[np.maximum(i, 0)])
    out: list[int] = np.where(inside, numbers[np.maximum(i, 0)], NONE).tolist()
    return out

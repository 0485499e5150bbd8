"""The work of a trace: device kernels linked to the calls that launched them, or CPU operators that computed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from costlab.probes.trace import classify as c
from costlab.probes.trace import host as h
from costlab.probes.trace.columns import CATEGORIES, DEVICE, NONE, RUNTIME, TraceEvents
from costlab.probes.trace.host import Host, Indices, Mask

_LAUNCH_CALL = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_KERNEL_LAUNCH = re.compile(r"launch", re.IGNORECASE)
_COLLECTIVE_OP = re.compile(r"record_param_comms|symm_mem::.*")
_ANNOTATED_COMM = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|rccl):(.+)")


@dataclass(slots=True)
class Work:
    """Pieces of work in order of start, shapes [n]; index arrays refer to the trace's events."""

    event: Indices  # the device event or CPU operator itself
    issuer: Indices  # runtime call that launched it (CPU: the operator), NONE where none was recorded
    category: list[str]
    op: Indices  # innermost operator around the launch
    tag: Indices  # innermost costlab::comm:: annotation
    params: Indices  # innermost record_param_comms
    named: Indices  # innermost nccl:/gloo: annotation
    problems: list[str] = field(default_factory=list)


def device_work(host: Host) -> Work:
    """Kernels, copies and memsets, each linked by correlation to the call that launched it."""
    events = host.events
    device = np.flatnonzero(events.is_cat(*DEVICE))
    issuer, problems = _link(events, device)
    at = np.maximum(issuer, 0)
    threads = np.where(issuer == NONE, NONE, events.thread[at]) if len(events) else issuer
    times = events.start[at] if len(events) else np.empty(0)
    op = host.operator(threads, times)
    tag = host.named("comm", h.COMM, threads, times)
    params = host.named("params", re.compile("record_param_comms"), threads, times)
    named = host.named("nccl", _ANNOTATED_COMM, threads, times)
    category = _categories(host, device, op, tag)
    return Work(device, issuer, category, op, tag, params, named, problems + _several_devices(events, device))


def _categories(host: Host, device: Indices, op: Indices, tag: Indices) -> list[str]:
    events = host.events
    by_call = {i for i in np.unique(op).tolist() if i != NONE and _COLLECTIVE_OP.fullmatch(_name(events, i))}
    cats = (CATEGORIES[k] for k in events.cat[device].tolist())
    rows = zip(device.tolist(), cats, op.tolist(), (tag != NONE).tolist(), strict=True)
    return [
        c.kernel_category(_name(events, i), cat, events.messages.get(i), tagged, o in by_call)
        for i, cat, o, tagged in rows
    ]


def _name(events: TraceEvents, index: int) -> str:
    return events.names[int(events.name[index])]


def _link(events: TraceEvents, device: Indices) -> tuple[Indices, list[str]]:
    """Runtime call of each device event. A correlation id used twice is resolved to the last call before the event."""
    is_launch = np.array([bool(_LAUNCH_CALL.search(n)) for n in events.names], dtype=bool)
    mask = events.is_cat(*RUNTIME) & (events.correlation > 0)
    calls = np.flatnonzero(mask & is_launch[events.name]) if len(events) else np.empty(0, dtype=np.int64)
    order = np.lexsort((events.start[calls], events.correlation[calls]))
    calls = calls[order]
    ids = events.correlation[calls]
    wanted = events.correlation[device]
    first, after = np.searchsorted(ids, wanted, "left"), np.searchsorted(ids, wanted, "right")
    found = (after > first) & (wanted > 0)
    place = np.where(found, first, 0)
    repeated = np.flatnonzero(found & (after - first > 1))
    for i in repeated.tolist():
        among = calls[first[i] : after[i]]
        before = int(np.searchsorted(events.start[among], events.start[device[i]], side="right"))
        place[i] = first[i] + max(before - 1, 0)
    issuer = np.where(found, calls[place] if len(calls) else NONE, NONE).astype(np.int64)
    return issuer, _link_problems(events, device, issuer, len(repeated))


def _link_problems(events: TraceEvents, device: Indices, issuer: Indices, repeated: int) -> list[str]:
    problems = []
    unlinked = int((issuer == NONE).sum())
    if unlinked:
        problems.append(f"{unlinked} of {len(device)} device events have no launch call in the trace, so no layer")
    if repeated:
        problems.append(f"{repeated} device events have several launch calls of the same id; the last before counts")
    linked = issuer != NONE
    early = int((events.start[device[linked]] < events.start[issuer[linked]]).sum())
    if early:
        problems.append(f"{early} device events start before their launch call: host and device clocks disagree")
    return problems


def _several_devices(events: TraceEvents, device: Indices) -> list[str]:
    found = np.unique(events.device[device])
    found = found[found >= 0]
    if len(found) < 2:
        return []
    return [f"the trace has work on {len(found)} devices; their times are united as if they were one"]


def lost_kernels(host: Host, work: Work, inside: Mask) -> list[str]:
    """Kernel launches in the steps whose kernel is absent; profilers drop early ones without saying so."""
    events = host.events
    is_launch = np.array([bool(_KERNEL_LAUNCH.search(n)) for n in events.names], dtype=bool)
    calls = np.flatnonzero(events.is_cat(*RUNTIME) & (events.correlation > 0) & is_launch[events.name] & inside)
    if not len(work.event) or not len(calls):
        return []
    missing = int((~np.isin(events.correlation[calls], events.correlation[work.event])).sum())
    return [f"{missing} of {len(calls)} kernel launches in the steps have no kernel in the trace"] if missing else []


def cpu_work(host: Host) -> Work:
    """Operators that computed something on the training threads, each as one piece with the helpers it called."""
    events = host.events
    chosen: list[int] = []
    category: list[str] = []
    for thread in sorted(training_threads(host)):
        index = np.flatnonzero(host.is_op & (events.thread == thread))
        for i, kind in _leaves(events, index):
            chosen.append(i)
            category.append(kind)
    order = np.argsort(np.array(chosen, dtype=np.int64), kind="stable")
    event = np.array(chosen, dtype=np.int64)[order]
    none = np.full(len(event), NONE, dtype=np.int64)
    return Work(event, event, [category[i] for i in order.tolist()], event, none, none, none)


def training_threads(host: Host) -> set[int]:
    """The thread with the steps and those that run autograd nodes."""
    return ({host.main_thread} | host.autograd_threads) - {NONE}


def _leaves(events: TraceEvents, index: Indices) -> list[tuple[int, str]]:
    """The outermost operators of a thread that do their work themselves, with their category.

    An operator is a mere wrapper when something below it computes: for a matrix product another matrix product, for
    any other operator anything but a helper (copies, fills, views).
    """
    names = [events.names[n] for n in events.name[index].tolist()]
    parent = _parents(events.start[index].tolist(), events.end[index].tolist())
    kinds = [c.cpu_category(n) for n in names]
    computes_below, product_below = [False] * len(names), [False] * len(names)
    for i in range(len(names) - 1, -1, -1):
        p = parent[i]
        if p == NONE:
            continue
        computes_below[p] |= computes_below[i] or (kinds[i] is not None and not c.is_helper(names[i]))
        product_below[p] |= product_below[i] or kinds[i] == c.MATMUL
    out: list[tuple[int, str]] = []
    covered = [False] * len(names)
    for i, kind in enumerate(kinds):
        if parent[i] != NONE and covered[parent[i]]:
            covered[i] = True
        elif kind is not None and not (product_below[i] if kind == c.MATMUL else computes_below[i]):
            covered[i] = True
            out.append((int(index[i]), kind))
    return out


def _parents(start: list[float], end: list[float]) -> list[int]:
    """Position of the enclosing range of each range of one thread, NONE at the top."""
    parents: list[int] = []
    stack: list[int] = []
    for i, s in enumerate(start):
        while stack and end[stack[-1]] <= s:
            stack.pop()
        parents.append(stack[-1] if stack else NONE)
        stack.append(i)
    return parents

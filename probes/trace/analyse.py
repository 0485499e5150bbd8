"""From the events of one rank's trace to its steps: work by layer, collectives, and where each step's time went."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from costlab.probes.records import CollectiveRow, PartRow
from costlab.probes.trace import classify as c
from costlab.probes.trace.collectives import Call, backend_calls, device_calls, exposure, own_calls
from costlab.probes.trace.columns import DEVICE, NONE, TraceEvents
from costlab.probes.trace.host import Host, Indices
from costlab.probes.trace.model import Collective, Launch, RankTrace, StepWindow
from costlab.probes.trace.places import PROFILER, Places, find_windows, locate, steps_at
from costlab.probes.trace.waterfall import IdleCauses, Sets, busy_sets, computing, parts_of
from costlab.probes.trace.work import Work, cpu_work, device_work, lost_kernels, training_threads

_EVERYWHEN = [StepWindow(0, -np.inf, np.inf)]


def analyse(events: TraceEvents, *, device: str, blocks: list[str]) -> RankTrace:
    """Analyse a trace of `device` "cuda" or "cpu"; `blocks` are the FQNs of compiled blocks.

    Steps are the windows of `costlab::step::<n>` annotations, else torch.profiler's `ProfilerStep#<n>`, else the whole
    trace as step 0. Device work belongs to the step whose window holds its launch; the waterfall takes what ran within
    the window, whoever launched it. Times are us from `events.base_us`. Without device events in a CUDA trace there are
    no parts and no launches: `problems` says so.
    """
    host = Host(events)
    windows, how = find_windows(host)
    problems = list(events.problems)
    if not windows and len(events):
        windows = [_span(events)]
        problems.append("no step annotations: the whole trace counts as one step")
    elif how == PROFILER:
        problems.append("steps are torch.profiler's ProfilerStep ranges on the host, the last included")
    trace = RankTrace(events.rank, device, windows, problems=problems)
    issued_in = windows if how else _EVERYWHEN
    if device == "cpu":
        _analyse_cpu(host, trace, issued_in, blocks)
    elif events.is_cat(*DEVICE).any():
        _analyse_device(host, trace, issued_in, blocks)
    else:
        problems.append("the trace has no device events: kernel times, communication and idle time are not measured")
    return trace


def _span(events: TraceEvents) -> StepWindow:
    """From the first event to the end of the last: device events where there are any, else all."""
    chosen = events.is_cat(*DEVICE)
    chosen = chosen if chosen.any() else np.ones(len(events), dtype=bool)
    return StepWindow(0, float(events.start[chosen].min()), float(events.end[chosen].max()))


def _analyse_device(host: Host, trace: RankTrace, issued_in: list[StepWindow], blocks: list[str]) -> None:
    events, work = host.events, device_work(host)
    issued = np.where(work.issuer == NONE, work.event, work.issuer)
    places = locate(host, events.thread[issued].astype(np.int64), events.start[issued], issued_in, blocks)
    trace.launches = _launches(host, work, places)
    sets = busy_sets(events.start[work.event], events.end[work.event], work.category)
    idle = IdleCauses(host, work)
    _add_parts(trace, sets, idle)
    _add_collectives(host, trace, device_calls(host, work), sets, issued_in)
    inside = np.array(steps_at(issued_in, events.start), dtype=np.int64) != NONE
    trace.problems += work.problems + lost_kernels(host, work, inside) + _spill(events, work, trace.steps)


def _spill(events: TraceEvents, work: Work, windows: list[StepWindow]) -> list[str]:
    """Device work that a step launched and that ran after the last window."""
    if not windows:
        return []
    last = windows[-1]
    mine = (work.issuer != NONE) & (events.start[np.maximum(work.issuer, 0)] >= last.start)
    mine &= events.start[np.maximum(work.issuer, 0)] < last.end
    after = float(np.maximum(events.end[work.event[mine]] - last.end, 0.0).max(initial=0.0))
    if after <= 0.01 * (last.end - last.start):
        return []
    return [f"device work of the last step ran {after / 1000:.3g} ms past the step's end and is not in its parts"]


def _analyse_cpu(host: Host, trace: RankTrace, issued_in: list[StepWindow], blocks: list[str]) -> None:
    events, work = host.events, cpu_work(host)
    threads = events.thread[work.event].astype(np.int64)
    places = locate(host, threads, events.start[work.event], issued_in, blocks)
    trace.launches = _launches(host, work, places)
    calls, problems = backend_calls(host)
    own, more = own_calls(host)
    calls, problems = [*calls, *own], [*problems, *more]
    start, end = events.start[work.event], events.end[work.event]
    sets = busy_sets(
        np.concatenate([start, [x.start for x in calls]]),
        np.concatenate([end, [x.end for x in calls]]),
        [*work.category, *(c.COMMUNICATION for _ in calls)],
    )
    _add_parts(trace, sets, None)
    _add_collectives(host, trace, calls, sets, issued_in)
    trace.problems += problems
    if len(training_threads(host)) > 1:
        trace.problems.append("training ran on several threads; their work is united")


def _launches(host: Host, work: Work, places: Places) -> list[Launch]:
    """Launches of the recorded steps; work launched outside them is left out."""
    events = host.events
    names = [events.names[n] for n in events.name[work.event].tolist()]
    ops = [events.names[events.name[o]] if o != NONE else "" for o in work.op.tolist()]
    at = events.start[np.maximum(work.issuer, 0)].tolist() if len(events) else []
    columns = zip(
        names,
        events.start[work.event].tolist(),
        events.dur[work.event].tolist(),
        work.category,
        _streams(events, work.event),
        places.step,
        places.phase,
        places.layer,
        places.frame,
        places.compiled,
        ops,
        (t if i != NONE else None for t, i in zip(at, work.issuer.tolist(), strict=True)),
        (b if b >= 0 else None for b in events.bytes[work.event].tolist()),
        (x if x > 0 else None for x in events.correlation[work.event].tolist()),
        strict=True,
    )
    return [Launch(*row) for row in columns if row[5] != NONE]


def _streams(events: TraceEvents, index: Indices) -> list[str]:
    return [str(s) if s >= 0 else "" for s in events.stream[index].tolist()]


def _add_parts(trace: RankTrace, sets: Sets, idle: IdleCauses | None) -> None:
    for window in trace.steps:
        trace.parts += [(window.step, name, us) for name, us in parts_of(sets, idle, window).items()]


def _add_collectives(host: Host, trace: RankTrace, calls: list[Call], sets: Sets, issued_in: list[StepWindow]) -> None:
    """Place calls where they were issued and number them within their group and step in the order of issue."""
    events = host.events
    if not calls:
        return
    calls = sorted(calls, key=lambda x: x.start)
    exposed = exposure(calls, computing(sets))
    issue = np.array([x.issue for x in calls], dtype=np.int64)
    places = locate(host, events.thread[issue].astype(np.int64), events.start[issue], issued_in, [])
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for i in np.argsort(events.start[issue], kind="stable").tolist():
        call, step = calls[i], places.step[i]
        if step == NONE:
            continue
        seq = counts[step, call.group]
        counts[step, call.group] += 1
        trace.collectives.append(_collective(call, step, seq, exposed[i], places.layer[i], places.phase[i]))
        if call.event != NONE:
            trace.launches.append(_backend_launch(events, trace.collectives[-1], call))
    unsized = sum(1 for x in trace.collectives if x.group_size == 0)
    if unsized:
        trace.problems.append(f"{unsized} collectives do not say their process group: no bus bandwidth for them")


def _collective(call: Call, step: int, seq: int, exposed: float, layer: str, phase: str) -> Collective:
    return Collective(
        kind=call.kind,
        start=call.start,
        dur=call.end - call.start,
        step=step,
        seq=seq,
        group=call.group,
        group_size=call.group_size,
        dtype=call.dtype,
        bytes_in=call.bytes_in,
        bytes_out=call.bytes_out,
        exposed=exposed,
        layer=layer,
        phase=phase,
        schedule=call.schedule,
    )


def _backend_launch(events: TraceEvents, collective: Collective, call: Call) -> Launch:
    """A CPU backend's collective beside the operators of the training threads; its stream is the thread that ran it."""
    name, op = (events.names[int(events.name[i])] for i in (call.event, call.issue))
    own = f"{c.TAG_COMM}{call.kind} {call.schedule}"
    return Launch(
        name=own if call.schedule else name,
        start=collective.start,
        dur=collective.dur,
        category=c.COMMUNICATION,
        stream=events.threads[int(events.thread[call.event])][1],
        step=collective.step,
        phase=collective.phase,
        layer=collective.layer,
        op="" if call.schedule else op,
        launch_start=float(events.start[call.issue]),
    )


def rows(trace: RankTrace, rank: int) -> tuple[list[CollectiveRow], list[PartRow]]:
    """The trace's collectives and parts as table rows, in ms; a collective starts relative to its step's window."""
    starts = {w.step: w.start for w in trace.steps}
    collectives = [
        CollectiveRow(
            rank=rank,
            step=x.step,
            seq=x.seq,
            kind=x.kind,
            group=x.group,
            group_size=x.group_size,
            dtype=x.dtype,
            bytes_in=x.bytes_in,
            bytes_out=x.bytes_out,
            start_us=x.start - starts[x.step],
            ms=x.dur / 1000,
            exposed_ms=x.exposed / 1000,
            layer=x.layer,
            phase=x.phase,
            schedule=x.schedule,
        )
        for x in trace.collectives
    ]
    return collectives, [PartRow(rank=rank, step=s, name=n, ms=us / 1000) for s, n, us in trace.parts]

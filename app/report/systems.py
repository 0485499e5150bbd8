"""Communication, compile and memory as sections."""

from __future__ import annotations

from costlab.app.analysis.frames import largest
from costlab.app.analysis.views import CollectivesView, CollectiveView, CompileView, RunReport
from costlab.app.figures import (
    MISSING,
    count,
    figure,
    ms,
    seconds,
    share,
    size,
    times,
    value,
)
from costlab.app.report.chart import Series, chart
from costlab.app.report.document import Cell, Code, Document, Log, sentence

ROWS = 12  # before the rest is folded


def write_collectives(doc: Document, report: RunReport) -> None:
    """The section; says so where nothing was recorded."""
    doc.heading("Communication")
    view = report.collectives
    if view is None or not view.rows:
        doc.say(sentence(view.note if view and view.note else "no collective was recorded"))
        _write_schedules(doc, view)
        return
    doc.say(
        f"In the profiled steps, {ms(view.total_ms)} a step, {ms(view.exposed_ms)} of it not hidden behind compute; "
        f"transfer {ms(view.transfer_ms)}, waiting for the last rank {ms(view.wait_ms)}{_within(view)}. The profiler "
        "slows the hosts and so lengthens waiting; the waterfall above holds the unprofiled step's share."
    )
    expected = f" (from parameter sizes: {figure(view.expected_bytes)})" if view.expected_bytes else ""
    doc.say(f"A rank moves {figure(view.bytes_per_step)} a step{expected}." if view.bytes_per_step else "")
    headers = ["collective", "ranks", "calls", "bytes a call", "time", "wait", "transfer", "exposed", "algbw", "busbw"]
    ideals = any(r.ideal_ms is not None for r in view.rows)
    headers += ["ideal a call", "ideal/transfer"] if ideals else []
    rows = [_collective(r, ideals) for r in view.rows]
    right = tuple(range(1, len(headers)))
    doc.table(headers, rows[:ROWS], right=right, drop=(8, 10, 1, 6, 11))
    inner = Document()
    inner.table(headers, rows[ROWS:], right=right)
    doc.details(f"{len(view.rows) - ROWS} more", inner)
    _write_bandwidth(doc, view)
    _write_schedules(doc, view)
    ways = list(dict.fromkeys(r.ideal_how for r in view.rows if r.ideal_how))
    ideal = (
        f"ideal: one latency and the call's bytes over the slowest link on its way: {'; '.join(ways)}" if ways else ""
    )
    for text in (view.straggler, view.clock, ideal, view.convention, view.note):
        doc.say(sentence(text))


def _within(view: CollectivesView) -> str:
    return "" if view.wait_doubt_ms is None else f" (±{ms(view.wait_doubt_ms)} by the ranks' clocks)"


def _write_schedules(doc: Document, view: CollectivesView | None) -> None:
    """The all-reduce that each message got; nothing where the library's was never in question."""
    if view is None or not view.schedules:
        return
    doc.heading("All-reduce schedules", 3)
    doc.say(sentence(view.schedules_how))
    headers = ["message", "of", "schedule", "time", "library"]
    rows: list[list[Cell]] = [
        [size(s.bytes), "the step" if s.used else "a test", s.schedule, ms(s.ms), ms(s.library_ms)]
        for s in view.schedules
    ]
    doc.table(headers, rows[:ROWS], right=(0, 3, 4))
    inner = Document()
    inner.table(headers, rows[ROWS:], right=(0, 3, 4))
    doc.details(f"{len(rows) - ROWS} more", inner)


def _write_bandwidth(doc: Document, view: CollectivesView) -> None:
    """The run's collectives on the machine's curves; nothing without curves, the table says as much."""
    if not view.curves:
        return
    series = [Series(c.name, list(zip(c.bytes, c.busbw_gbps, strict=False)), curve=True) for c in view.curves]
    for kind in dict.fromkeys(r.kind for r in view.rows):
        known = [(largest((r.bytes_in, r.bytes_out)), r.busbw_gbps) for r in view.rows if r.kind == kind]
        points = [(x, y) for x, y in known if x is not None and y is not None]
        series += [Series(kind, points)] if points else []
    doc.say("Bus bandwidth over the size of one call, the run's own collectives on curves to compare with:")
    doc.blocks.append(Log(chart(series)))
    doc.items([[f"{c.name}: {c.source}."] for c in view.curves])


def _collective(r: CollectiveView, ideals: bool) -> list[Cell]:
    call = size(largest((r.bytes_in, r.bytes_out)))
    return [
        f"{r.name} {r.dtype}".strip(), str(r.group_size), times(r.calls), call, ms(r.ms),
        ms(r.wait_ms), ms(r.transfer_ms), ms(r.exposed_ms), value(r.algbw_gbps, "GB/s"), value(r.busbw_gbps, "GB/s"),
        *([ms(r.ideal_ms), share(r.ideal_ratio)] if ideals else []),
    ]  # fmt: skip


def write_compile(doc: Document, report: RunReport) -> None:
    """The section; an eager run says so."""
    doc.heading("Compile")
    view = report.compile
    if view is None:
        doc.say("Not recorded.")
        return
    doc.say(sentence(view.note))
    named = [
        ("cold", figure(view.cold_s)),
        ("warm", figure(view.warm_s)),
        ("graphs", count(len(view.graphs)) if view.graphs else MISSING),
        ("graph breaks", count(sum(b.count for b in view.breaks))),
        ("recompiles", count(sum(r.count for r in view.recompiles))),
        ("host memory peak", figure(view.peak_host_bytes)),
        ("device memory peak", figure(view.peak_device_bytes)),
        (
            "spread over the planned run",
            f"{ms(view.amortised_ms)} a step" if view.amortised_ms is not None else MISSING,
        ),
    ]
    doc.table(["compile", "value"], [[k, v] for k, v in named if v != MISSING], right=(1,))
    _write_events(doc, view)
    _write_caches(doc, view)
    inner = Document()
    inner.table(["phase", "time"], [[p.name, seconds(p.ms / 1e3)] for p in view.phases], right=(1,))
    headers = ["graph", "function", "operators", "time"]
    graphs: list[list[Cell]] = [
        [Code(g.compile_id), g.name, count(g.ops), seconds(g.seconds)] for g in view.graphs[:100]
    ]
    inner.table(headers, graphs, right=(2, 3), wide=1)
    doc.details("Phases and graphs", inner)


def _write_events(doc: Document, view: CompileView) -> None:
    for title, events in (("Graph breaks", view.breaks), ("Recompiles", view.recompiles)):
        if events:
            doc.heading(title, 3)
            rows: list[list[Cell]] = [[count(e.count), e.reason, Code(e.source)] for e in events]
            doc.table(["times", "reason", "where"], rows[:ROWS], right=(0,), wide=1)
            inner = Document()
            inner.table(["times", "reason", "where"], rows[ROWS:], right=(0,), wide=1)
            doc.details(f"{len(events) - ROWS} more", inner)


def _write_caches(doc: Document, view: CompileView) -> None:
    rows: list[list[Cell]] = [
        [c.cache, c.run or MISSING, str(c.rank), count(c.hit), count(c.miss), count(c.bypass)] for c in view.caches
    ]
    if not rows:
        return
    doc.heading("Caches", 3)
    headers = ["cache", "run", "rank", "hit", "miss", "bypass"]
    doc.table(headers, rows[:ROWS], right=(2, 3, 4, 5))
    inner = Document()
    inner.table(headers, rows[ROWS:], right=(2, 3, 4, 5))
    doc.details(f"{len(rows) - ROWS} more", inner)


def write_memory(doc: Document, report: RunReport) -> None:
    """The section; says so where nothing was recorded."""
    doc.heading("Memory")
    view = report.memory
    if view is None:
        doc.say("Not measured.")
        return
    free = ""
    if view.headroom is not None and view.device_total:
        part = share((view.headroom.value or 0.0) / view.device_total)
        free = f" Never used: {figure(view.headroom)}, {part} of {size(view.device_total)}."
    doc.say(f"Peak {figure(view.peak)} ({view.peak.how}).{free}" if view.peak else "")
    on_device = any(p.allocated_peak is not None for p in view.phases)
    if on_device:
        device: list[list[Cell]] = [
            [p.phase, size(p.allocated_peak), size(p.reserved_peak), size(p.host_peak)] for p in view.phases
        ]
        doc.table(["phase", "allocated peak", "reserved peak", "host peak"], device, right=(1, 2, 3))
    else:
        doc.table(["phase", "host peak"], [[p.phase, size(p.host_peak)] for p in view.phases], right=(1,))
    doc.say(sentence(view.note))

"""Communication, checkpoint, compile and memory as sections."""

from __future__ import annotations

from costlab.app.analysis.frames import largest
from costlab.app.analysis.views import CheckpointLine, CollectiveView, CompileView, RunReport
from costlab.app.figures import (
    MISSING,
    count,
    figure,
    interval,
    ms,
    number,
    resolved,
    seconds,
    share,
    size,
    times,
    value,
)
from costlab.app.report.document import Cell, Code, Document, sentence

ROWS = 12  # before the rest is folded


def write_collectives(doc: Document, report: RunReport) -> None:
    """The section; says so where nothing was recorded."""
    doc.heading("Communication")
    view = report.collectives
    if view is None or not view.rows:
        doc.say(sentence(view.note if view and view.note else "no collective was recorded"))
        return
    doc.say(
        f"In the profiled steps, {ms(view.total_ms)} a step, {ms(view.exposed_ms)} of it not hidden behind compute; "
        f"transfer {ms(view.transfer_ms)}, waiting for the last rank {ms(view.wait_ms)}. The profiler slows the hosts "
        "and so lengthens waiting; the waterfall above holds the unprofiled step's share."
    )
    expected = f" (from parameter sizes: {figure(view.expected_bytes)})" if view.expected_bytes else ""
    doc.say(f"A rank moves {figure(view.bytes_per_step)} a step{expected}." if view.bytes_per_step else "")
    headers = ["collective", "ranks", "calls", "bytes a call", "time", "wait", "transfer", "exposed", "algbw", "busbw"]
    right = tuple(range(1, len(headers)))
    doc.table(headers, [_collective(r) for r in view.rows[:ROWS]], right=right, drop=(8, 1, 6))
    inner = Document()
    inner.table(headers, [_collective(r) for r in view.rows[ROWS:]], right=right)
    doc.details(f"{len(view.rows) - ROWS} more", inner)
    for text in (view.straggler, view.convention, view.note):
        doc.say(sentence(text))


def _collective(r: CollectiveView) -> list[Cell]:
    call = size(largest((r.bytes_in, r.bytes_out)))
    return [
        f"{r.kind} {r.dtype}".strip(), str(r.group_size), times(r.calls), call, ms(r.ms),
        ms(r.wait_ms), ms(r.transfer_ms), ms(r.exposed_ms), value(r.algbw_gbps, "GB/s"), value(r.busbw_gbps, "GB/s"),
    ]  # fmt: skip


def write_checkpoint(doc: Document, report: RunReport) -> None:
    """The section; says so where no checkpoint was taken."""
    doc.heading("Checkpoint")
    view = report.checkpoint
    if view is None:
        doc.say("Not measured: no checkpoint was taken.")
        return
    headers = ["", "mode", "stall", "95 % interval", "call blocks", "until done", "size", "GB/s", "restored"]
    doc.table(headers, [_checkpoint(c) for c in view.lines], right=(2, 3, 4, 5, 6, 7), wide=1, drop=(7, 6, 3))
    if view.per_step_ms is not None:
        doc.say(
            f"One synchronous save every {view.every_steps:,} steps costs {ms(view.per_step_ms)} a step, which is not "
            "part of the step above."
        )
    if any(c.stall and c.stall.low is not None and c.stall.low <= 0 for c in view.lines):
        doc.say("A stall after < is not told apart from none: the bound is the upper end of its 95 % interval.")
    doc.say(f"Smallest stall: {view.best_mode}." if view.best_mode else "")
    notes = [[f"{c.op} {c.mode}: {c.note}"] for c in view.lines if c.note]
    doc.items(notes)
    doc.say(sentence(view.note))


def _checkpoint(c: CheckpointLine) -> list[Cell]:
    same = {True: "bit for bit", False: "DIFFERS", None: MISSING}[c.identical]
    state = c.mode if c.ok else f"{c.mode} ({'not run' if c.note.startswith('not run') else 'failed'})"
    return [c.op, state, resolved(c.stall), interval(c.stall), ms(c.blocked_ms), ms(c.total_ms), size(c.bytes),
            number(c.gbps), same if c.op == "load" else ""]  # fmt: skip


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

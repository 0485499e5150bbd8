"""Checkpoints as a section: ways of saving, the engine's timeline, what its codecs do, losses after a restore."""

from __future__ import annotations

from costlab.app.analysis.views import CheckpointLine, CheckpointView, ResumeLine, RunReport, StageLine
from costlab.app.figures import MISSING, count, interval, ms, number, resolved, share, size
from costlab.app.report.document import Cell, Document, sentence


def write_checkpoint(doc: Document, report: RunReport) -> None:
    """The section; says so where no checkpoint was taken."""
    doc.heading("Checkpoint")
    view = report.checkpoint
    if view is None:
        doc.say("Not measured: no checkpoint was taken.")
        return
    headers = ["", "mode", "stall", "95 % interval", "call blocks", "until done", "size", "bits", "GB/s", "restored"]
    rows = [_line(c) for c in view.lines]
    doc.table(headers, rows, right=(2, 3, 4, 5, 6, 7, 8), wide=1, drop=(8, 7, 6, 3))
    if view.per_step_ms is not None:
        doc.say(
            f"One {_saved(view)} every {view.every_steps:,} steps costs {ms(view.per_step_ms)} a step, which is not "
            "part of the step above."
        )
    if any(c.stall and c.stall.low is not None and c.stall.low <= 0 for c in view.lines):
        doc.say("A stall after < is not told apart from none: the bound is the upper end of its 95 % interval.")
    doc.say(f"Smallest stall of the exact ways: {view.best_mode}." if view.best_mode else "")
    _write_stages(doc, view)
    _write_codecs(doc, view)
    _write_resumed(doc, view)
    doc.items([[f"{c.op} {c.mode}: {c.note}"] for c in view.lines if c.note])
    doc.say(sentence(view.note))


def _saved(view: CheckpointView) -> str:
    return "synchronous save" if view.chosen == "sync" else f"save with {view.chosen}"


def _line(c: CheckpointLine) -> list[Cell]:
    state = c.mode if c.ok else f"{c.mode} ({'not run' if c.note.startswith('not run') else 'failed'})"
    return [c.op, state, resolved(c.stall), interval(c.stall), ms(c.blocked_ms), ms(c.total_ms), size(c.bytes),
            number(c.bits), number(c.gbps), _restored(c) if c.op == "load" else ""]  # fmt: skip


def _restored(c: CheckpointLine) -> str:
    if c.lossy:
        return {True: "within its bound", False: "BEYOND ITS BOUND", None: MISSING}[c.within_bound]
    return {True: "bit for bit", False: "DIFFERS", None: MISSING}[c.identical]


def _write_stages(doc: Document, view: CheckpointView) -> None:
    """The engine's timeline; ceilings are said once below."""
    if not view.stages:
        return
    headers = ["engine", "stage", "from", "to", "busy", "moved", "GB/s", "ceiling", "of it"]
    doc.table(headers, [_stage(s) for s in view.stages], right=(2, 3, 4, 5, 6, 7, 8), drop=(5, 2))
    said = dict.fromkeys(f"{s.stage}: {s.ceiling}" for s in view.stages if s.ceiling)
    doc.say(f"Stages of costlab's engine, from the call on, slowest rank. Ceilings, measured here: {'; '.join(said)}.")


def _stage(s: StageLine) -> list[Cell]:
    return [s.mode.partition(":")[2], s.stage, ms(s.start_ms), ms(s.end_ms), ms(s.busy_ms), size(s.bytes),
            number(s.gbps), number(s.ceiling_gbps), share(s.of_ceiling)]  # fmt: skip


def _write_codecs(doc: Document, view: CheckpointView) -> None:
    if not view.codecs:
        return
    headers = [
        "engine",
        "tensors",
        "codec",
        "bits",
        "relative L2",
        "max abs",
        "to zero",
        "first update",
        "code",
        "decode",
    ]
    rows: list[list[Cell]] = [
        [c.mode.partition(":")[2], c.tensor_class, c.codec, number(c.bits), share(c.rel_l2), number(c.max_abs),
         count(c.flushed), share(c.update_error), number(c.encode_gbps), number(c.decode_gbps)]
        for c in view.codecs
    ]  # fmt: skip
    doc.table(headers, rows, right=(3, 4, 5, 6, 7, 8, 9), drop=(9, 8, 5))
    values = min(c.values for c in view.codecs)
    doc.say(
        f"On a sample of the first rank's state, {count(values)} values a class or more. To zero: values that were not "
        "zero and came back as zero. First update: relative error of the first Adam update after a restore, with only "
        "this class coded. Code and decode in GB/s of the original bytes."
    )


def _write_resumed(doc: Document, view: CheckpointView) -> None:
    if not view.resumed:
        return
    rows = [[r.mode, f"+{r.after}", number(r.loss, 6), number(r.exact_loss, 6), difference(r)] for r in view.resumed]
    doc.table(["resumed from", "updates", "loss", "loss of the exact training", "difference"], rows, right=(1, 2, 3, 4))
    doc.say("Same data, order and random numbers as the training that went on; mean over ranks.")


def difference(row: ResumeLine) -> str:
    """Resumed less exact; "none" where both are the same number."""
    off = row.loss - row.exact_loss
    return "none" if off == 0 else f"{off:+.2g}"

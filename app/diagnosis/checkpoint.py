"""Saves that stop training, and saves that cannot be trusted."""

from __future__ import annotations

from costlab.app.analysis.checkpoint import best_save, stall_ms
from costlab.app.analysis.views import CheckpointLine, CheckpointView, Finding
from costlab.app.diagnosis.rule import Context, severity_of
from costlab.app.figures import interval, ms, seconds

ALONE_SHARE = 0.01  # of the step, the whole stall spread over the interval, where nothing better was measured
STALL_SHARE = 0.003  # of the step, the saving spread over the checkpoint interval
_ASYNC = "async:"
_ENGINE = "costlab:"


def stall(context: Context) -> list[Finding]:
    """Another way of saving stalls less than the synchronous one, by at least 0.3 % of the step."""
    view = context.report.checkpoint
    plain = next((c for c in view.lines if c.op == "save" and c.mode == "sync"), None) if view else None
    best = best_save(view.lines) if view else None
    if view is None or plain is None or not view.every_steps or stall_ms(plain) is None:
        return []
    if best is None or best is plain:
        return _nothing_better(context, view, plain)
    before, after = stall_ms(plain) or 0.0, max(stall_ms(best) or 0.0, 0.0)
    saved = (before - after) / view.every_steps
    if (context.share_of(saved) or 0.0) < STALL_SHARE:
        return []
    return [
        context.finding(
            "checkpoint-stall",
            f"A synchronous save stops training for {seconds(before / 1e3)}; {_words(best)} for "
            + (seconds(after / 1e3) if after else "less than could be told from the steps around it"),
            [
                f"synchronous save: {_measured(plain)}; one in {view.every_steps:,} steps makes that "
                f"{ms(before / view.every_steps)} a step",
                f"{_words(best)}: {_measured(best)}, durable after {ms(best.total_ms)}",
                f"note: {best.note}" if best.note else "",
            ],
            f"Save with {_call(best.mode.removeprefix(_ASYNC))}"
            + ("." if best.mode.startswith(_ENGINE) else "; wait for the returned future before the next save."),
            saves_ms=saved,
            source="measured",
            how=f"difference of the two measured stalls / {view.every_steps:,} steps; not part of a plain step",
            proves=_option(best) if context.option("checkpoint_codec", "dcp") == "dcp" else "",
        )
    ]


def _nothing_better(context: Context, view: CheckpointView, plain: CheckpointLine) -> list[Finding]:
    """The synchronous save costs at least 1 % of the steps, and no better way was measured."""
    each = (stall_ms(plain) or 0.0) / view.every_steps
    part = context.share_of(each) or 0.0
    if part < ALONE_SHARE:
        return []
    others = [c for c in view.lines if c.op == "save" and c is not plain]
    worse = any(stall_ms(c) is not None for c in others)
    return [
        context.finding(
            "checkpoint-stall",
            f"A synchronous save stops training for {seconds((stall_ms(plain) or 0.0) / 1e3)}",
            [
                f"{_measured(plain)}; one in {view.every_steps:,} steps makes that {context.of_step(each)}",
                *(f"{_words(c)}: {_measured(c) if c.stall else c.note or 'not measured'}" for c in others[:2]),
            ],
            "Save less often, or to faster storage: no asynchronous way stalled less here."
            if worse
            else f"Save asynchronously, with {_call('pinned')}; it was not measured in this run.",
            severity=severity_of(part),
            how="not modelled: no better way of saving was measured in this run",
        )
    ]


def _option(best: CheckpointLine) -> str:
    """The run's option that saves this way; none does for the ways of `dcp.async_save`."""
    preset = best.mode.removeprefix(_ENGINE).partition("+")[0] if best.mode.startswith(_ENGINE) else ""
    return f"--checkpoint-codec {preset}" if preset in ("exact", "fp8") else ""


def _call(configuration: str) -> str:
    """The call that saves this way."""
    if configuration.startswith(_ENGINE):
        preset = configuration.removeprefix(_ENGINE).partition("+")[0]
        return f'costlab.kernels.codec: AsyncCheckpointer(directory, "{preset}") with attach(optimizer)'
    known = {
        "default": "async_save(state, checkpoint_id=path)",
        "pinned": "async_save(..., async_stager=BlockingAsyncStager(cache_staged_state_dict=True)), the stager kept",
        "background": "async_save(..., async_stager=DefaultStager(StagingOptions(use_pinned_memory=False, "
        "use_async_staging=True))) and staging awaited before optimizer.step()",
        "background-pinned": "async_save(..., async_stager=DefaultStager(StagingOptions(use_pinned_memory=True, "
        "use_async_staging=True))) and staging awaited before optimizer.step()",
        "process": "async_save(..., async_checkpointer_type=AsyncCheckpointerType.PROCESS)",
    }
    return f"torch.distributed.checkpoint: {known.get(configuration, f'configuration {configuration!r}')}"


def _words(line: CheckpointLine) -> str:
    if line.mode.startswith(_ENGINE):
        return f"costlab's engine ({line.mode.removeprefix(_ENGINE)})"
    return f"asynchronous ({line.mode.removeprefix(_ASYNC)})" if line.mode.startswith(_ASYNC) else line.mode


def _measured(line: CheckpointLine) -> str:
    return f"stall {ms(stall_ms(line))} {interval(line.stall)}".rstrip()


def damaged(context: Context) -> list[Finding]:
    """A save or load failed, or gave back something else than was saved."""
    view = context.report.checkpoint
    bad = [c for c in view.lines if _failed(c) or _wrong(c)] if view else []
    return [
        context.finding(
            "checkpoint-damaged",
            f"The {c.op} '{c.mode}' {'failed' if _failed(c) else 'gave back other values than were saved'}",
            [c.note or "no reason was recorded"],
            "Do not rely on this way of saving until a restored state compares "
            + ("within its bound." if c.lossy else "equal bit by bit."),
            severity="high" if _wrong(c) else "medium",
            source="measured",
        )
        for c in bad
    ]


def _wrong(line: CheckpointLine) -> bool:
    """Values came back that the save had not promised."""
    return line.identical is False or line.within_bound is False


def _failed(line: CheckpointLine) -> bool:
    """A way of saving that was left out, for want of memory or time, has not failed."""
    return not line.ok and not line.note.startswith("not run")

"""Checkpoint saves and loads over all ranks, and what a save costs a step at the run's interval."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from costlab.app.analysis.frames import largest, real, total, truth, whole
from costlab.app.analysis.views import CheckpointLine, CheckpointView, CodecLine, Figure, ResumeLine, StageLine

if TYPE_CHECKING:
    import pandas as pd

STALL_HOW = "time of the steps around the save less that of as many control steps, slowest rank"


def checkpoint_view(
    rows: pd.DataFrame,
    every_steps: int,
    codec: str = "dcp",
    stages: pd.DataFrame | None = None,
    codecs: pd.DataFrame | None = None,
    resumed: pd.DataFrame | None = None,
) -> CheckpointView | None:
    """One line per way of saving or loading; None where no checkpoint was taken.

    `codec` is the run's `checkpoint_codec`: the way of saving whose stall is spread over the steps.
    """
    if rows.empty:
        return None
    groups = rows.groupby(["op", "mode"], sort=False)
    lines = [_line(str(mode), str(op), group) for (op, mode), group in groups]
    lines.sort(key=lambda c: (c.op != "save", c.mode != "sync"))
    mode = chosen_mode(codec)
    chosen = next((c for c in lines if c.op == "save" and c.mode == mode and c.ok), None)
    stall = stall_ms(chosen) if chosen else None
    best = best_save(lines)
    words = "synchronous save" if mode == "sync" else f"save with {mode}"
    return CheckpointView(
        lines=lines,
        every_steps=every_steps,
        per_step_ms=max(stall, 0.0) / every_steps if stall is not None and every_steps else None,
        best_mode=best.mode if best else "",
        note="" if chosen else f"no {words} was measured: its cost per step is unknown",
        chosen=mode,
        stall=chosen.stall if chosen else None,
        bytes=chosen.bytes if chosen else None,
        stages=_stages(stages),
        codecs=_codecs(codecs),
        resumed=_resumed(resumed),
    )


def chosen_mode(codec: str) -> str:
    """The mode of a run's `checkpoint_codec`."""
    return "sync" if codec == "dcp" else f"costlab:{codec}"


def _stages(rows: pd.DataFrame | None) -> list[StageLine]:
    """Of each stage the slowest rank's, in order of its start; stages measured apart come first."""
    if rows is None or rows.empty:
        return []
    found = []
    for (mode, stage), group in rows.groupby(["mode", "stage"], sort=False):
        worst = max(group.to_dict("records"), key=lambda r: r["busy_ms"])
        size, busy, ceiling = real(worst["bytes"]), float(worst["busy_ms"]), real(worst["ceiling_gbps"])
        gbps = size / (busy * 1e6) if size and busy > 0 else None
        found.append(
            StageLine(
                mode=str(mode), stage=str(stage), start_ms=real(worst["start_ms"]), end_ms=real(worst["end_ms"]),
                busy_ms=busy, bytes=whole(size), gbps=gbps, ceiling_gbps=ceiling,
                of_ceiling=gbps / ceiling if gbps and ceiling else None, ceiling=str(worst["ceiling"] or ""),
            )
        )  # fmt: skip
    modes = list(dict.fromkeys(s.mode for s in found))
    return sorted(found, key=lambda s: (modes.index(s.mode), s.start_ms is not None, s.start_ms or 0.0))


def _codecs(rows: pd.DataFrame | None) -> list[CodecLine]:
    if rows is None or rows.empty:
        return []
    first = rows[rows["rank"] == rows["rank"].min()]
    return [
        CodecLine(
            mode=str(r["mode"]), codec=str(r["codec"]), tensor_class=str(r["tensor_class"]), values=int(r["values"]),
            bits=float(r["bits"]), ratio=float(r["ratio"]), rel_l2=float(r["rel_l2"]), max_abs=float(r["max_abs"]),
            flushed=int(r["flushed"]), update_error=real(r["update_error"]), encode_gbps=real(r["encode_gbps"]),
            decode_gbps=real(r["decode_gbps"]),
        )
        for r in first.to_dict("records")
    ]  # fmt: skip


def _resumed(rows: pd.DataFrame | None) -> list[ResumeLine]:
    if rows is None or rows.empty:
        return []
    found = rows.groupby(["mode", "after"], sort=False)[["loss", "exact_loss"]].mean()
    return [
        ResumeLine(mode=str(mode), after=int(after), loss=float(loss), exact_loss=float(exact))
        for (mode, after), loss, exact in zip(found.index, found.loss, found.exact_loss, strict=True)
    ]


def _line(mode: str, op: str, rows: pd.DataFrame) -> CheckpointLine:
    size, took = total(rows.bytes), largest(rows.total_ms)
    return CheckpointLine(
        mode=mode,
        op=op,
        ok=bool(rows.ok.all()),
        bytes=whole(size),
        blocked_ms=largest(rows.blocked_ms),
        total_ms=took,
        stall=_stall(rows.to_dict("records")),
        gbps=size / (took * 1e6) if size and took else None,
        identical=_of_all(rows.identical),
        note=_note(rows.to_dict("records")),
        lossy=bool(rows.lossy.any()),
        within_bound=_of_all(rows.within_bound),
        state_bytes=whole(total(rows.state_bytes)),
        bits=largest(rows.bits),
        update_error=largest(rows.update_error),
    )


def _of_all(values: Iterable[Any]) -> bool | None:
    """Whether all ranks say yes; None where one does not know."""
    known = [truth(v) for v in values]
    return None if None in known else all(known)


def _stall(rows: list[dict[Any, Any]]) -> Figure | None:
    measured = [r for r in rows if real(r["stall_ms"]) is not None]
    if not measured:
        return None
    worst = max(measured, key=lambda r: r["stall_ms"])
    low, high = real(worst["stall_low_ms"]), real(worst["stall_high_ms"])
    return Figure(value=real(worst["stall_ms"]), unit="ms", source="measured", how=STALL_HOW, low=low, high=high)


def _note(rows: list[dict[Any, Any]]) -> str:
    """The slowest rank's note; those of ranks that failed come first."""
    failed = [r["note"] for r in rows if r["note"] and not truth(r["ok"])]
    if failed:
        return "; ".join(dict.fromkeys(failed))
    slowest = max(rows, key=lambda r: real(r["stall_ms"]) or real(r["total_ms"]) or 0.0)
    return str(slowest["note"] or "")


def stall_ms(line: CheckpointLine) -> float | None:
    """The stall of a save in ms, None where it was not measured."""
    return line.stall.value if line.stall else None


def best_save(lines: list[CheckpointLine]) -> CheckpointLine | None:
    """The successful exact save whose stall has the lowest upper bound and whose state was not restored wrongly.

    A lossy save is never it: that is a choice of the user's.
    """
    bad = {c.mode for c in lines if c.op == "load" and (not c.ok or c.identical is False)}
    usable = [c for c in lines if c.op == "save" and c.ok and not c.lossy and c.mode not in bad]
    saves = [c for c in usable if stall_ms(c) is not None]
    return min(saves, key=_bound, default=None)


def _bound(line: CheckpointLine) -> float:
    """Upper end of the stall's interval, so that noise below zero wins nothing."""
    assert line.stall is not None
    high = line.stall.high
    return max((line.stall.value or 0.0) if high is None else high, 0.0)

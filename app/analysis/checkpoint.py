"""Checkpoint saves and loads over all ranks, and what a save costs a step at the run's interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costlab.app.analysis.frames import largest, real, total, truth, whole
from costlab.app.analysis.views import CheckpointLine, CheckpointView, Figure

if TYPE_CHECKING:
    import pandas as pd

STALL_HOW = "time of the steps around the save less that of as many control steps, slowest rank"


def checkpoint_view(rows: pd.DataFrame, every_steps: int) -> CheckpointView | None:
    """One line per way of saving or loading; None where no checkpoint was taken."""
    if rows.empty:
        return None
    groups = rows.groupby(["op", "mode"], sort=False)
    lines = [_line(str(mode), str(op), group) for (op, mode), group in groups]
    lines.sort(key=lambda c: (c.op != "save", c.mode != "sync"))
    plain = next((c for c in lines if c.op == "save" and c.mode == "sync" and c.ok), None)
    stall = stall_ms(plain) if plain else None
    best = best_save(lines)
    return CheckpointView(
        lines=lines,
        every_steps=every_steps,
        per_step_ms=max(stall, 0.0) / every_steps if stall is not None and every_steps else None,
        best_mode=best.mode if best else "",
        note="" if plain else "no synchronous save was measured: its cost per step is unknown",
    )


def _line(mode: str, op: str, rows: pd.DataFrame) -> CheckpointLine:
    size, took = total(rows.bytes), largest(rows.total_ms)
    same = [truth(v) for v in rows.identical]
    return CheckpointLine(
        mode=mode,
        op=op,
        ok=bool(rows.ok.all()),
        bytes=whole(size),
        blocked_ms=largest(rows.blocked_ms),
        total_ms=took,
        stall=_stall(rows.to_dict("records")),
        gbps=size / (took * 1e6) if size and took else None,
        identical=None if None in same else all(same),
        note=_note(rows.to_dict("records")),
    )


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
    """The successful save whose stall has the lowest upper bound and whose state was not restored wrongly."""
    bad = {c.mode for c in lines if c.op == "load" and (not c.ok or c.identical is False)}
    saves = [c for c in lines if c.op == "save" and c.ok and c.mode not in bad and stall_ms(c) is not None]
    return min(saves, key=_bound, default=None)


def _bound(line: CheckpointLine) -> float:
    """Upper end of the stall's interval, so that noise below zero wins nothing."""
    assert line.stall is not None
    high = line.stall.high
    return max((line.stall.value or 0.0) if high is None else high, 0.0)

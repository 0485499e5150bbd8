"""Rows and columns of the Checkpoint pane: ways of saving, the engine's timeline, codec errors, resumed losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costlab.app import figures as fmt
from costlab.app.analysis.views import CheckpointLine, CheckpointView, CodecLine, ResumeLine, StageLine
from costlab.app.tui.cells import EMPTY, Line, Span, line, stacked
from costlab.app.tui.widgets.table import Column, col

BLOCKED = "█"
BACKGROUND = "░"
STAGE = "▆"


@dataclass(frozen=True)
class Way:
    """One way of saving with the load of what it saved; one of them may be missing."""

    mode: str
    save: CheckpointLine | None = None
    load: CheckpointLine | None = None

    @property
    def main(self) -> CheckpointLine:
        """The save where there is one."""
        found = self.save or self.load
        assert found is not None
        return found


def ways(view: CheckpointView) -> list[Way]:
    """Saves and loads by mode, in the view's order."""
    modes = dict.fromkeys(c.mode for c in view.lines)
    by = {(c.mode, c.op): c for c in view.lines}
    return [Way(mode, by.get((mode, "save")), by.get((mode, "load"))) for mode in modes]


def _state(row: Way) -> Line:
    if row.save is not None and not row.save.ok and row.save.note.startswith("not run"):
        return line(("-", "faint"))
    return line(("✓", "good")) if all(c.ok for c in (row.save, row.load) if c) else line(("✗", "bad"))


def _stall(row: Way, width: int) -> Line:
    if row.main.stall is None:
        return line((fmt.MISSING, "faint"))
    stall = row.main.stall
    return line((fmt.resolved(stall), "strong"), (f" {fmt.interval(stall)}" if width > 20 else "", "muted"))


def restored(load: CheckpointLine | None) -> Line:
    """What came back, by shape, word and tone."""
    if load is not None and load.identical is not None:
        return line(("● bit-equal", "good")) if load.identical else line(("○ differs", "bad"))
    if load is not None and load.within_bound is not None:
        return line(("◐ in bound", "good")) if load.within_bound else line(("○ beyond", "bad"))
    return line((fmt.MISSING, "faint"))


def _optional(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def _ms(value: float | None) -> Line:
    return _optional(fmt.ms(value))


def way_columns(longest_ms: float, chosen: str) -> list[Column[Way]]:
    """The first table's columns; the bar is drawn against the slowest save."""

    def bar(row: Way, width: int) -> Line:
        total = row.main.total_ms
        if total is None:
            return EMPTY
        blocked = min(row.main.blocked_ms or 0.0, total)
        parts: list[tuple[float, str, str]] = [
            (blocked / longest_ms, BLOCKED, "accent"), ((total - blocked) / longest_ms, BACKGROUND, "muted"),
        ]  # fmt: skip
        return stacked(parts, width)  # type: ignore[arg-type]

    return [
        col("ok", "", _state, 1),
        col("mode", "save", lambda r: line((r.mode, "accent" if r.mode == chosen else "strong")), 21, max_width=30),
        Column("stall", "stall", _stall, 8, "right", flex=1, max_width=34),
        col("total", "durable", lambda r: _ms(r.save.total_ms if r.save else None), 8, "right"),
        Column("line", "█ blocked ░ behind", bar, 18, flex=3, priority=3, max_width=50, drawn=True),
        col("bytes", "bytes", lambda r: _optional(fmt.size(r.main.bytes)), 8, "right", priority=1),
        col("bits", "bits", lambda r: _optional(fmt.number(r.main.bits)), 5, "right", priority=2),
        col("blocked", "blocked", lambda r: _ms(r.save.blocked_ms if r.save else None), 8, "right", priority=2),
        col("load", "load", lambda r: _ms(r.load.total_ms if r.load else None), 8, "right"),
        col("identical", "restored", lambda r: restored(r.load), 11),
    ]


def stage_columns(longest_ms: float) -> list[Column[StageLine]]:
    """The timeline's columns, all modes on one scale."""

    def bar(row: StageLine, width: int) -> Line:
        if row.start_ms is None or row.end_ms is None or longest_ms <= 0:
            return line(("measured apart", "faint"))
        start = min(round(row.start_ms / longest_ms * width), max(width - 1, 0))
        end = max(round(row.end_ms / longest_ms * width), start + 1)
        spans: list[Span] = [(" " * start, ""), (STAGE * (end - start), "accent" if row.stage == "launch" else "muted")]
        return tuple(s for s in spans if s[0])

    def ceiling(row: StageLine) -> Line:
        return _optional(f"{fmt.share(row.of_ceiling)} of {fmt.number(row.ceiling_gbps)}" if row.of_ceiling else "–")

    return [
        col("mode", "engine", lambda r: line((r.mode.partition(":")[2], "strong")), 13),
        col("stage", "stage", lambda r: line(r.stage), 8),
        col("busy", "busy", lambda r: _ms(r.busy_ms), 8, "right"),
        Column("bar", "from the call on", bar, 14, flex=3, max_width=60, drawn=True),
        col("gbps", "GB/s", lambda r: _optional(fmt.number(r.gbps)), 6, "right"),
        col("ceiling", "of its ceiling", ceiling, 14, "right", priority=1),
    ]


def codec_columns() -> list[Column[CodecLine]]:
    """What coding does, by class of tensors."""
    return [
        col("class", "error of", lambda r: line(r.tensor_class), 13),
        col("codec", "codec", lambda r: line((r.codec, "strong")), 10),
        col("bits", "bits", lambda r: _optional(fmt.number(r.bits)), 5, "right"),
        col("l2", "rel. L2", lambda r: _optional(fmt.share(r.rel_l2)), 7, "right"),
        col("max", "max abs", lambda r: _optional(fmt.number(r.max_abs)), 8, "right", priority=2),
        col("flushed", "to zero", lambda r: _optional(fmt.count(r.flushed)), 7, "right", priority=1),
        col("update", "1st update", lambda r: _optional(fmt.share(r.update_error)), 10, "right"),
        col("speed", "code / decode GB/s", _speed, 18, "right", priority=3),
    ]


def _speed(row: CodecLine) -> Line:
    return _optional(f"{fmt.number(row.encode_gbps)} / {fmt.number(row.decode_gbps)}")


@dataclass(frozen=True)
class Resumed:
    """The losses after one restore, by updates since it."""

    mode: str
    losses: dict[int, ResumeLine]


def resumed(view: CheckpointView) -> list[Resumed]:
    """One row per mode."""
    modes = dict.fromkeys(r.mode for r in view.resumed)
    return [Resumed(m, {r.after: r for r in view.resumed if r.mode == m}) for m in modes]


def resume_columns(rows: Sequence[Resumed]) -> list[Column[Resumed]]:
    """Loss less that of the exact training at the same step."""

    def difference(after: int) -> Column[Resumed]:
        def cell(row: Resumed) -> Line:
            found = row.losses.get(after)
            return _optional(fmt.MISSING) if found is None else line(loss_difference(found))

        return col(f"after{after}", f"loss at +{after}", cell, 12, "right")

    afters = sorted({a for r in rows for a in r.losses})
    return [col("mode", "resumed from", lambda r: line((r.mode, "strong")), 21), *map(difference, afters)]


def loss_difference(row: ResumeLine) -> str:
    """ "+0.0012": how far the resumed loss is from the exact training's; "same" where it is the same number."""
    off = row.loss - row.exact_loss
    return "same" if off == 0 else f"{off:+.2g}"

"""One line of text for each event of the stream."""

from __future__ import annotations

from typing import Literal

from costlab.app.tui.cells import Line, Tone, line
from costlab.probes.records import AnyEvent, Failure, Finished, Heartbeat, Hello, Log, PhaseEvent, Progress, StepEvent

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
TONES: dict[Level, Tone] = {"info": "", "warning": "warn", "error": "bad"}
MARKS: dict[Level, str] = {"info": " ", "warning": "!", "error": "✗"}


def level_of(event: AnyEvent) -> Level:
    """How bad an event is."""
    if isinstance(event, Failure):
        return "error"
    return event.level if isinstance(event, Log) else "info"


def text_of_event(event: AnyEvent) -> str:
    """The event in words."""
    match event:
        case Log():
            return event.text
        case PhaseEvent():
            return f"phase {event.phase}" + (f": {event.detail}" if event.detail else "")
        case Failure():
            return f"failed in {event.phase or 'an unknown phase'}: {event.message}"
        case Hello():
            return "started"
        case Finished():
            return f"finished: {event.status}"
        case StepEvent():
            loss = "" if event.loss is None else f", loss {event.loss:.4g}"
            return f"{event.role or 'step'} {event.step}: {event.ms:.1f} ms{loss}"
        case Progress():
            return f"{event.phase} {event.done}/{event.total} {event.detail}".rstrip()
        case Heartbeat():
            return f"alive in {event.phase}"


def rank_text(rank: int) -> str:
    """ "rank 3", or "launcher" for -1."""
    return "launcher" if rank < 0 else f"rank {rank}"


def event_line(event: AnyEvent, began: float) -> Line:
    """Seconds since the run began, rank, mark, text."""
    level = level_of(event)
    who = "  –" if event.rank < 0 else f"{event.rank:>3}"
    tone = TONES[level]
    return line(
        (f"{event.t - began:7.1f} s", "muted"),
        (f"{who} ", "muted"),
        (MARKS[level], tone),
        " ",
        (text_of_event(event), tone),
    )

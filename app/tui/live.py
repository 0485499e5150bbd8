"""State of a run being recorded, reduced from its event stream. Plain values, no Textual."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, get_args

from costlab.probes.records import (
    AnyEvent,
    Failure,
    Finished,
    Hello,
    Log,
    Manifest,
    Phase,
    PhaseEvent,
    Progress,
    StepEvent,
)
from costlab.probes.spec import RunSpec

PHASES: tuple[str, ...] = tuple(p for p in get_args(Phase) if p != "done")
KEPT_STEPS = 600
KEPT_EVENTS = 20_000

State = Literal["starting", "running", "cancelling", "complete", "failed", "cancelled"]


class Launching(Protocol):
    """What the TUI needs of a launcher; tests pass their own."""

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """Run to the end; blocks."""

    def cancel(self) -> None:
        """Ask the run to stop; safe from any thread."""


LauncherFactory = Callable[[RunSpec, Path], Launching]


@dataclass
class PhaseTimes:
    """When a phase began and, once over, ended (unix seconds)."""

    begin: float
    end: float | None = None
    detail: str = ""


@dataclass
class LiveRun:
    """What is known so far of one recording."""

    spec: RunSpec
    run_dir: Path
    began: float
    state: State = "starting"
    phase: str = ""
    phases: dict[str, PhaseTimes] = field(default_factory=dict)
    progress: Progress | None = None
    ranks: dict[int, str] = field(default_factory=dict)
    steps_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    step_role: str = ""
    loss: float | None = None
    events: deque[AnyEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    failure: Failure | None = None
    ended: float | None = None
    message: str = ""

    def __post_init__(self) -> None:
        """Starting the processes is the first phase, before any of them can say so."""
        self.phase = self.phase or PHASES[0]
        self.phases.setdefault(self.phase, PhaseTimes(self.began))

    @property
    def active(self) -> bool:
        """Whether processes may still run."""
        return self.state in ("starting", "running", "cancelling")

    @property
    def done_phases(self) -> int:
        """Phases that are over."""
        return sum(1 for times in self.phases.values() if times.end is not None)

    @property
    def typical_ms(self) -> float | None:
        """Median of the last live steps; not the stored measurement."""
        return median(self.steps_ms) if self.steps_ms else None

    def feed(self, event: AnyEvent) -> None:
        """Take one event in."""
        if self.state == "starting":
            self.state = "running"
        match event:
            case Hello():
                self.ranks[event.rank] = "start"
            case PhaseEvent():
                self._enter(event)
            case Progress():
                self._advance(event)
            case StepEvent():
                self._step(event)
            case Failure():
                self.failure = self.failure or event
            case Finished() if event.rank >= 0:
                self.ranks[event.rank] = event.status
            case _:
                pass
        if isinstance(event, Log | PhaseEvent | Failure | Hello | Finished):
            self.events.append(event)

    def _enter(self, event: PhaseEvent) -> None:
        self.ranks[event.rank] = event.phase
        if not self._is_later(event.phase):
            return
        for times in self.phases.values():
            times.end = times.end if times.end is not None else event.t
        self.phases.setdefault(event.phase, PhaseTimes(event.t, detail=event.detail))
        self.phase = event.phase
        self.progress = None

    def _is_later(self, phase: str) -> bool:
        """Ranks enter a phase one after another; the first to enter moves the display on."""
        if not self.phase or phase not in PHASES or self.phase not in PHASES:
            return phase != self.phase and phase not in self.phases
        return PHASES.index(phase) > PHASES.index(self.phase)

    def _advance(self, event: Progress) -> None:
        if event.phase != self.phase:
            return
        if self.progress is None or event.done >= self.progress.done:
            self.progress = event

    def _step(self, event: StepEvent) -> None:
        if event.rank > 0:
            return
        if event.role != self.step_role:
            self.steps_ms.clear()
            self.step_role = event.role
        self.steps_ms.append(event.ms)
        self.loss = event.loss if event.loss is not None else self.loss

    def finish(self, state: State, at: float, message: str = "") -> None:
        """The launcher returned or raised."""
        self.state = state
        self.ended = at
        self.message = message
        for times in self.phases.values():
            times.end = times.end if times.end is not None else at


class EventQueue:
    """Hands events from the launcher's thread to the user interface, many at a time.

    A flood of steps becomes one message: `put` says whether the receiver has to be woken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[AnyEvent] = []

    def put(self, event: AnyEvent) -> bool:
        """Add an event; True if none was waiting."""
        with self._lock:
            self._items.append(event)
            return len(self._items) == 1

    def take(self) -> list[AnyEvent]:
        """All waiting events, oldest first."""
        with self._lock:
            items, self._items = self._items, []
            return items

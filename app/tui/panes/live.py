"""The run being recorded: phases, progress, live step times, last log lines. It owns the launcher's thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.timer import Timer
from textual.worker import Worker, WorkerState

from costlab.app import figures as fmt
from costlab.app.tui.cells import EMPTY, Line, Tone, bar, line
from costlab.app.tui.eventlines import event_line
from costlab.app.tui.live import PHASES, EventQueue, Launching, LiveRun, State
from costlab.app.tui.messages import EventsWaiting, RunEnded, unexpected
from costlab.app.tui.panes.base import Pane
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.spark import spark
from costlab.probes.launch import LaunchError
from costlab.probes.records import AnyEvent
from costlab.probes.spec import RunSpec, SpecError

REFRESH_S = 0.5  # a low rate: over SSH and nested tmux every redraw costs

STATES: dict[State, tuple[str, Tone]] = {
    "starting": ("◍ starting", "accent"),
    "running": ("◍ recording", "accent"),
    "cancelling": ("◌ cancelling", "warn"),
    "complete": ("● complete", "good"),
    "failed": ("✗ failed", "bad"),
    "cancelled": ("◌ cancelled", "warn"),
}


class LivePane(Pane):
    """Follows one recording; it stays mounted, so the run goes on whatever pane is shown."""

    TITLE: ClassVar[str] = "Live"
    HELP: ClassVar[str | None] = """\
A run being recorded on this machine, in its own processes: leaving this pane does not stop it.

Step times here are live figures to watch; the stored measurement is made of the timed steps only.
Cancelling asks first; a cancelled run is kept and marked so.
"""
    DEFAULT_CSS = """
    LivePane #live-columns { height: 1fr; }
    LivePane #live-title { margin-bottom: 1; }
    LivePane #live-phases { width: 27; margin-right: 2; height: auto; }
    LivePane #live-right { width: 1fr; height: 1fr; }
    LivePane #live-progress { margin-bottom: 1; }
    LivePane #live-log { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c,escape", "cancel", "Cancel run", id="live.cancel"),
        Binding("enter", "open", "Open the run", id="live.open"),
    ]

    class CancelAsked(Message):
        """The person wants to cancel."""

    class OpenAsked(Message):
        """The person wants to see the finished run."""

        def __init__(self, path: Path) -> None:
            self.path = path
            super().__init__()

    can_focus = True

    def __init__(self, session: Session, *, id: str = "live") -> None:
        super().__init__(session, id=id)
        self.queue = EventQueue()
        self.launcher: Launching | None = None
        self._timer: Timer | None = None

    def body(self) -> ComposeResult:
        """Phases at the left, progress and log at the right."""
        yield Lines(id="live-title")
        with Horizontal(id="live-columns"):
            yield Lines(id="live-phases")
            with Vertical(id="live-right"):
                yield Lines(id="live-progress")
                yield Lines(id="live-log")

    def on_mount(self) -> None:
        """Redraw at a fixed low rate while a run is active."""
        self._timer = self.set_interval(REFRESH_S, self.redraw, pause=True)

    def start(self, launcher: Launching, spec: RunSpec, run_dir: Path) -> None:
        """Begin recording in a thread."""
        self.launcher = launcher
        self.session.live = LiveRun(spec=spec, run_dir=run_dir, began=self.session.clock())
        self._record(launcher, run_dir)
        if self._timer is not None:
            self._timer.resume()
        self.redraw()

    def cancel(self) -> None:
        """Ask the launcher to stop."""
        live = self.session.live
        if self.launcher is not None and live is not None and live.active:
            live.state = "cancelling"
            self.launcher.cancel()
            self.redraw()

    def on_unmount(self) -> None:
        """However the app ends, the run does not outlive it."""
        if self.launcher is not None:
            self.launcher.cancel()

    @work(thread=True, exclusive=True, exit_on_error=False, group="record", description="record a run")
    def _record(self, launcher: Launching, run_dir: Path) -> None:
        try:
            manifest = launcher.run(self._put)
        except (LaunchError, SpecError) as error:
            self.post_message(RunEnded("failed", run_dir, sentence=str(error)))
            return
        states: dict[str, State] = {"complete": "complete", "cancelled": "cancelled"}
        self.post_message(RunEnded(states.get(manifest.status, "failed"), run_dir, manifest.failure))

    def _put(self, event: AnyEvent) -> None:
        """Called in the launcher's thread."""
        if self.queue.put(event):
            self.post_message(EventsWaiting())

    def on_events_waiting(self, message: EventsWaiting) -> None:
        """Take in what has come; the timer draws it."""
        message.stop()
        self._drain()

    def _drain(self) -> None:
        if self.session.live is not None:
            for event in self.queue.take():
                self.session.live.feed(event)

    def on_run_ended(self, message: RunEnded) -> None:
        """Settle the state; the message goes on to the app."""
        self._drain()
        if self.session.live is not None:
            sentence = message.failure.message if message.failure else message.sentence
            self.session.live.finish(message.state, self.session.clock(), sentence)
        self._settle()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A defect in the launcher ends the run as failed, and is told like any worker's."""
        error = event.worker.error
        if event.state is WorkerState.ERROR and error is not None:
            if self.session.live is not None:
                self.session.live.finish("failed", self.session.clock(), str(error))
            self.post_message(unexpected(event.worker.description, error))
            self._settle()

    def _settle(self) -> None:
        self.launcher = None
        if self._timer is not None:
            self._timer.pause()
        self.redraw()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Cancel while it runs, open afterwards."""
        recording = self.session.recording
        if action == "cancel":
            return recording
        if action == "open":
            return self.session.live is not None and not recording
        return True

    def action_cancel(self) -> None:
        """Ask the app to ask the person."""
        self.post_message(self.CancelAsked())

    def action_open(self) -> None:
        """Open the run that ended."""
        if self.session.live is not None:
            self.post_message(self.OpenAsked(self.session.live.run_dir))

    def take_focus(self) -> None:
        """The pane itself takes the keys."""
        self.focus()

    def redraw(self) -> None:
        """Draw the state as it is now."""
        live = self.session.live
        self.set_class(live is None, "-empty")
        if live is None or not self.is_mounted:
            return
        now = self.session.clock()
        width = max(self.size.width - 33, 20)
        self.query_one("#live-title", Lines).show(title_lines(live, now))
        self.query_one("#live-phases", Lines).show(phase_lines(live, now))
        self.query_one("#live-progress", Lines).show(progress_lines(live, width))
        room = max(self.query_one("#live-log").size.height - 1, 3)
        self.query_one("#live-log", Lines).show(log_lines(live, room))

    def on_resize(self) -> None:
        """Bars follow the width."""
        self.redraw()


def clock_text(seconds: float) -> str:
    """Elapsed or remaining time: 0:21, 12:04, 1:02:33."""
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def spec_text(spec: RunSpec) -> str:
    """What is being run, short."""
    compiled = "eager" if spec.compile == "none" else f"compiled ({spec.compile})"
    ranks = f"{spec.ranks} ranks" if spec.ranks else "all local GPUs, or 2 CPU ranks"
    return f"{spec.workload} {spec.size} · {compiled} {spec.parallel} · {spec.dtype} · {ranks}"


def title_lines(live: LiveRun, now: float) -> list[Line]:
    """State, subject and elapsed time; then where the run is kept, or what went wrong."""
    elapsed = clock_text((live.ended or now) - live.began)
    head = line(STATES[live.state], (f"  {elapsed}  ", "muted"), (spec_text(live.spec), "strong"))
    if live.message:
        return [head, line((live.message, "bad"))]
    kept = {"cancelling": "waiting for the ranks to end; the run is kept", "cancelled": "kept, marked cancelled"}
    return [head, line((kept.get(live.state, str(live.run_dir)), "muted"))]


def phase_lines(live: LiveRun, now: float) -> list[Line]:
    """Every phase with its state: done with its duration, the current one, those to come."""
    return [_phase(live, name, now) for name in PHASES]


def _phase(live: LiveRun, name: str, now: float) -> Line:
    times = live.phases.get(name)
    if times is None:
        return line((f"· {name}", "faint"))
    seconds = (times.end if times.end is not None else now) - times.begin
    if times.end is not None:
        return line(("✓ ", "good"), f"{name:<12}", (f"{fmt.seconds(seconds):>9}", "muted"))
    return line(("▸ ", "accent"), (f"{name:<12}", "strong"), (f"{clock_text(seconds):>9}", "accent"))


def progress_lines(live: LiveRun, width: int) -> list[Line]:
    """The phase's progress bar and the live step times."""
    return [_progress(live, width), *_steps(live, width)]


def _progress(live: LiveRun, width: int) -> Line:
    step = live.progress
    if step is None or step.total <= 0:
        detail = live.phases[live.phase].detail if live.phase in live.phases else ""
        return line((live.phase or "starting processes", "strong"), (f"  {detail}" if detail else "", "muted"))
    eta = f"  ETA {clock_text(step.eta_s)}" if step.eta_s is not None and live.active else ""
    tail = f"  {step.done}/{step.total}{eta}"
    room = max(width - len(live.phase) - len(tail) - 2, 8)
    drawn = bar(step.done / step.total, room)
    pad = " " * (room - sum(len(t) for t, _ in drawn))
    return (*line((live.phase, "strong"), "  "), *drawn, *line((pad, ""), (tail, "muted")))


def _steps(live: LiveRun, width: int) -> Sequence[Line]:
    if not live.steps_ms:
        return (EMPTY, EMPTY)
    typical = f"{fmt.ms(live.steps_ms[-1])} last · {fmt.ms(live.typical_ms)} median"
    loss = f" · loss {fmt.number(live.loss, 4)}" if live.loss is not None else ""
    recent = list(live.steps_ms)[-width:]
    return (
        line((f"{live.step_role or 'live'} steps  ", "muted"), (typical, ""), (loss, "muted")),
        line((spark(recent, width), "accent")),
    )


def log_lines(live: LiveRun, room: int) -> list[Line]:
    """The last events."""
    return [line(("log", "muted")), *[event_line(e, live.began) for e in list(live.events)[-room:]]]

"""Helpers that drive the app: a clock that stands still, launchers that need no torch, waiting until it is quiet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from textual.pilot import Pilot
from textual.widget import Widget

from costlab.app.tui.app import CostlabApp
from costlab.app.tui.cells import text_of
from costlab.app.tui.live import LauncherFactory
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Table
from costlab.probes.launch import LaunchError
from costlab.probes.records import (
    AnyEvent,
    FailureInfo,
    Hello,
    Log,
    Manifest,
    PhaseEvent,
    Progress,
    StepEvent,
)
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes
from tests.app.make_run import write_example_run

RUN_ID = "20261129-1402-llama-example-a1b2"
NOON = 1_796_040_000.0  # 2026-11-30 12:00 UTC, unix seconds
W = TypeVar("W", bound=Widget)


class StepLauncher:
    """Tells a run's events, then waits until it is cancelled or let go; writes the run directory as the real one."""

    def __init__(self, spec: RunSpec, run_dir: Path) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.cancelled = threading.Event()
        self.go_on = threading.Event()
        self.told = threading.Event()

    def cancel(self) -> None:
        """As the real launcher: thread-safe, returns at once."""
        self.cancelled.set()
        self.go_on.set()

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """Tell the events of a run in its measure phase; end as asked."""
        for event in self.events():
            on_event(event)
        self.told.set()
        self.go_on.wait(30)
        return self.end("cancelled" if self.cancelled.is_set() else "complete")

    def events(self) -> Sequence[AnyEvent]:
        """Two ranks up to step 14 of 20."""
        events: list[AnyEvent] = [Hello(t=NOON, rank=rank, pid=100 + rank) for rank in (0, 1)]
        for n, phase in enumerate(("start", "check-in", "build", "compile", "warm-up", "measure")):
            events += [PhaseEvent(t=NOON + 2 * n + 0.1 * rank, rank=rank, phase=phase) for rank in (0, 1)]
        events.append(Log(t=NOON + 11, rank=1, text="no [energy] counter", level="warning"))
        times = [50 + (7 * n) % 5 for n in range(14)]
        events += [StepEvent(t=NOON + 12, rank=0, step=n, ms=ms, role="timed", loss=6.5) for n, ms in enumerate(times)]
        return [*events, Progress(t=NOON + 12, rank=0, phase="measure", done=14, total=20, eta_s=21.0)]

    def end(self, status: str) -> Manifest:
        """Leave a run directory behind."""
        write_example_run(self.run_dir, run_id=self.run_dir.name, status=status)
        return Manifest(run_id=self.run_dir.name, created="", status=status)  # type: ignore[arg-type]


class FailingLauncher(StepLauncher):
    """A rank runs out of memory."""

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        for event in self.events():
            on_event(event)
        failure = FailureInfo(
            kind="out-of-memory",
            rank=1,
            phase="measure",
            message="rank 1 ran out of device memory while measuring [2.00 GB wanted]",
            advice="lower --batch or --seq",
            log_tail=["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory"],
        )
        write_bytes(self.run_dir / "manifest.json", b'{"run_id": "x", "created": "", "status": "failed"}')
        return Manifest(run_id=self.run_dir.name, created="", status="failed", failure=failure)


class RefusingLauncher(StepLauncher):
    """Cannot start anything."""

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        del on_event
        raise LaunchError("cannot start torchrun: no such file; run `costlab doctor`")


class BrokenLauncher(StepLauncher):
    """Has a defect."""

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        del on_event
        raise ZeroDivisionError("a defect")


def make_app(*paths: Path, launcher: LauncherFactory = StepLauncher, **options: Any) -> CostlabApp:
    """The app with a clock that stands still."""
    return CostlabApp(list(paths), launcher_factory=launcher, clock=lambda: NOON + 13, **options)


async def settle(pilot: Pilot[Any], condition: Callable[[], object] = lambda: True, seconds: float = 10.0) -> None:
    """Wait until workers other than a recording are done and `condition` holds."""
    app = pilot.app
    for _ in range(int(seconds / 0.02)):
        await pilot.pause()
        busy = [w for w in app.workers if w.is_running and w.group != "record"]
        if not busy and condition():
            await pilot.pause()
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not quiet after {seconds} s: {[w.description for w in app.workers]}")


async def opened(pilot: Pilot[Any]) -> CostlabApp:
    """Wait until a run is open."""
    app = pilot.app
    assert isinstance(app, CostlabApp)
    await settle(pilot, lambda: app.session.report is not None and not app.busy)
    return app


def find(app: CostlabApp, selector: str, kind: type[W]) -> W:
    """A widget of the shown pane."""
    return app.pane.query_one(selector, kind)


def shown(app: CostlabApp) -> str:
    """Everything on the terminal, one string."""
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())


def column(table: Table[Any], key: str, width: int = 200) -> list[str]:
    """The texts of one column."""
    drawn = next(c for c in table._columns if c.key == key)
    return [text_of(drawn.draw(row, width)).strip() for row in table.rows]


def dialog_text(app: CostlabApp) -> str:
    """The text of the open dialog."""
    return "\n".join(widget.plain for widget in app.screen.query(Lines))

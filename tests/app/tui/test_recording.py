"""Recording a run from the interface: dialog, live pane, cancel, failures, leaving."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input

from costlab.app.tui.app import CostlabApp
from costlab.app.tui.dialogs.confirm import Confirm
from costlab.app.tui.dialogs.failure import Failed
from costlab.app.tui.dialogs.new_run import NewRun
from costlab.app.tui.panes.live import LivePane
from costlab.app.tui.widgets.choice import Choice
from costlab.app.tui.widgets.chrome import PaneBar
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Table
from costlab.probes.launch import Launcher
from costlab.probes.spec import RunSpec
from tests.app.tui.driving import (
    BrokenLauncher,
    FailingLauncher,
    RefusingLauncher,
    StepLauncher,
    column,
    dialog_text,
    find,
    make_app,
    opened,
    settle,
    shown,
)


class Launches:
    """A launcher factory that remembers what it made."""

    def __init__(self, kind: type[StepLauncher] = StepLauncher) -> None:
        self.kind = kind
        self.made: list[StepLauncher] = []

    def __call__(self, spec: RunSpec, run_dir: Path) -> StepLauncher:
        self.made.append(self.kind(spec, run_dir))
        return self.made[-1]


def state(app: CostlabApp) -> str:
    live = app.session.live
    return live.state if live else ""


async def test_the_dialog_says_what_is_wrong_while_typing() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n")
        await settle(pilot)
        dialog = app.screen
        assert isinstance(dialog, NewRun)
        said = dialog.query_one("#form-state", Lines)
        assert "costlab run --preset smoke" in said.plain
        dialog.query_one("#size", Input).value = "gigantic"
        await settle(pilot)
        assert "llama has no size 'gigantic'" in said.plain
        await pilot.press("enter")
        assert app.screen is dialog, "a wrong form is not accepted"
        dialog.query_one("#preset").focus()
        await pilot.press("g")
        await settle(pilot)
        assert dialog.query_one("#preset", Choice).value == "gpt2"
        assert dialog.query_one("#workload", Input).value == "gpt2"
        assert "costlab run --preset gpt2" in said.plain
        await pilot.press("down", "up", "left", "escape")
        assert len(app.screen_stack) == 1


async def test_a_recording_is_followed_survives_pane_switches_and_is_opened_at_its_end(example: Path) -> None:
    launches = Launches()
    app = make_app(example, launcher=launches)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await pilot.press("n")
        await settle(pilot)
        app.screen.query_one("#ranks", Input).value = "2"
        await pilot.press("enter")
        await settle(pilot, lambda: launches.made and launches.made[0].told.is_set())
        await settle(pilot, lambda: app.session.live is not None and app.session.live.progress is not None)
        assert isinstance(app.pane, LivePane)
        assert launches.made[0].spec.ranks == 2
        app.live_pane.redraw()
        await pilot.pause()
        text = shown(app)
        assert "14/20" in text
        assert "ETA 0:21" in text
        assert "✓ compile" in text
        assert "▸ measure" in text
        assert "no [energy] counter" in text
        await pilot.press("2")
        await settle(pilot)
        app.refresh_chrome()
        assert app.screen.query_one(PaneBar).tabs[-1].title == "Live measure 14/20 0:21"
        await pilot.press("8")
        await settle(pilot)
        assert "no [energy] counter" in " ".join(column(find(app, "#events", Table), "text"))
        await pilot.press("n")
        await settle(pilot)
        assert len(app.screen_stack) == 1, "one run at a time"
        assert isinstance(app.pane, LivePane)
        launches.made[0].go_on.set()
        await settle(pilot, lambda: state(app) == "complete" and app.pane.id == "overview")
        assert app.session.loaded is not None
        assert app.session.loaded.path == launches.made[0].run_dir


@pytest.mark.parametrize("key", ["c", "escape"])
async def test_cancelling_asks_first_and_keeps_the_run(key: str) -> None:
    launches = Launches()
    app = make_app(launcher=launches)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: launches.made and launches.made[0].told.is_set())
        await pilot.press(key)
        assert isinstance(app.screen, Confirm)
        await pilot.press("enter")
        assert state(app) == "running"
        await pilot.press(key, "y")
        assert launches.made[0].cancelled.is_set()
        await settle(pilot, lambda: state(app) == "cancelled")
        run_dir = launches.made[0].run_dir
        assert (run_dir / "manifest.json").exists()
        await pilot.press("7")
        await settle(pilot, lambda: len(app.session.runs) == 1)
        assert column(find(app, "#runs", Table), "status") == ["◌ cancelled"]


async def test_a_failing_workload_is_explained_with_rank_phase_log_and_advice() -> None:
    launches = Launches(FailingLauncher)
    app = make_app(launcher=launches)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        text = dialog_text(app)
        assert "rank 1 ran out of device memory while measuring [2.00 GB wanted]" in text
        assert "rank 1, phase measure" in text
        assert "lower --batch or --seq" in text
        assert "torch.OutOfMemoryError" in text
        assert str(launches.made[0].run_dir) in text
        await pilot.press("c", "escape")
        assert "OutOfMemoryError" in app.clipboard
        assert state(app) == "failed"
        assert isinstance(app.pane, LivePane)
        await pilot.press("n")
        await settle(pilot)
        assert isinstance(app.screen, NewRun), "the next run can start at once"


async def test_a_launcher_that_cannot_start_is_explained() -> None:
    app = make_app(launcher=Launches(RefusingLauncher))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        assert "cannot start torchrun" in dialog_text(app)
        assert state(app) == "failed"


async def test_a_defect_in_the_launcher_ends_the_run_not_the_app() -> None:
    app = make_app(launcher=Launches(BrokenLauncher))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        assert "ZeroDivisionError: a defect" in dialog_text(app)
        assert state(app) == "failed"
        assert not app.session.recording


async def test_a_store_that_cannot_be_written_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("COSTLAB_HOME", str(blocker))
    app = make_app(launcher=Launches())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        assert "cannot create" in dialog_text(app)


async def test_quitting_while_a_run_is_active_asks_and_waits_for_its_end() -> None:
    launches = Launches()
    app = make_app(launcher=launches)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n", "enter")
        await settle(pilot, lambda: launches.made and launches.made[0].told.is_set())
        await pilot.press("q")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        assert app.is_running
        assert not launches.made[0].cancelled.is_set()
        await pilot.press("q", "y")
        await pilot.pause(0.2)
    assert launches.made[0].cancelled.is_set()
    assert app.return_code == 0
    assert state(app) == "cancelled"


async def test_the_real_launcher_is_the_default() -> None:
    assert CostlabApp().launcher_factory is Launcher


async def test_the_form_remembers_the_last_run() -> None:
    launches = Launches(RefusingLauncher)
    app = make_app(launcher=launches)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("n")
        await settle(pilot)
        app.screen.query_one("#batch", Input).value = "3"
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        await pilot.press("escape", "n")
        await settle(pilot)
        assert app.screen.query_one("#batch", Input).value == "3"

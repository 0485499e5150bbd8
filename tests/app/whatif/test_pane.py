"""The what-if pane, driven by keys, over legs of known speed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from costlab.app.tui.app import CostlabApp
from costlab.app.tui.panes.runs import prediction_record
from costlab.app.tui.panes.whatif import WhatIfPane
from costlab.app.tui.panes.whatif_rows import Board, Running, ToggleLine, progress_lines
from costlab.app.tui.widgets.choice import Choice
from costlab.app.tui.widgets.table import Table
from costlab.app.whatif import events
from costlab.app.whatif.results import Prediction
from costlab.app.whatif.store import Accuracy
from costlab.app.whatif.toggles import Machine
from costlab.probes.records import Progress
from costlab.probes.spec import RunSpec, SpecError
from tests.app.make_run import write_example_run
from tests.app.tui.driving import column, opened, settle, shown
from tests.app.whatif.fakes import FakeLeg, FakeMachine

BOX = Machine(gpus=2)
FINDABLE = "--"  # any option of a run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("costlab.app.tui.panes.whatif.this_machine", lambda: BOX)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_run(tmp_path_factory.mktemp("example") / "20261129-1402-llama-example-a1b2")


def speeds() -> FakeMachine:
    return FakeMachine(lambda s: 0.9 if s.optimizer == "sgd" else 1.0, noise=0.001)


async def at_pane(pilot: Pilot[object]) -> WhatIfPane:
    app = await opened(pilot)
    await app.show_pane("whatif")
    await pilot.pause()
    pane = app.pane
    assert isinstance(pane, WhatIfPane)
    return pane


async def choose(pilot: Pilot[object], pane: WhatIfPane, name: str) -> None:
    table = pane.query_one("#toggles", Table)
    table.cursor = next(n for n, row in enumerate(table.rows) if isinstance(row, ToggleLine) and row.name == name)
    table.focus()
    await pilot.press("space")


async def until(pilot: Pilot[object], condition: Callable[[], object], seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.05)):
        await pilot.pause()
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen in time")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_whatif_is_chosen_run_accepted_and_taken_back(example: Path, size: tuple[int, int]) -> None:
    app = CostlabApp([example], launcher_factory=speeds())
    async with app.run_test(size=size) as pilot:
        pane = await at_pane(pilot)
        await choose(pilot, pane, "sgd")
        await pilot.press("minus")
        await pilot.press("w")
        await until(pilot, lambda: pane.result is not None and pane.running is None)
        assert pane.result is not None
        assert [a.name for a in pane.result.variants] == ["sgd"]
        assert pane.result.rounds == 2
        text = shown(app)
        assert "● faster" in text
        assert "A/A control" in text
        assert "■" in text
        pane.query_one("#arms", Table).cursor = 0
        await pilot.press("b")
        assert pane.board is not None
        assert pane.board.baseline.optimizer == "sgd"
        assert "+ sgd" in shown(app)
        await pilot.press("u")
        assert pane.board.baseline.optimizer == "adamw"
        assert "What if: sgd" in pane.markdown()
        assert [f.name for f in pane.figures()] == ["sgd", "A/A control"]


async def test_escape_cancels_and_keeps_complete_rounds(example: Path) -> None:
    machine, go_on = speeds(), threading.Event()

    def wait_in_round_three(leg: FakeLeg) -> None:
        if leg.spec.seed == 2:
            go_on.wait(20)

    machine.on_leg = wait_in_round_three
    app = CostlabApp([example], launcher_factory=machine)
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        await choose(pilot, pane, "sgd")
        await pilot.press("w")
        await until(pilot, lambda: len(machine.started) == 7)
        pane.redraw()
        assert "leg 7/9" in shown(app)
        await pilot.press("escape")
        go_on.set()
        await until(pilot, lambda: pane.result is not None and pane.running is None)
        assert pane.result is not None
        assert pane.result.status == "cancelled"
        assert pane.result.rounds == 2


async def test_what_cannot_be_tried_says_why(example: Path) -> None:
    app = CostlabApp([example], launcher_factory=speeds())
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        assert "the baseline has it already" in column(pane.query_one("#toggles", Table), "reason")
        await choose(pilot, pane, "compile")
        assert pane.board is not None
        assert pane.board.chosen == []
        await pilot.press("w")
        assert pane.running is None
        await pilot.press("a")
        await pilot.press(*"batch=8", "enter")
        await settle(pilot)
        assert pane.board.chosen == ["batch=8"]
        await pilot.press("a")
        await pilot.press(*"bach=8", "enter")
        assert pane.board.chosen == ["batch=8"]


async def test_a_finding_s_proof_can_be_offered(example: Path) -> None:
    app = CostlabApp([example], launcher_factory=speeds())
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        pane.offer("--compile none --batch 8")
        pane.offer("--warp 9")
        await pilot.pause()
        assert pane.board is not None
        assert pane.board.chosen == ["compile=none+batch=8"]
        assert "compile=none+batch=8" in shown(app)


async def test_a_proof_is_one_key_away_and_is_told_afterwards(example: Path) -> None:
    app = CostlabApp([example], launcher_factory=FakeMachine(lambda s: 0.9 if s.cudagraphs else 1.0, noise=0.001))
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        overview = app.pane
        table = overview.query_one("#findings", Table)
        named = [n for n, row in enumerate(table.rows) if row.proves and FINDABLE in row.proves]
        assert named, [row.proves for row in table.rows]
        table.cursor = named[0]
        await pilot.press("p")
        await settle(pilot)
        pane = app.pane
        assert isinstance(pane, WhatIfPane)
        assert pane.board is not None
        assert len(pane.board.chosen) == 1
        await pilot.press("w")
        await until(pilot, lambda: pane.result is not None and pane.running is None)
        await app.show_pane("overview")
        await pilot.pause()
        told = column(overview.query_one("#findings", Table), "proves")[named[0]]
        assert "proven" in told or "refuted" in told
        assert "%" in told


async def test_no_run_is_recorded_while_a_whatif_measures(example: Path) -> None:
    machine, go_on = speeds(), threading.Event()

    def wait(_leg: FakeLeg) -> None:
        go_on.wait(20)

    machine.on_leg = wait
    app = CostlabApp([example], launcher_factory=machine)
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        await choose(pilot, pane, "sgd")
        await pilot.press("w")
        await until(pilot, lambda: len(machine.started) == 1)
        await pilot.press("n")
        await pilot.pause()
        assert len(app.screen_stack) == 1
        assert any("what-if is measuring" in n.message for n in app._notifications)
        go_on.set()
        await until(pilot, lambda: pane.running is None)
        assert not app.session.measuring
        await pilot.press("n")
        await pilot.pause()
        assert len(app.screen_stack) == 2


async def test_export_writes_the_pane_alone(example: Path, tmp_path: Path) -> None:
    file = tmp_path / "pane.md"
    app = CostlabApp([example], launcher_factory=speeds())
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        await choose(pilot, pane, "sgd")
        await pilot.press("w")
        await until(pilot, lambda: pane.result is not None and pane.running is None)
        await pilot.press("e")
        await pilot.pause()
        app.screen.query_one("#what", Choice).action_turn(1)
        app.screen.query_one("#path", Input).value = str(file)
        await pilot.pause()
        await pilot.press("enter")
        await settle(pilot, file.exists)
        assert "What if: sgd" in file.read_text()
        assert "Where a step goes" not in file.read_text()


async def test_without_a_run_it_says_what_to_press() -> None:
    app = CostlabApp([], launcher_factory=speeds())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await app.show_pane("whatif")
        await pilot.pause()
        assert "No run is open" in shown(app)
        await pilot.press("w", "space", "b", "u", "escape")


def test_a_board_flips_adds_accepts_and_undoes() -> None:
    board = Board([RunSpec(dtype="fp32", ranks=2)], BOX)
    assert board.flip("compile") == "the baseline has it already"
    assert board.flip("bf16") == ""
    board.add("batch=8")
    with pytest.raises(SpecError):
        board.add("batch=eight")
    assert [v.name for v in board.ask().variants] == ["bf16", "batch=8", "bf16 + batch=8"]
    board.flip("bf16")
    assert board.chosen == ["batch=8"]
    assert board.undo() == ""


def test_progress_tells_leg_phase_and_predictions() -> None:
    running = Running(began=0.0)
    running.feed(events.LegStarted(arm="sgd", round=0, number=2, total=6, eta_s=65.0))
    running.feed(events.LegEvent(Progress(t=1.0, rank=0, phase="measure", done=5, total=20)))
    running.feed(events.Predicted({"sgd": Prediction(change=-0.02, how="fewer accesses"), "eager": None}))
    text = "\n".join("".join(t for t, _ in row) for row in progress_lines(running, 5.0, 100))
    assert "leg 2/6  sgd" in text
    assert "measure 5/20  ETA 1:05" in text
    assert "sgd  -2.0 %  fewer accesses" in text
    assert "no model" in text


async def test_runs_show_how_far_predictions_were_off(example: Path) -> None:
    app = CostlabApp([example], launcher_factory=speeds())
    async with app.run_test(size=(120, 40)) as pilot:
        pane = await at_pane(pilot)
        await choose(pilot, pane, "sgd")
        await pilot.press("w")
        await until(pilot, lambda: pane.result is not None and pane.running is None)
        app.action_reload()
        await settle(pilot)
        await app.show_pane("runs")
        await settle(pilot)
        predicted = pane.result.variants[0].predicted if pane.result else None
        assert ("predictions off by  sgd" in shown(app)) == (predicted is not None)


def test_the_record_of_predictions_is_one_line() -> None:
    rows = prediction_record([Accuracy(toggle="fused", count=3, median_error=0.012, inside=2)])
    assert ["".join(t for t, _ in row) for row in rows] == ["predictions off by  fused 1.2 % (n=3)"]
    assert prediction_record([]) == []

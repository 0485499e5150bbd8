"""The frame: opening, keys, dialogs, palette, errors."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from textual.widgets import Input

from costlab.app.store import list_runs
from costlab.app.tui.dialogs.base import Message
from costlab.app.tui.dialogs.confirm import Confirm
from costlab.app.tui.dialogs.explain import Explain
from costlab.app.tui.dialogs.failure import Failed
from costlab.app.tui.dialogs.help import Help
from costlab.app.tui.shell import local_time
from costlab.app.tui.widgets.chrome import KeyLine, PaneBar, RunHeader
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip
from costlab.app.tui.widgets.table import Table
from tests.app.make_run import write_example_run
from tests.app.tui.driving import NOON, column, dialog_text, find, make_app, opened, settle, shown


async def test_an_empty_store_names_the_keys_to_press() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        text = find(app, "#pane-empty", Lines).plain
        assert "n  record a run" in text
        for key in "2345678":
            await pilot.press(key)
            await settle(pilot)
            assert app.pane.has_class("-empty")
            assert "record" in find(app, "#pane-empty", Lines).plain
        await pilot.press("i", "e", "y", "z")
        assert len(app.screen_stack) == 1


async def test_the_newest_complete_run_is_opened(tmp_path: Path) -> None:
    runs = tmp_path / "home" / "runs"
    write_example_run(runs / "a", run_id="a", created="2026-11-01T00:00:00Z")
    write_example_run(runs / "b", run_id="b", created="2026-11-02T00:00:00Z")
    write_example_run(runs / "c", run_id="c", created="2026-11-03T00:00:00Z", status="failed")
    app = make_app()
    async with app.run_test() as pilot:
        await opened(pilot)
        assert app.session.loaded is not None
        assert app.session.loaded.path == runs / "b"


async def test_a_path_given_is_opened_and_listed(example: Path, stored: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        assert app.session.loaded is not None
        assert app.session.loaded.path == example
        await pilot.press("7")
        await settle(pilot)
        assert {row.path for row in find(app, "#runs", Table).rows} == {example, stored}


async def test_a_path_that_is_no_run_is_explained(tmp_path: Path) -> None:
    app = make_app(tmp_path / "nothing")
    async with app.run_test() as pilot:
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        assert "manifest.json" in dialog_text(app)
        await pilot.press("escape")
        assert len(app.screen_stack) == 1


async def test_keys_help_explain_and_key_line(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("2")
        await settle(pilot)
        hints = [hint.text for hint in app.screen.query_one(KeyLine).hints]
        assert hints[0] == "Find"
        assert hints[-1] == "Help"
        await pilot.press("question_mark")
        await settle(pilot)
        assert isinstance(app.screen, Help)
        assert "Open the layer" in dialog_text(app)
        await pilot.press("escape", "i")
        assert isinstance(app.screen, Explain)
        assert "modelled" in dialog_text(app)
        assert "copy bandwidth" in dialog_text(app)


async def test_explain_covers_every_figure_of_a_pane_with_its_sample(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        app.set_focus(None)
        await pilot.press("i")
        text = dialog_text(app)
        for figure in app.pane.figures():
            assert figure.name in text
            assert figure.figure.how in text
        assert "n = 20" in text


async def test_the_figure_under_the_cursor_is_explained_alone(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        find(app, "#headline", FigureStrip).focus()
        await pilot.press("right", "right", "i")
        assert dialog_text(app).startswith("MFU")


async def test_copying_a_pane_gives_markdown_through_the_terminal(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("3")
        await settle(pilot)
        await pilot.press("y")
        assert app.clipboard.startswith("## Comms\n")
        assert "| all\\_gather |" in app.clipboard
        assert base64.b64encode(app.clipboard.encode())


@pytest.mark.parametrize(("turns", "suffix"), [(0, ".md"), (1, ".txt"), (2, ".json")])
async def test_export_writes_and_never_overwrites_unasked(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    app = make_app(example)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(pilot)

        async def export() -> None:
            await pilot.press("e", *["right"] * turns, "enter")
            await settle(pilot)

        await export()
        written = next(tmp_path.glob(f"costlab-*{suffix}"))
        content = written.read_text()
        assert "llama" in content
        if suffix == ".json":
            assert json.loads(content)["run"]["workload"] == "llama"
        written.write_text("mine")
        await export()
        await settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("enter")
        assert written.read_text() == "mine"
        await export()
        await settle(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await settle(pilot)
        assert written.read_text() == content


async def test_export_to_a_place_that_cannot_be_written_is_explained(example: Path, tmp_path: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await pilot.press("e")
        app.screen.query_one("#path", Input).value = str(tmp_path / "no" / "such" / "report.md")
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        assert "No such file" in dialog_text(app)


async def test_the_palette_depends_on_the_state(example: Path) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await settle(pilot, lambda: app.session.listed)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert "Export the report" not in titles
        app.open_path(example)
        await opened(pilot)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Export the report", "New run", "Go to Fusion"} <= titles
        assert "Cancel the run" not in titles
        await pilot.press("ctrl+p")
        await settle(pilot)
        await pilot.press(*"go to comms")
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot, lambda: app.pane.id == "comms")


async def test_maximise_and_back(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("2")
        await settle(pilot)
        table = find(app, "#layers", Table)
        small = table.size.height
        await pilot.press("z")
        await settle(pilot)
        assert table.size.height > small
        await pilot.press("z")
        await settle(pilot)
        assert table.size.height == small


async def test_reload_reads_the_run_again(stored: Path) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await opened(pilot)
        write_example_run(stored, speed=2.0)
        before = app.session.loaded
        await pilot.press("r")
        await settle(pilot, lambda: app.session.loaded is not before)
        first, second = before.report.steps, app.session.report.steps  # type: ignore[union-attr]
        assert first is not None
        assert second is not None
        assert second.step_ms.value < first.step_ms.value  # type: ignore[operator]


async def test_an_unexpected_error_of_a_worker_is_shown_in_one_place(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from costlab.app.tui import work

    def broken(path: Path) -> None:
        raise ZeroDivisionError(f"[bold]{path.name}")

    app = make_app()
    async with app.run_test() as pilot:
        await settle(pilot, lambda: app.session.listed)
        monkeypatch.setattr(work, "load", broken)
        app.open_path(example)
        await settle(pilot, lambda: isinstance(app.screen, Failed))
        text = dialog_text(app)
        assert "could not open a run: ZeroDivisionError: [bold]" in text
        assert not app.busy


@pytest.mark.parametrize("theme", ["costlab-light", "nord", "ansi-dark", "textual-light", "no-such-theme"])
async def test_every_theme_has_our_roles(example: Path, theme: str) -> None:
    app = make_app(example, theme=theme)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert app.theme == (theme if theme in app.available_themes else "costlab-dark")
        for role in ("status-complete", "accent-text", "muted", "faint", "cursor-line", "on-accent"):
            assert app.theme_variables[role]
        assert "step" in shown(app)


async def test_without_colour_nothing_is_lost(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("2")
        await settle(pilot)
        assert {"◐ P", "● C", "○ B"} <= set(column(find(app, "#layers", Table), "status"))
        assert "▌" in shown(app)


async def test_the_header_tells_run_state_and_price(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(140, 30)) as pilot:
        await opened(pilot)
        line = shown(app).splitlines()[0]
        assert "compiled FSDP2" in line
        assert "● complete" in line
        assert "/GPU-hour" in line
        assert app.screen.query_one(RunHeader).right


async def test_clicks_on_the_pane_bar_and_key_line(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.click(PaneBar, offset=(17, 0))
        await settle(pilot, lambda: app.pane.id == "fusion")
        where = shown(app).splitlines()[-1].index("Help")
        await pilot.click(KeyLine, offset=(where, 0))
        await settle(pilot, lambda: isinstance(app.screen, Message))


async def test_runs_are_marked_compared_and_deleted(tmp_path: Path) -> None:
    runs = tmp_path / "home" / "runs"
    write_example_run(runs / "a", run_id="a", created="2026-11-01T00:00:00Z")
    write_example_run(runs / "b", run_id="b", created="2026-11-02T00:00:00Z", speed=1.5)
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("7")
        await settle(pilot)
        await pilot.press("home", "space", "space", "c")
        await settle(pilot, lambda: len(app.screen_stack) == 2)
        assert "slower" in dialog_text(app)
        assert "step time" in column(app.screen.query_one("#changes", Table), "name")
        await pilot.press("y", "escape")
        assert app.clipboard.startswith("# Two runs compared")
        await pilot.press("space", "up", "space", "home", "d")
        assert isinstance(app.screen, Confirm)
        await pilot.press("enter")
        assert (runs / "b").exists()
        await pilot.press("d", "y")
        await settle(pilot, lambda: not (runs / "b").exists())
        await settle(pilot, lambda: len(app.session.runs) == 1)
        assert [s.id for s in list_runs()] == ["a"]
        assert app.session.report is None, "the open run was deleted"


async def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "runs" / "broken"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("7")
        await settle(pilot)
        assert "damaged" in column(find(app, "#runs", Table), "status")[0]
        assert "damaged" in find(app, "#about", Lines).plain
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, Failed))


async def test_samples_are_offered(monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    from costlab.app.store import Run
    from costlab.app.tui import work

    monkeypatch.setattr(work, "sample_names", lambda: ["h200-llama"])
    monkeypatch.setattr(work, "open_sample", lambda _: Run(example))
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        await pilot.press("7")
        await settle(pilot)
        assert column(find(app, "#runs", Table), "title") == ["h200-llama"]
        await pilot.press("s")
        await settle(pilot)
        await pilot.press("enter")
        await opened(pilot)
        assert app.session.loaded is not None
        assert app.session.loaded.sample == "h200-llama"
        assert "sample" in shown(app).splitlines()[0]


def test_times_of_today_have_no_date() -> None:
    assert local_time("2026-11-30T14:02:00Z", NOON) == "14:02"
    assert local_time("2026-11-29T14:02:00Z", NOON) == "Nov 29 14:02"
    assert local_time("2025-11-29T14:02:00Z", NOON) == "2025-11-29"
    assert local_time("not a time", NOON) == "not a time"


async def test_no_key_of_any_pane_hurts_when_nothing_is_open() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, lambda: app.session.listed)
        for pane in "12345678":
            await pilot.press(pane)
            await settle(pilot)
            await pilot.press(*"fcagxpvwd", "slash", "space", "enter", "left", "right", "down", "s")
            await settle(pilot)
            assert len(app.screen_stack) == 1


async def test_the_last_of_two_requests_wins(example: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from costlab.app.tui import work

    real, first_may_end = work.load, threading.Event()

    def load(path: Path) -> object:
        if path == stored:
            first_may_end.wait(10)
        return real(path)

    monkeypatch.setattr(work, "load", load)
    app = make_app(example)
    async with app.run_test() as pilot:
        await opened(pilot)
        app.open_path(stored)
        await pilot.pause()
        app.open_path(example)
        await settle(pilot, lambda: not app.busy)
        first_may_end.set()
        await settle(pilot)
        await pilot.pause(0.1)
        assert app.session.loaded is not None
        assert app.session.loaded.path == example

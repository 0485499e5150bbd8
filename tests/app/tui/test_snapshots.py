"""How it looks. Few pictures, of what a person sees first; behaviour is tested elsewhere.

They show a stored report, so that they change with the interface and not with the analysis. It is
`msgspec.json.encode(work.load(write_example_run(DIRECTORY)).report)`; write it anew when a view model changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from costlab.app.analysis.views import RunReport
from costlab.app.tui import work
from costlab.app.tui.messages import Loaded
from tests.app.tui.driving import make_app, opened, settle

Compare = Callable[..., bool]
REPORT = Path(__file__).parent / "data" / "report.json"


@pytest.fixture(autouse=True)
def stored_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path opens the stored report."""
    report = msgspec.json.decode(REPORT.read_bytes(), type=RunReport)
    monkeypatch.setattr(work, "load", lambda path: Loaded(path=Path(path), report=report))


def after(*keys: str) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Wait for the run, press keys, wait until all is quiet."""

    async def drive(pilot: Pilot[Any]) -> None:
        await opened(pilot)
        for key in keys:
            await pilot.press(key)
            await settle(pilot)

    return drive


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
@pytest.mark.parametrize(("name", "keys"), [("overview", ""), ("fusion", "2"), ("comms", "3"), ("cost", "6")])
def test_panes(snap_compare: Compare, example: Path, name: str, keys: str, size: tuple[int, int]) -> None:
    del name
    assert snap_compare(make_app(example), terminal_size=size, run_before=after(*keys))


def test_light(snap_compare: Compare, example: Path) -> None:
    app = make_app(example, theme="costlab-light")
    assert snap_compare(app, terminal_size=(120, 40), run_before=after())


def test_without_colour(snap_compare: Compare, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(make_app(example), terminal_size=(80, 24), run_before=after("2"))


def test_new_run(snap_compare: Compare, example: Path) -> None:
    assert snap_compare(make_app(example), terminal_size=(80, 24), run_before=after("n"))


def test_explain(snap_compare: Compare, example: Path) -> None:
    assert snap_compare(make_app(example), terminal_size=(80, 24), run_before=after("4", "i"))


def test_empty(snap_compare: Compare) -> None:
    async def listed(pilot: Pilot[Any]) -> None:
        await settle(pilot, lambda: pilot.app.session.listed)  # type: ignore[attr-defined]

    assert snap_compare(make_app(), terminal_size=(80, 24), run_before=listed)

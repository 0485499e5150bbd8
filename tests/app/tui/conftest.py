"""A terminal, a clock and a store that are the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from costlab.app.tui import work
from costlab.app.tui.messages import Loaded
from tests.app.make_run import write_example_run
from tests.app.tui.driving import RUN_ID

READ: dict[Path, Loaded] = {}


@pytest.fixture(autouse=True)
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Colours, zone and animations do not depend on who runs the tests; the store is empty, no samples."""
    monkeypatch.setattr(work, "sample_names", list)
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.setenv("TZ", "UTC")
    for name in ("NO_COLOR", "FORCE_COLOR", "TEXTUAL", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for all tests that only read it."""
    return write_example_run(tmp_path_factory.mktemp("example") / RUN_ID)


@pytest.fixture(autouse=True)
def read_once(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is analysed once for all tests; every other run is read as usual."""
    real = work.load

    def load(path: Path | str) -> Loaded:
        if path != example:
            return real(path)
        if path not in READ:
            READ[path] = real(path)
        return READ[path]

    monkeypatch.setattr(work, "load", load)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A run in the store."""
    return write_example_run(tmp_path / "home" / "runs" / RUN_ID)

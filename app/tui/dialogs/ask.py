"""Ask for one line of text: a path, a search."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.suggester import Suggester
from textual.widgets import Input

from costlab.app.tui.cells import Line, line
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.widgets.lines import Lines


class Ask(Dialog[str]):
    """Dismisses with the text typed, None when left."""

    def __init__(
        self, title: str, hint: str, *, value: str = "", done: str = "open", suggester: Suggester | None = None
    ) -> None:
        super().__init__(title)
        self.hint = hint
        self.value = value
        self.done = done
        self.suggester = suggester

    def content(self) -> ComposeResult:
        """The hint and the input."""
        yield Lines([line((self.hint, "muted"))], classes="wrap")
        yield Input(self.value, id="answer", compact=True, suggester=self.suggester)

    def keys(self) -> Line:
        """Enter and escape."""
        more = (("→", "complete"),) if self.suggester else ()
        return keys(("enter", self.done), *more, ("esc", "back"))

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())


class PathSuggester(Suggester):
    """Completes the first entry of a directory that starts as typed."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """The completed path, None when nothing matches."""
        import asyncio

        return await asyncio.to_thread(complete_path, value)


def complete_path(value: str) -> str | None:
    """`value` completed to the first existing entry, a slash after directories; None when nothing matches."""
    from pathlib import Path

    folder, _, start = value.rpartition("/")
    base = Path(folder + "/").expanduser() if "/" in value else Path()
    try:
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in base.iterdir() if p.name.startswith(start))
    except OSError:
        return None
    shown = [n for n in names if start or not n.startswith(".")]
    if not shown or not value:
        return None
    return value[: len(value) - len(start)] + shown[0]

"""Ask what to record. The form says at once what is wrong, and shows the command that does the same."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid
from textual.suggester import SuggestFromList
from textual.widget import Widget
from textual.widgets import Input, Label

from costlab.app.tui.cells import EMPTY, Line, line
from costlab.app.tui.dialogs.base import Dialog, keys
from costlab.app.tui.form import (
    FIELDS,
    NO_PRESET,
    build_spec,
    choices,
    command_line,
    field_text,
    preset_names,
    preset_values,
)
from costlab.app.tui.widgets.choice import Choice
from costlab.app.tui.widgets.lines import Lines
from costlab.probes.spec import BUILTIN_WORKLOADS, WORKLOAD_SIZES, RunSpec, SpecError

CHOSEN = ("device", "parallel", "compile", "dtype", "recompute", "cudagraphs")
LABELS = {"cudagraphs": "CUDA graphs"}


class NewRun(Dialog[RunSpec]):
    """Dismisses with a valid spec, or None."""

    DEFAULT_CSS = """
    NewRun Grid { grid-size: 4; grid-columns: 11 1fr 11 1fr; grid-rows: 1; grid-gutter: 0 1; height: auto; }
    NewRun Label { color: $muted; }
    NewRun .long { column-span: 3; }
    NewRun #form-state { margin-top: 1; height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,ctrl+r", "record", "Record", show=False, priority=True, id="new-run.record"),
        Binding("down", "app.focus_next", show=False, id="new-run.next"),
        Binding("up", "app.focus_previous", show=False, id="new-run.previous"),
    ]

    def __init__(self, spec: RunSpec) -> None:
        super().__init__("record a run")
        self.start = spec
        self.spec: RunSpec | None = None

    def content(self) -> ComposeResult:
        """The fields, then what is wrong or the equivalent command."""
        with Grid():
            yield Label("preset")
            yield Choice(preset_names(), self.start.preset or NO_PRESET, id="preset")
            yield Label("workload")
            yield self._input("workload", suggestions=BUILTIN_WORKLOADS)
            for field in FIELDS[1:]:
                yield Label(LABELS.get(field, field))
                yield self._field(field)
            yield Label("extra")
            yield Input("", id="extra", compact=True, placeholder="--lr 1e-3 --no-checkpoint", classes="long")
        yield Lines(id="form-state", classes="wrap")

    def _field(self, field: str) -> Widget:
        if field in CHOSEN:
            return Choice(choices(field), field_text(self.start, field), id=field)
        sizes = sorted({s for names in WORKLOAD_SIZES.values() for s in names}) if field == "size" else ()
        return self._input(field, suggestions=sizes)

    def _input(self, field: str, suggestions: tuple[str, ...] | list[str] = ()) -> Input:
        suggester = SuggestFromList(suggestions) if suggestions else None
        kind = "text" if suggestions else "integer"
        value = field_text(self.start, field)
        return Input(value, id=field, compact=True, suggester=suggester, type="text" if kind == "text" else "integer")

    def keys(self) -> Line:
        """Keys of the form."""
        return keys(("enter", "record"), ("tab ↑ ↓", "field"), ("← →", "value"), ("esc", "back"))

    def on_mount(self) -> None:
        """Check what the form starts with."""
        self.query_one("#preset").focus()
        self._check()

    @on(Choice.Changed, "#preset")
    def _preset(self, event: Choice.Changed) -> None:
        """Fill the fields from the preset."""
        for field, text in preset_values(event.choice.value).items():
            widget = self.query_one(f"#{field}")
            if isinstance(widget, Choice | Input):
                widget.value = text
        self._check()

    @on(Choice.Changed)
    @on(Input.Changed)
    def _changed(self) -> None:
        self._check()

    def values(self) -> dict[str, str]:
        """Texts of the fields."""
        found: dict[str, str] = {}
        for field in FIELDS:
            widget = self.query_one(f"#{field}")
            found[field] = widget.value if isinstance(widget, Input | Choice) else ""
        return found

    def _check(self) -> None:
        preset = self.query_one("#preset", Choice).value
        try:
            self.spec = build_spec(self.values(), self.query_one("#extra", Input).value, preset)
        except SpecError as error:
            self.spec = None
            self._say([line(("✗ ", "bad"), str(error)), EMPTY, self._hint()])
            return
        self._say([line(("$ ", "faint"), (command_line(self.spec), "accent")), EMPTY, self._hint()])

    def _hint(self) -> Line:
        sizes = WORKLOAD_SIZES.get(self.query_one("#workload", Input).value)
        if sizes:
            return line(
                (f"sizes: {', '.join(sizes)} · 0: ranks = GPUs (or 2), batch and seq = the size's own", "muted")
            )
        return line(("your own workload: path/to/file.py:make", "muted"))

    def _say(self, lines: list[Line]) -> None:
        self.query_one("#form-state", Lines).show(lines)

    def action_record(self) -> None:
        """Dismiss with the spec if it is valid."""
        self._check()
        if self.spec is None:
            self.app.bell()
            return
        self.dismiss(self.spec)

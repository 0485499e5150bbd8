"""What-if: choose toggles, re-run the workload alternating with the baseline, see intervals, accept what won."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.timer import Timer
from textual.worker import Worker, WorkerState

from costlab.app.analysis.views import RunReport
from costlab.app.report.whatif import axis_of, render_whatif
from costlab.app.store import StoreError
from costlab.app.text import markup
from costlab.app.tui.cells import Line, line
from costlab.app.tui.dialogs.ask import Ask
from costlab.app.tui.panes.base import Pane, lacking
from costlab.app.tui.panes.whatif_rows import (
    LEAST_LEGS,
    MOST_LEGS,
    TOGGLE_COLUMNS,
    Board,
    Running,
    ToggleLine,
    about_lines,
    arm_columns,
    baseline_lines,
    board_of,
    note_lines,
    progress_lines,
    proof_of_arm,
)
from costlab.app.tui.session import Session, proof_key
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import Named
from costlab.app.tui.widgets.table import Table
from costlab.app.whatif.engine import WhatIf
from costlab.app.whatif.results import Arm, WhatIfResult, is_variant
from costlab.app.whatif.spec import from_command
from costlab.app.whatif.store import new_whatif_directory
from costlab.app.whatif.toggles import Machine, this_machine
from costlab.probes.spec import SpecError

if TYPE_CHECKING:
    from costlab.app.whatif import events
    from costlab.app.whatif.legs import LauncherFactory

REFRESH_S = 0.5


class WhatIfPane(Pane):
    """Toggles above, the leg that runs, then the forest plot with the arm under the cursor in words."""

    TITLE: ClassVar[str] = "What-if"
    FOCUS: ClassVar[str] = "#toggles"
    HELP: ClassVar[str | None] = """\
`space` chooses a toggle, `a` types any option as `key=value`, `enter` on the toggles runs what is chosen. Each is tried
alone and then all together; with `f` in every combination. `escape` cancels and keeps what is complete.

Baseline and variants alternate, each leg in fresh processes; the baseline runs twice a round (A/A). An interval that
holds zero, or a difference within the A/A pair's own, is **no difference**. `b` makes the variant under the cursor the
baseline, `u` takes that back. `+` and `-` change the number of legs.
"""
    DEFAULT_CSS = """
    WhatIfPane #pane-body { overflow: hidden; }
    WhatIfPane #toggles { height: 2fr; max-height: 14; }
    WhatIfPane #progress { height: auto; max-height: 4; margin: 1 1 0 1; }
    WhatIfPane #baseline { padding: 0 1; }
    WhatIfPane #arms { height: auto; max-height: 10; margin-top: 1; display: none; }
    WhatIfPane #about { height: 1fr; padding: 0 1; display: none; margin-top: 1; }
    WhatIfPane.-answered #arms, WhatIfPane.-answered #about { display: block; }
    .-short WhatIfPane.-answered #toggles { height: 1fr; min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "flip", "Choose", id="whatif.flip"),
        Binding("w", "run", "Run", id="whatif.run"),
        Binding("escape", "cancel", "Cancel", id="whatif.cancel"),
        Binding("a", "add", "Add option", id="whatif.add"),
        Binding("f", "factorial", "Factorial", id="whatif.factorial"),
        Binding("b", "accept", "Accept", id="whatif.accept"),
        Binding("u", "undo", "Undo", id="whatif.undo"),
        Binding("plus,equals_sign", "legs(1)", "More legs", show=False, id="whatif.more"),
        Binding("minus", "legs(-1)", "Fewer legs", show=False, id="whatif.fewer"),
    ]

    class Finished(Message):
        """The engine has returned."""

        def __init__(self, result: WhatIfResult) -> None:
            self.result = result
            super().__init__()

    class Proved(Message):
        """Findings of the open run may have been proven or refuted."""

    def __init__(self, session: Session, *, id: str, machine: Machine | None = None) -> None:
        super().__init__(session, id=id)
        self.machine = machine
        self.board: Board | None = None
        self.running: Running | None = None
        self.engine: WhatIf | None = None
        self.result: WhatIfResult | None = None
        self._events: deque[events.WhatIfEvent] = deque()
        self._timer: Timer | None = None
        self._shown_run = ""

    def body(self) -> ComposeResult:
        """Baseline, toggles, progress, forest, words."""
        yield Lines(id="baseline")
        yield Table[ToggleLine](TOGGLE_COLUMNS, id="toggles")
        yield Lines(id="progress")
        yield Table[Arm]([], id="arms")
        yield Lines(id="about", classes="wrap")

    def on_mount(self) -> None:
        """Redraw at a low rate while a what-if runs."""
        self._timer = self.set_interval(REFRESH_S, self.redraw, pause=True)

    def on_unmount(self) -> None:
        """However the app ends, the legs do not outlive it."""
        if self.engine is not None:
            self.engine.cancel()

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """A run without options cannot be run again."""
        if self.running is None and report.run.id != self._shown_run:
            self.machine = self.machine or this_machine()
            self.board, self.result = board_of(report, self.machine), None
            self._shown_run = report.run.id
        if self.board is not None:
            return ()
        return lacking(
            "This run does not say how it was started, so it cannot be run again.",
            line(("n", "accent"), "  record a run on this machine"),
        )

    def fill(self, report: RunReport) -> None:  # noqa: ARG002
        """Show the board of the run."""
        self.redraw()

    def redraw(self) -> None:
        """Draw the state as it is now."""
        while self._events and self.running is not None:
            self.running.feed(self._events.popleft())
        board = self.board
        if board is None or not self.is_mounted:
            return
        self.query_one("#baseline", Lines).show(baseline_lines(board))
        self.query_one("#toggles", Table).set_rows(board.lines())
        now, width = self.session.clock(), max(self.size.width - 4, 40)
        self.query_one("#progress", Lines).show(progress_lines(self.running, now, width))
        self._draw_result(self.running.result if self.running and self.running.result else self.result)
        self.refresh_bindings()

    def _draw_result(self, result: WhatIfResult | None) -> None:
        self.set_class(result is not None, "-answered")
        if result is None:
            return
        arms, table = [*result.variants, result.control], self.query_one("#arms", Table)
        if list(table.rows) != arms:
            table.set_columns(arm_columns(axis_of(arms, 20)))
            table.set_rows(arms)
        self._about()

    @property
    def shown(self) -> WhatIfResult | None:
        """The result on screen."""
        return self.running.result if self.running and self.running.result else self.result

    @on(Table.Moved, "#arms")
    def _about(self) -> None:
        result, arm = self.shown, self.query_one("#arms", Table).row
        if result is not None and isinstance(arm, Arm):
            self.query_one("#about", Lines).show([*about_lines(result, arm), *note_lines(result)])

    @on(Table.Chosen, "#toggles")
    def _chosen(self) -> None:
        self.action_run()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """What can be done now."""
        if self.board is None:
            return action not in ("flip", "run", "cancel", "add", "factorial", "accept", "undo", "legs")
        if action == "cancel":
            return self.running is not None and not self.running.cancelling
        if action in ("flip", "run", "add", "factorial", "legs"):
            return self.running is None
        if action == "accept":
            return self.running is None and self.result is not None
        if action == "undo":
            return self.running is None and bool(self.board.accepted)
        return True

    def action_flip(self) -> None:
        """Choose or drop the toggle under the cursor."""
        row = self.query_one("#toggles", Table).row
        if self.board is None or not isinstance(row, ToggleLine):
            return
        reason = self.board.flip(row.name)
        if reason:
            self.notify(markup(f"{row.name}: {reason}"), timeout=4)
        self.redraw()

    def action_add(self) -> None:
        """Type an option."""
        hint = "Any run option as key=value: batch=8, seq=4096, compile_mode=reduce-overhead"
        self.app.push_screen(Ask("add an option", hint, done="add"), self._add)

    def _add(self, text: str | None) -> None:
        if not text or self.board is None:
            return
        try:
            self.board.add(text)
        except SpecError as error:
            self.notify(markup(str(error)), severity="warning", timeout=6)
        self.redraw()
        self.query_one("#toggles", Table).cursor = 0

    def offer(self, fragment: str) -> None:
        """Choose what a finding names as its proof, `--dtype bf16`; a word on why where it cannot be tried here."""
        try:
            self._add(from_command(fragment))
        except SpecError as error:
            self.notify(markup(str(error)), severity="warning", timeout=6)

    def action_factorial(self) -> None:
        """All combinations, or each alone and all together."""
        if self.board is not None:
            self.board.factorial = not self.board.factorial
            self.redraw()

    def action_legs(self, step: int) -> None:
        """More or fewer legs."""
        if self.board is not None:
            self.board.legs = min(max(self.board.legs + step, LEAST_LEGS), MOST_LEGS)
            self.redraw()

    def action_accept(self) -> None:
        """Make the variant under the cursor the baseline."""
        arm = self.query_one("#arms", Table).row
        if self.board is None or not isinstance(arm, Arm) or not is_variant(arm.name) or arm.failure:
            self.notify("Put the cursor on a variant that ran", timeout=4)
            return
        self.board.accept(arm)
        self.notify(markup(f"{arm.name} is the baseline now; u takes it back"), timeout=4)
        self.redraw()

    def action_undo(self) -> None:
        """Go back one baseline."""
        name = self.board.undo() if self.board else ""
        if name:
            self.notify(markup(f"{name} is no longer in the baseline"), timeout=4)
        self.redraw()

    def action_run(self) -> None:
        """Start the what-if that is chosen; one measurement at a time."""
        if self.board is None or self.running is not None:
            return
        if self.session.recording:
            self.notify("A run is being recorded: it would disturb the measurement", timeout=4)
            return
        try:
            spec = self.board.ask()
            self.engine = WhatIf(spec, new_whatif_directory(), launcher=self._launcher())
        except (SpecError, StoreError) as error:
            self.notify(markup(str(error)), severity="warning", timeout=6)
            return
        self._events.clear()
        self.session.measuring = True
        self.running = Running(began=self.session.clock())
        self._measure(self.engine)
        if self._timer is not None:
            self._timer.resume()
        self.redraw()

    def _launcher(self) -> LauncherFactory:
        from costlab.app.tui.recording import Recording
        from costlab.probes.launch import Launcher

        return self.app.launcher_factory if isinstance(self.app, Recording) else Launcher

    def action_cancel(self) -> None:
        """End the leg; complete rounds are kept."""
        if self.engine is not None and self.running is not None:
            self.running.cancelling = True
            self.engine.cancel()
            self.redraw()

    @work(thread=True, exclusive=True, exit_on_error=False, group="record", description="run a what-if")
    def _measure(self, engine: WhatIf) -> None:
        self.post_message(self.Finished(engine.run(self._events.append)))

    def on_what_if_pane_finished(self, message: WhatIfPane.Finished) -> None:
        """Show the result and go quiet."""
        self.result = message.result
        self._remember(message.result)
        self._settle()
        self.query_one("#arms", Table).focus(scroll_visible=False)
        self.notify(f"What-if {message.result.status}", timeout=4)

    def _remember(self, result: WhatIfResult) -> None:
        """Keep what was shown of the run's own options, for its findings; not of a baseline that was accepted here."""
        if self.board is None or self.board.accepted:
            return
        for arm in result.variants:
            self.session.proofs[proof_key(self._shown_run, arm.name)] = proof_of_arm(arm)
        if self.report is not None:
            self.post_message(self.Proved())

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A defect in the engine ends the what-if; the app tells it like any worker's."""
        if event.state is WorkerState.ERROR:
            self._settle()

    def _settle(self) -> None:
        self.running, self.engine = None, None
        self.session.measuring = False
        if self._timer is not None:
            self._timer.pause()
        self.redraw()

    def figures(self) -> Sequence[Named]:
        """The change of every arm, for the explanation."""
        arms = [*self.shown.variants, self.shown.control] if self.shown else []
        return [Named(arm.name, arm.change) for arm in arms if arm.change is not None]

    def markdown(self) -> str:
        """The whole what-if for the clipboard."""
        return render_whatif(self.shown, "md") if self.shown else super().markdown()

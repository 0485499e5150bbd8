"""Starting, cancelling and ending a recording; leaving while one is active."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from costlab.app.store import StoreError, new_run_directory
from costlab.app.tui.dialogs.confirm import Confirm
from costlab.app.tui.dialogs.failure import Failed, FailureFacts
from costlab.app.tui.dialogs.new_run import NewRun
from costlab.app.tui.live import LauncherFactory, Launching
from costlab.app.tui.loading import Loading
from costlab.app.tui.messages import RunEnded
from costlab.app.tui.panes.live import LivePane
from costlab.app.tui.shell import LIVE
from costlab.probes.launch import Launcher, LaunchError
from costlab.probes.spec import RunSpec, SpecError, apply_preset

LEAVE_S = 15.0  # longer than the launcher's own grace period


class Recording(Loading):
    """The shell with a launcher."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "new_run", "New run", id="app.new-run"),
    ]
    launcher_factory: LauncherFactory = Launcher
    last_spec: RunSpec = apply_preset(RunSpec(), "smoke")
    leaving: int | None = None  # the exit code to leave with once the run has ended

    async def action_new_run(self) -> None:
        """Ask what to record; one run at a time."""
        if self.session.recording:
            self.notify("A run is active: c cancels it", timeout=4)
            await self.show_pane(LIVE)
            return
        if self.session.measuring:
            self.notify("A what-if is measuring: another run would disturb it; escape in What-if ends it", timeout=4)
            return
        self.push_screen(NewRun(self.last_spec), self._start)

    async def _start(self, spec: RunSpec | None) -> None:
        if spec is None or self.session.measuring:
            return
        self.last_spec = spec
        try:
            run_dir = new_run_directory(spec.workload, spec.size)
            launcher: Launching = self.launcher_factory(spec, run_dir)
        except (StoreError, SpecError, LaunchError) as error:
            self.push_screen(Failed("cannot record", FailureFacts(sentence=str(error))))
            return
        self.live_pane.start(launcher, spec, run_dir)
        await self.show_pane(LIVE)

    @on(LivePane.CancelAsked)
    def action_cancel_run(self) -> None:
        """Ask, then cancel."""
        if self.session.recording:
            question = Confirm(
                "cancel the run?",
                "The ranks are asked to end. What was recorded is kept and marked cancelled.",
                yes="cancel the run",
                no="let it go on",
            )
            self.push_screen(question, self._cancel)

    def _cancel(self, yes: bool | None) -> None:
        if yes:
            self.live_pane.cancel()
            self.refresh_chrome()

    @on(LivePane.OpenAsked)
    def _open_ended(self, message: LivePane.OpenAsked) -> None:
        self.open_path(message.path)

    @on(RunEnded)
    def _ended(self, message: RunEnded) -> None:
        """List the new run; open a complete one, explain a failed one, leave if that was asked."""
        self.refresh_chrome()
        if self.leaving is not None:
            self.exit(return_code=self.leaving)
            return
        self.list_runs()
        if message.state == "complete":
            self.notify(f"Recorded {message.run_dir.name}", timeout=5)
            if self.switcher.current == LIVE and len(self.screen_stack) == 1:
                self.open_path(message.run_dir)
        elif message.state == "cancelled":
            self.notify(f"Cancelled; kept as {message.run_dir.name}", timeout=6)
        else:
            self.push_screen(Failed("the run failed", failure_facts(message)))

    async def action_quit(self) -> None:
        """Leave; an active run has to be cancelled or finished first."""
        if not self.session.recording:
            self.exit(return_code=0)
            return
        question = Confirm(
            "a run is being recorded",
            "Leaving ends it. What was recorded is kept and marked cancelled.",
            yes="cancel the run and quit",
            no="stay",
        )
        self.push_screen(question, self._quit)

    def _quit(self, yes: bool | None) -> None:
        if yes:
            self.leave(0)

    def leave(self, code: int) -> None:
        """Exit with `code`; an active run is cancelled and given time to end and be written."""
        if not self.session.recording:
            self.exit(return_code=code)
            return
        self.leaving = code
        self.live_pane.cancel()
        self.notify("Ending the run, then leaving", timeout=LEAVE_S)
        self.set_timer(LEAVE_S, lambda: self.exit(return_code=code))


def failure_facts(message: RunEnded) -> FailureFacts:
    """What the modal of a failed run shows."""
    saved = str(message.run_dir) if message.run_dir.exists() else ""
    info = message.failure
    if info is None:
        return FailureFacts(sentence=message.sentence or "the run ended without saying why", saved_at=saved)
    return FailureFacts(
        sentence=info.message,
        rank=info.rank,
        phase=info.phase,
        advice=info.advice,
        log_tail=info.log_tail,
        saved_at=saved,
    )

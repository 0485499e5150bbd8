"""Opening, listing, comparing and deleting runs: thread workers, and the handlers of what they post."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from textual import on, work
from textual.message import Message
from textual.worker import Worker, WorkerState, get_current_worker

from costlab.app.store import StoreError
from costlab.app.tui import work as slow
from costlab.app.tui.dialogs.failure import Failed, FailureFacts
from costlab.app.tui.messages import Loaded, PairLoaded, RunLoaded, RunsDeleted, RunsListed, WorkFailed, unexpected
from costlab.app.tui.shell import Shell

Read = Callable[[], Loaded]


class Loading(Shell):
    """The shell with its store."""

    def open_path(self, path: Path | str) -> None:
        """Open a run by directory, or by id or the start of one."""
        self.set_busy(f"reading {Path(path).name} …")
        self._open(lambda: slow.load(path), str(path))

    def reopen(self, loaded: Loaded) -> None:
        """Read the open run again."""
        if loaded.sample:
            self.open_sample(loaded.sample)
        else:
            self.open_path(loaded.path)

    def open_sample(self, name: str) -> None:
        """Open a sample."""
        self.set_busy(f"reading sample {name} …")
        self._open(lambda: slow.load_sample(name), name)

    def set_busy(self, text: str) -> None:
        """Say in the header what is being read; "" when nothing is."""
        self.busy = text
        self.refresh_chrome()

    @work(thread=True, exclusive=True, exit_on_error=False, group="open", description="open a run")
    def _open(self, read: Read, what: str) -> None:
        worker = get_current_worker()
        try:
            message: Message = RunLoaded(read())
        except (StoreError, OSError) as error:
            message = WorkFailed(f"cannot open {what}", str(error))
        if not worker.is_cancelled:  # a later request has replaced this one
            self.post_message(message)

    @on(RunLoaded)
    async def _loaded(self, message: RunLoaded) -> None:
        self.session.loaded = message.loaded
        known = {s.path for s in self.session.runs}
        if not message.loaded.sample and message.loaded.path not in known | set(self.session.given):
            self.session.given.append(message.loaded.path)
            self.list_runs()
        self.set_busy("")
        await self.show_pane("overview")
        self.show_report()

    def list_runs(self) -> None:
        """Look for stored runs."""
        self._list(tuple(self.session.given))

    @work(thread=True, exclusive=True, exit_on_error=False, group="list", description="list the runs")
    def _list(self, given: Sequence[Path]) -> None:
        worker = get_current_worker()
        message = RunsListed(*slow.listing(given))
        if not worker.is_cancelled:
            self.post_message(message)

    @on(RunsListed)
    def _listed(self, message: RunsListed) -> None:
        first = not self.session.listed
        self.session.runs, self.session.samples = message.runs, message.samples
        self.session.problem, self.session.listed = message.problem, True
        paths = {s.path for s in message.runs}
        self.session.marked = [p for p in self.session.marked if p in paths]
        self.runs_changed()
        newest = slow.newest(message.runs)
        if first and newest and self.session.loaded is None and not self.busy and not self.session.recording:
            self.open_path(newest)

    def runs_changed(self) -> None:
        """Redraw the panes that list runs."""
        for pane in self.panes:
            pane.store_changed()

    def compare(self, first: Path, second: Path) -> None:
        """Read two runs and show them side by side."""
        self.set_busy("reading two runs …")
        self._pair(first, second)

    @work(thread=True, exclusive=True, exit_on_error=False, group="open", description="read two runs")
    def _pair(self, first: Path, second: Path) -> None:
        worker = get_current_worker()
        try:
            message: Message = PairLoaded(slow.compare(first, second))
        except (StoreError, OSError) as error:
            message = WorkFailed("cannot compare", str(error))
        if not worker.is_cancelled:
            self.post_message(message)

    def delete_runs(self, paths: Sequence[Path]) -> None:
        """Delete run directories; asked for and confirmed."""
        self._delete(tuple(paths))

    @work(thread=True, exclusive=True, exit_on_error=False, group="delete", description="delete runs")
    def _delete(self, paths: Sequence[Path]) -> None:
        done: list[Path] = []
        for path in paths:
            try:
                slow.delete(path)
                done.append(path)
            except (StoreError, OSError) as error:
                self.post_message(WorkFailed(f"cannot delete {path.name}", str(error)))
        self.post_message(RunsDeleted(done))

    @on(RunsDeleted)
    def _deleted(self, message: RunsDeleted) -> None:
        gone = set(message.paths)
        self.session.given = [p for p in self.session.given if p not in gone]
        if gone:
            self.notify(f"Deleted {len(gone)} run{'s' if len(gone) > 1 else ''}", timeout=4)
        if self.session.loaded is not None and self.session.loaded.path in gone:
            self.session.loaded = None
            self.show_report()
        self.list_runs()

    @on(WorkFailed)
    def _failed(self, message: WorkFailed) -> None:
        self.set_busy("")
        facts = FailureFacts(sentence=message.sentence, advice=message.advice, log_tail=message.details)
        self.push_screen(Failed(message.title, facts))

    @on(Worker.StateChanged)
    def _worker_changed(self, event: Worker.StateChanged) -> None:
        """An exception of the app's workers that nobody foresaw; panes forward theirs as the same message."""
        error = event.worker.error
        if event.state is WorkerState.ERROR and error is not None:
            self.post_message(unexpected(event.worker.description, error))

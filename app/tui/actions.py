"""The general keys: help, explain, copy, export, samples, open, theme, maximise, reload; and the palette."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from costlab.app.analysis.views import RunReport
from costlab.app.tui import work as slow
from costlab.app.tui.dialogs.ask import Ask, PathSuggester
from costlab.app.tui.dialogs.confirm import Confirm
from costlab.app.tui.dialogs.explain import Explain
from costlab.app.tui.dialogs.export import Export, ExportTo
from costlab.app.tui.dialogs.help import Help, key_lines
from costlab.app.tui.dialogs.pick import Pick
from costlab.app.tui.messages import ExportDone, ExportExists, PairLoaded, WorkFailed
from costlab.app.tui.panes.fusion import FusionPane
from costlab.app.tui.panes.overview import OverviewPane
from costlab.app.tui.panes.registry import PANES
from costlab.app.tui.panes.runs import RunsPane
from costlab.app.tui.panes.whatif import WhatIfPane
from costlab.app.tui.recording import Recording


class Actions(Recording):
    """The shell with its general keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "explain", "Explain", id="app.explain"),
        Binding("e", "export", "Export", id="app.export"),
        Binding("y", "copy", "Copy", id="app.copy"),
        Binding("z", "maximise", "Maximise", show=False, id="app.maximise"),
        Binding("o", "open", "Open a run", show=False, id="app.open"),
        Binding("s", "samples", "Samples", show=False, id="app.samples"),
        Binding("t", "theme", "Theme", show=False, id="app.theme"),
        Binding("r", "reload", "Reload", show=False, id="app.reload"),
        Binding("ctrl+p", "command_palette", "Palette", key_display="^p", priority=True, id="app.palette"),
        Binding("question_mark", "help", "Help", key_display="?", id="app.help"),
        Binding("q", "quit", "Quit", id="app.quit"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Pane keys stand back while a dialog is open; figures need an open run."""
        if action in ("explain", "export", "copy") and self.session.report is None:
            return False
        return not (action == "pane" and parameters == ("live",) and self.session.live is None)

    def action_explain(self) -> None:
        """Say where the figure under the cursor, or the pane's figures, come from."""
        pane = self.pane
        pointed, figures = pane.pointed(), pane.figures()
        if pointed is None and not figures:
            self.notify("No figures here", timeout=3)
            return
        self.push_screen(Explain(pane.TITLE, pointed, figures))

    def action_help(self) -> None:
        """Help for the shown pane, and the keys that work now."""
        self.push_screen(Help(self.pane.TITLE, self.pane.HELP or "", key_lines(self.screen)))

    def action_copy(self) -> None:
        """Copy the pane as Markdown."""
        text = self.pane.markdown()
        if not text:
            self.notify("Nothing to copy here", timeout=3)
            return
        self.copy_to_clipboard(text)
        lines = text.count("\n") + 1
        self.notify(f"Copied {lines} lines of Markdown through the terminal (OSC 52); e writes a file", timeout=4)

    def action_maximise(self) -> None:
        """Give the focused widget the whole screen, or take it back."""
        if self.screen.maximized is not None:
            self.screen.minimize()
        elif self.screen.focused is not None:
            self.screen.maximize(self.screen.focused, container=False)

    def action_theme(self) -> None:
        """Choose a theme."""
        self.search_themes()

    def action_reload(self) -> None:
        """Read the open run and the list of runs again."""
        self.list_runs()
        loaded = self.session.loaded
        if loaded is not None:
            self.reopen(loaded)

    def action_open(self) -> None:
        """Ask for a run directory."""
        hint = "A run directory, an id or its first letters. Traces recorded elsewhere: costlab import FILE"
        self.push_screen(Ask("open a run", hint, suggester=PathSuggester()), self._open_typed)

    def _open_typed(self, text: str | None) -> None:
        if text:
            self.open_path(Path(text).expanduser() if "/" in text or text.startswith("~") else text)

    def action_samples(self) -> None:
        """Choose a sample."""
        if not self.session.samples:
            self.notify("No samples in this installation", timeout=4)
            return
        self.push_screen(Pick("samples", "Recorded on other machines.", self.session.samples), self._open_sample)

    def _open_sample(self, name: str | None) -> None:
        if name:
            self.open_sample(name)

    @on(OverviewPane.GoAsked)
    async def _go(self, message: OverviewPane.GoAsked) -> None:
        await self.show_pane(message.pane)
        if message.layer and isinstance(self.pane, FusionPane):
            self.pane.reveal(message.layer)

    @on(OverviewPane.ProveAsked)
    async def _prove(self, message: OverviewPane.ProveAsked) -> None:
        await self.show_pane("whatif")
        if isinstance(self.pane, WhatIfPane):
            self.pane.offer(message.fragment)

    @on(WhatIfPane.Proved)
    def _proved(self) -> None:
        report = self.session.report
        for overview in self.query(OverviewPane):
            if report is not None and overview.report is report:
                overview.fill_findings(report)

    @on(RunsPane.OpenAsked)
    def _open_line(self, message: RunsPane.OpenAsked) -> None:
        if message.row.path is not None:
            self.open_path(message.row.path)
        else:
            self.open_sample(message.row.sample)

    @on(RunsPane.CompareAsked)
    def _compare_asked(self, message: RunsPane.CompareAsked) -> None:
        self.compare(message.first, message.second)

    def compare_marked(self) -> None:
        """Compare the two marked runs."""
        first, second = self.session.marked[:2]
        self.compare(first, second)

    @on(PairLoaded)
    def _pair_loaded(self, message: PairLoaded) -> None:
        from costlab.app.tui.dialogs.comparison import Compare

        self.set_busy("")
        self.push_screen(Compare(message.comparison))

    @on(RunsPane.DeleteAsked)
    def _delete_asked(self, message: RunsPane.DeleteAsked) -> None:
        names = [path.name for path in message.paths]
        what = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
        question = Confirm("delete?", f"{what} and everything in it.", yes="delete", no="keep")
        self.push_screen(question, partial(self._delete_confirmed, message.paths))

    def _delete_confirmed(self, paths: list[Path], yes: bool | None) -> None:
        if yes:
            self.session.marked = [p for p in self.session.marked if p not in paths]
            self.delete_runs(paths)

    def action_export(self) -> None:
        """Write the report to a file."""
        report = self.session.report
        if report is not None:
            self.push_screen(Export(f"costlab-{report.run.id}", self.pane.TITLE), self._export_to)

    def _export_to(self, target: ExportTo | None) -> None:
        report = self.session.report
        if target is None or report is None:
            return
        text = self.pane.markdown() if target.only_pane else ""
        if target.only_pane and not text:
            self.notify("This pane has nothing to export", timeout=4)
            return
        self._export(report, target.form, target.path, overwrite=False, text=text)

    @work(thread=True, exclusive=True, exit_on_error=False, group="export", description="export the report")
    def _export(self, report: RunReport, form: str, path: Path, *, overwrite: bool, text: str = "") -> None:
        try:
            slow.export(report, form, path, overwrite=overwrite, text=text)
        except FileExistsError:
            self.post_message(ExportExists(path, form, text))
        except OSError as error:
            self.post_message(WorkFailed("cannot write the report", f"{path}: {error.strerror}"))
        else:
            self.post_message(ExportDone(path))

    @on(ExportDone)
    def _exported(self, message: ExportDone) -> None:
        self.notify(f"Wrote {message.path.name}", timeout=5)

    @on(ExportExists)
    def _exists(self, message: ExportExists) -> None:
        question = Confirm("the file exists", str(message.path), yes="overwrite it", no="keep it")
        self.push_screen(question, partial(self._overwrite, message))

    def _overwrite(self, message: ExportExists, yes: bool | None) -> None:
        report = self.session.report
        if yes and report is not None:
            self._export(report, message.form, message.path, overwrite=True, text=message.text)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002
        """The palette: what makes sense in the present state."""
        for spec in PANES:
            yield SystemCommand(f"Go to {spec.title}", "Show the pane", partial(self.run_action, f"pane('{spec.id}')"))
        if self.session.recording:
            yield SystemCommand("Live run", "Show the run being recorded", partial(self.run_action, "pane('live')"))
            yield SystemCommand("Cancel the run", "Ask, then end it; it is kept", self.action_cancel_run)
        else:
            yield SystemCommand("New run", "Record a run on this machine", self.action_new_run)
        yield SystemCommand("Open a run", "By path or id", self.action_open)
        for name in self.session.samples:
            yield SystemCommand(f"Open sample {name}", "A run recorded elsewhere", partial(self.open_sample, name))
        if self.session.report is not None:
            yield SystemCommand("Export the report", "Markdown, text or JSON", self.action_export)
            yield SystemCommand("Copy the pane", "As Markdown, through the terminal", self.action_copy)
            yield SystemCommand("Explain the figures", "Where they come from", self.action_explain)
        if len(self.session.marked) == 2:
            yield SystemCommand("Compare the marked runs", "Side by side", self.compare_marked)
        yield SystemCommand("Reload", "Read the run and the list again", self.action_reload)
        yield SystemCommand("Theme", "Choose colours", self.action_theme)
        yield SystemCommand("Help", "Help for this pane", self.action_help)
        yield SystemCommand("Quit", "Leave costlab", self.action_quit)

"""The frame: header, pane bar, panes, key line, themes. Panes are built on their first visit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher

from costlab.app import figures as fmt
from costlab.app.tui.cells import EMPTY, Line, Span, line, run_status
from costlab.app.tui.live import LiveRun
from costlab.app.tui.panes.base import Pane
from costlab.app.tui.panes.live import LivePane, clock_text
from costlab.app.tui.panes.registry import PANES, key_of
from costlab.app.tui.session import Session
from costlab.app.tui.themes import DARK, OWN_THEMES, role_defaults
from costlab.app.tui.widgets.chrome import KeyLine, PaneBar, RunHeader, Tab

LIVE = "live"
TICK_S = 1.0  # how often the pane bar follows an active run


class Shell(App[int]):
    """Everything around the panes."""

    CSS_PATH = "costlab.tcss"
    TITLE = "costlab"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-normal"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall"), (48, "-very-tall")]  # noqa: RUF012
    ALLOW_IN_MAXIMIZED_VIEW = "RunHeader,PaneBar,KeyLine,.-textual-system"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key_of(i), f"pane('{p.id}')", p.title, show=False, id=f"pane.{p.id}") for i, p in enumerate(PANES)),
        Binding("l", "pane('live')", "Live run", show=False, id="pane.live"),
    ]

    def __init__(self, *, theme: str | None = None, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.session = Session(clock=clock)
        self.live_pane = LivePane(self.session)
        self.busy = ""
        self._wanted_theme = theme or DARK
        for own in OWN_THEMES:
            self.register_theme(own)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our roles for themes that do not define them."""
        return role_defaults(self.current_theme)

    def compose(self) -> ComposeResult:
        """Header, pane bar, panes, keys."""
        yield RunHeader(id="run-header")
        yield PaneBar(id="pane-bar")
        with ContentSwitcher(id="panes"):
            yield self.live_pane
        yield KeyLine(id="key-line")

    async def on_mount(self) -> None:
        """First paint: the overview, empty or not."""
        self.theme = self._wanted_theme if self._wanted_theme in self.available_themes else DARK
        await self.show_pane(PANES[0].id)
        self.set_interval(TICK_S, self._tick)
        self.opened()

    def _tick(self) -> None:
        if self.session.recording:
            self.refresh_chrome()

    def opened(self) -> None:
        """Called once the first pane is there."""

    @property
    def switcher(self) -> ContentSwitcher:
        """Holds the panes."""
        return self.screen_stack[0].query_one("#panes", ContentSwitcher)

    @property
    def pane(self) -> Pane:
        """The pane that is shown."""
        shown = self.switcher.visible_content
        assert isinstance(shown, Pane)
        return shown

    async def action_pane(self, name: str) -> None:
        """Show a pane."""
        await self.show_pane(name)

    async def show_pane(self, name: str) -> None:
        """Show a pane, building it on the first visit."""
        switcher = self.switcher
        if name != LIVE and not switcher.query_children(f"#{name}"):
            spec = next(p for p in PANES if p.id == name)
            pane = spec.load(self.session)
            await switcher.add_content(pane)
            pane.show(self.session.report)
        self.screen_stack[0].minimize()
        switcher.current = name
        self.live_pane.redraw()
        self.pane.take_focus()
        self.refresh_chrome()

    @on(PaneBar.Picked)
    async def _picked(self, message: PaneBar.Picked) -> None:
        await self.show_pane(message.pane)

    @property
    def panes(self) -> Sequence[Pane]:
        """The panes built so far."""
        return [child for child in self.switcher.children if isinstance(child, Pane)]

    def show_report(self) -> None:
        """Tell every pane about the open run."""
        for pane in self.panes:
            pane.show(self.session.report)
        self.pane.take_focus()
        self.refresh_chrome()

    def refresh_chrome(self) -> None:
        """Redraw header and pane bar."""
        base = self.screen_stack[0]
        header, tabs = base.query_one(RunHeader), base.query_one(PaneBar)
        header.left, header.right = self.header_left(), self.header_right()
        tabs.tabs = self._tabs()
        tabs.active = self.switcher.current or ""

    def _tabs(self) -> tuple[Tab, ...]:
        tabs = [Tab(p.id, key_of(i), p.title, p.short) for i, p in enumerate(PANES)]
        if self.session.live is not None:
            long, short = live_labels(self.session.live)
            tabs.append(Tab(LIVE, "l", long, short, lively=self.session.recording))
        return tuple(tabs)

    def header_left(self) -> Line:
        """The open run's title, or what is being read."""
        loaded = self.session.loaded
        if self.busy:
            return line((self.busy, "muted"))
        return line(loaded.report.run.title) if loaded else line(("no run open", "muted"))

    def header_right(self) -> Line:
        """When it was recorded, how it ended, what an hour costs."""
        loaded = self.session.loaded
        if loaded is None:
            return EMPTY
        run, cost = loaded.report.run, loaded.report.cost
        spans: list[Span] = [(f"{local_time(run.created, self.session.clock())}  ", "muted"), *run_status(run.status)]
        if loaded.sample:
            spans.insert(0, ("sample  ", "muted"))
        price = cost.price_per_gpu_hour if cost else None
        if price is not None and self.size.width >= 110:
            spans.append((f"  {fmt.figure(price)}", "muted"))
        return line(*spans)


def live_labels(live: LiveRun) -> tuple[str, str]:
    """The live run's tab, long and short: how far the phase is while it runs, its state after."""
    if not live.active:
        return f"Live {live.state}", "Live"
    step = live.progress
    if step is None or step.total <= 0:
        return f"Live {live.phase or live.state}", "Live"
    left = f" {clock_text(step.eta_s)}" if step.eta_s is not None else ""
    return f"Live {live.phase} {step.done}/{step.total}{left}", f"Live {step.done}/{step.total}"


def local_time(created: str, now: float) -> str:
    """An ISO time in the local zone, without what it shares with `now`: "14:02", "Nov 28 14:02", "2025-11-28"."""
    try:
        when = datetime.fromisoformat(created).astimezone()
    except ValueError:
        return created
    today = datetime.fromtimestamp(now).astimezone().date()
    if when.date() == today:
        return f"{when:%H:%M}"
    return f"{when:%b %d %H:%M}" if when.year == today.year else f"{when:%Y-%m-%d}"

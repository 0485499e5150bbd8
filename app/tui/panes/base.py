"""What every pane has in common: it shows one report, explains its figures, and says what to press when it is empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widget import Widget
from textual.widgets import Input

from costlab.app.analysis.views import Figure, RunReport, Source
from costlab.app.text import md
from costlab.app.tui.cells import EMPTY, Line, line
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Table

NO_RUN: tuple[Line, ...] = (
    line(("No run is open.", "strong")),
    EMPTY,
    line(("n", "accent"), "  record a run on this machine"),
    line(("s", "accent"), "  open a sample recorded on other machines"),
    line(("o", "accent"), "  open a run directory by its path"),
    line(("r", "accent"), "  look again for stored runs"),
)


class Body(VerticalScroll, inherit_bindings=False):
    """Scrolls a pane that is taller than the terminal; arrow keys belong to what is inside."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d", "page_down", "Scroll the pane down", show=False, id="pane.scroll-down"),
        Binding("ctrl+u", "page_up", "Scroll the pane up", show=False, id="pane.scroll-up"),
    ]


class Pane(Container):
    """A pane. Subclasses give `body`, `fill`, and `lacks` when a run may have nothing for them."""

    SCOPED_CSS = False  # the rules below look at the screen's size classes
    TITLE: ClassVar[str] = ""
    HELP: ClassVar[str | None] = ""
    FOCUS: ClassVar[str] = ""  # selector of the widget that takes the focus

    DEFAULT_CSS = """
    Pane { height: 1fr; width: 1fr; padding: 1 1 0 1; }
    Pane > #pane-empty { margin: 1 2; height: 1fr; display: none; }
    Pane.-empty > #pane-empty { display: block; }
    Pane.-empty > #pane-body { display: none; }
    Pane > #pane-body { height: 1fr; scrollbar-size-vertical: 1; }
    .-short Pane { padding: 0 1; }
    Pane .heading { color: $muted; text-style: bold; height: 1; }
    """

    def __init__(self, session: Session, *, id: str) -> None:
        super().__init__(id=id)
        self.session = session
        self.report: RunReport | None = None

    def compose(self) -> ComposeResult:
        """The empty state and the body; one of them is displayed."""
        yield Lines(NO_RUN, id="pane-empty", classes="wrap")
        with Body(id="pane-body", can_focus=False):
            yield from self.body()

    def body(self) -> ComposeResult:
        """The widgets of the pane."""
        yield from ()

    def show(self, report: RunReport | None) -> None:
        """Show `report`, or the empty state."""
        self.report = report
        reason = NO_RUN if report is None else self.lacks(report)
        self.set_class(bool(reason), "-empty")
        if reason:
            self.query_one("#pane-empty", Lines).show(reason)
        elif report is not None:
            self.fill(report)

    def store_changed(self) -> None:
        """The list of stored runs, samples or marks changed."""

    def lacks(self, report: RunReport) -> Sequence[Line]:  # noqa: ARG002
        """Why this run has nothing for this pane, and what to press; nothing when it has."""
        return ()

    def fill(self, report: RunReport) -> None:
        """Put the report's figures into the widgets."""

    def figures(self) -> Sequence[Named]:
        """All headline figures of the pane, for the explanation."""
        return [named for strip in self.query(FigureStrip) for named in strip.items]

    def pointed(self) -> Named | None:
        """The figure under the cursor, None when the cursor is on none."""
        focused = self.screen.focused
        if isinstance(focused, FigureStrip) and focused in self.query(FigureStrip):
            return focused.current
        return None

    def markdown(self) -> str:
        """What the pane shows as Markdown, for the clipboard; "" when there is nothing to copy."""
        if self.has_class("-empty"):
            return ""
        shown = [w for w in self.walk_children() if isinstance(w, Table | FigureStrip | Lines) and _visible(w)]
        parts = [text for text in (widget.markdown() for widget in shown) if text]
        return "\n\n".join([f"## {md(self.TITLE)}", *parts]) + "\n" if parts else ""

    def take_focus(self) -> None:
        """Focus the pane's main widget if it is displayed."""
        if self.FOCUS and not self.has_class("-empty"):
            self.query_one(self.FOCUS).focus(scroll_visible=False)
        else:
            self.screen.set_focus(None)


class SearchPane(Pane):
    """A pane with a search line, `Input(id="search")`, displayed while it is typed in. Subclasses give `search`."""

    DEFAULT_CSS = """
    SearchPane #search { display: none; background: $cursor-line; }
    SearchPane #search.-on { display: block; }
    """

    def search(self, text: str) -> None:
        """Show what has this text in it."""
        raise NotImplementedError

    def action_search(self) -> None:
        """Show the search line."""
        box = self.query_one("#search", Input)
        box.add_class("-on")
        box.focus()

    @on(Input.Changed, "#search")
    def _typed(self, event: Input.Changed) -> None:
        self.search(event.value)

    @on(Input.Submitted, "#search")
    def _submitted(self) -> None:
        self.query_one("#search").remove_class("-on")
        self.take_focus()


def _visible(widget: Widget) -> bool:
    return all(node.display for node in widget.ancestors_with_self if isinstance(node, Widget))


def computed(name: str, value: float | None, unit: str, how: str, source: Source = "derived") -> Named:
    """A figure made of a view model's plain number and the view model's own words on how it was obtained."""
    return Named(name, Figure(value=value, unit=unit, source=source, how=how))


def lacking(what: str, *more: Line) -> tuple[Line, ...]:
    """Empty state of a pane whose run has no such data."""
    return (line((what, "strong")), EMPTY, *more)

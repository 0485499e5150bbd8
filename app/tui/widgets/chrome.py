"""The three fixed lines: what run this is, which pane, which keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from costlab.app.tui.cells import EMPTY, Line, Span, crop, fit, length, line
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned

if TYPE_CHECKING:
    from textual.screen import Screen


class RunHeader(Toned):
    """One line: the product, the run's title, and at the right how it stands."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = "RunHeader { height: 1; background: $panel;" + TONE_CSS + "}"

    left: reactive[Line] = reactive(EMPTY)
    right: reactive[Line] = reactive(EMPTY)

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        """The line; the title gives way to the state at the right."""
        width = self.size.width
        brand: Line = ((" costlab ", "accent"),)
        room = width - length(brand) - length(self.right) - 3
        middle = fit(self.left, max(room, 0))
        spans = (*brand, (" ", ""), *middle, (" ", ""), *self.right, (" ", ""))
        return self.strip_of(fit(spans, width), self.rich_style)


@dataclass(frozen=True)
class Tab:
    """One entry of the pane bar; `short` is shown when there is no room for `title`."""

    id: str
    key: str
    title: str
    short: str
    lively: bool = False


class PaneBar(Toned):
    """The panes with their keys; the active one is marked by brackets of space and reverse colour."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES | {"pane-bar--active"}
    DEFAULT_CSS = (
        "PaneBar { height: 1; background: $surface; color: $muted;"
        + TONE_CSS
        + "& > .pane-bar--active { background: $accent-text; color: $on-accent; text-style: bold; } }"
    )

    tabs: reactive[tuple[Tab, ...]] = reactive(())
    active: reactive[str] = reactive("")

    class Picked(Message):
        """A pane was clicked."""

        def __init__(self, pane: str) -> None:
            self.pane = pane
            super().__init__()

    def _labels(self) -> list[tuple[Tab, str]]:
        """Labels that fit: all long, else short except the active one, else all short, else keys only."""
        wide = [(t, t.title) for t in self.tabs]
        short = [(t, t.title if t.id == self.active else t.short) for t in self.tabs]
        all_short = [(t, t.short) for t in self.tabs]
        bare = [(t, t.title if t.id == self.active else "") for t in self.tabs]
        return next((c for c in (wide, short, all_short) if _total(c) <= self.size.width), bare)

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        """The bar."""
        base = self.rich_style
        strips = []
        for tab, label in self._labels():
            text = f" {tab.key} {label} " if label else f" {tab.key} "
            if tab.id == self.active:
                strips.append(self.strip_of(line(text), base + self._active_style()))
            else:
                rest = (label + " ", "accent" if tab.lively else "")
                spans: tuple[Span, ...] = ((f" {tab.key} ", "faint"), rest)  # type: ignore[assignment]
                strips.append(self.strip_of(spans, base))
        return Strip.join(strips).adjust_cell_length(self.size.width, base)

    def _active_style(self) -> Style:
        return self.get_component_rich_style("pane-bar--active", partial=True)

    def on_click(self, event: events.Click) -> None:
        """Pick the pane under the pointer."""
        left = 0
        for tab, label in self._labels():
            left += _label_width(tab, label)
            if event.x < left:
                self.post_message(self.Picked(tab.id))
                return


def _label_width(tab: Tab, label: str) -> int:
    return cell_len(f" {tab.key} {label} ")


def _total(labels: Sequence[tuple[Tab, str]]) -> int:
    return sum(_label_width(tab, label) for tab, label in labels)


@dataclass(frozen=True)
class KeyHint:
    """A key shown in the key line."""

    key: str  # as displayed
    text: str
    action: str
    press: str  # as Textual names it


class KeyLine(Toned):
    """The keys of the focused pane first, then the general ones, as many as fit; `?` always fits."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES
    DEFAULT_CSS = "KeyLine { height: 1; dock: bottom; background: $panel;" + TONE_CSS + "}"

    hints: reactive[tuple[KeyHint, ...]] = reactive(())

    def on_mount(self) -> None:
        """Follow the focus."""
        self.screen.bindings_updated_signal.subscribe(self, self._collect)
        self._collect(self.screen)

    def _collect(self, screen: Screen[object]) -> None:
        """Read the shown bindings of the focused widget and its ancestors, nearest first."""
        if not self.is_attached or screen is not self.screen:
            return
        found: dict[str, KeyHint] = {}
        for _, binding, enabled, _ in screen.active_bindings.values():
            if binding.show and enabled and binding.action not in found:
                key = self.app.get_key_display(binding)
                found[binding.action] = KeyHint(key, binding.description, binding.action, binding.key)
        help_last = sorted(found.values(), key=lambda h: h.action.endswith("help"))
        self.hints = tuple(help_last)

    def _fitting(self) -> list[KeyHint]:
        if not self.hints:
            return []
        *others, last = self.hints
        room = self.size.width - _hint_width(last)
        kept = []
        for hint in others:
            if _hint_width(hint) > room:
                continue
            kept.append(hint)
            room -= _hint_width(hint)
        return [*kept, last]

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        """The line."""
        spans: list[Span] = []
        for hint in self._fitting():
            spans += [(f" {hint.key}", "accent"), (f" {hint.text} ", "muted")]
        return self.strip_of(fit(crop(tuple(spans), self.size.width), self.size.width), self.rich_style)

    def on_click(self, event: events.Click) -> None:
        """Press the key under the pointer."""
        left = 0
        for hint in self._fitting():
            left += _hint_width(hint)
            if event.x < left:
                self.app.simulate_key(hint.press)
                return


def _hint_width(hint: KeyHint) -> int:
    return cell_len(f" {hint.key} {hint.text} ")

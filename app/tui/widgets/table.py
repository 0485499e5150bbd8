"""A table that draws only the lines on screen, so a million rows cost what twenty do.

Textual's own DataTable measures every row first (42 s on 100 000); here columns have fixed or flexible widths, and a
cell is drawn when its line becomes visible. Columns with the highest `priority` number go first when it gets narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from costlab.app.text import md
from costlab.app.tui.cells import Align, Line, fit, line, text_of
from costlab.app.tui.widgets.toned import TONE_CLASSES, TONE_CSS, Toned

R = TypeVar("R")
COPIED_ROWS = 500
WIDE = 400  # cells: nothing is shortened when copied
GAP = 2
GUTTER = 1


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column: `draw` gets the row and the width in cells."""

    key: str
    title: str
    draw: Callable[[R, int], Line]
    width: int
    align: Align = "left"
    flex: int = 0
    priority: int = 0
    max_width: int = 1000
    drawn: bool = False  # a bar, which has no text to copy


def col(
    key: str,
    title: str,
    text: Callable[[R], Line],
    width: int,
    align: Align = "left",
    *,
    flex: int = 0,
    priority: int = 0,
    max_width: int = 1000,
) -> Column[R]:
    """A column whose text does not depend on its width."""

    def draw(row: R, _width: int) -> Line:
        return text(row)

    return Column(key, title, draw, width, align, flex, priority, max_width)


def layout(columns: Sequence[Column[Any]], width: int) -> list[tuple[Column[Any], int]]:
    """Columns that fit in `width` cells with the width of each; the most important ones stay."""
    kept = list(columns)
    while len(kept) > 1 and _minimum(kept) > width:
        worst = max(kept, key=lambda c: c.priority)
        if worst.priority == 0:
            break
        kept.remove(worst)
    spare = width - _minimum(kept)
    return list(zip(kept, _spread(kept, spare), strict=True))


def _minimum(columns: Sequence[Column[Any]]) -> int:
    return GUTTER + sum(c.width for c in columns) + GAP * (len(columns) - 1)


def _spread(columns: Sequence[Column[Any]], spare: int) -> list[int]:
    """Widths after dividing `spare` cells (or taking away, from flexible columns) by the columns' flex."""
    widths = [c.width for c in columns]
    open_ = {i for i, c in enumerate(columns) if c.flex}
    if spare < 0 and open_:
        first = min(open_)
        widths[first] = max(4, widths[first] + spare)
        return widths
    while spare > 0 and open_:
        total = sum(columns[i].flex for i in open_)
        step = {i: max(1, spare * columns[i].flex // total) for i in open_}
        for i, extra in sorted(step.items(), key=lambda item: -columns[item[0]].flex):
            grow = min(extra, spare, columns[i].max_width - widths[i])
            widths[i] += max(grow, 0)
            spare -= max(grow, 0)
        open_ = {i for i in open_ if widths[i] < columns[i].max_width}
    return widths


class Table(ScrollView, Toned, Generic[R], can_focus=True, inherit_bindings=False):
    """Rows under fixed headings with a cursor line."""

    COMPONENT_CLASSES: ClassVar[set[str]] = TONE_CLASSES | {"table--header", "table--cursor", "table--cursor-blurred"}
    DEFAULT_CSS = (
        """
    Table {
        height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; background: $background;
    """
        + TONE_CSS
        + """
        & > .table--header { color: $muted; }
        & > .table--cursor { background: $cursor-line; }
        & > .table--cursor-blurred { background: $background; }
    }
    Table.fit { height: auto; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="table.up"),
        Binding("down,j", "move(1)", "Down", show=False, id="table.down"),
        Binding("pageup", "page(-1)", "Page up", show=False, id="table.page-up"),
        Binding("pagedown", "page(1)", "Page down", show=False, id="table.page-down"),
        Binding("home", "move(-1000000000)", "First", show=False, id="table.first"),
        Binding("end,G", "move(1000000000)", "Last", show=False, id="table.last"),
        Binding("enter", "select", "Select", show=False, id="table.select"),
    ]

    cursor: reactive[int] = reactive(0, repaint=False)

    class Told(Message):
        """What a table tells: handlers are selected by its id."""

        def __init__(self, table: Table[Any]) -> None:
            self.table = table
            super().__init__()

        @property
        def control(self) -> Table[Any]:
            """The table."""
            return self.table

    class OfRow(Told):
        """About one of its rows."""

        def __init__(self, table: Table[Any], row: Any) -> None:
            self.row = row
            super().__init__(table)

    class Moved(OfRow):
        """The cursor is on another row."""

    class Chosen(OfRow):
        """Enter or a click on the cursor's row."""

    class HeadingClicked(Told):
        """A heading was clicked: sort by it."""

        def __init__(self, table: Table[Any], key: str) -> None:
            self.key = key
            super().__init__(table)

    def __init__(
        self, columns: Sequence[Column[R]], *, id: str | None = None, classes: str | None = None, header: bool = True
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._columns: list[Column[R]] = list(columns)
        self._rows: Sequence[R] = []
        self._header = header
        self._mark: tuple[str, bool] | None = None
        self._layout: tuple[int, list[tuple[Column[R], int]]] | None = None
        self._lines: dict[tuple[int, int], Strip] = {}

    @property
    def rows(self) -> Sequence[R]:
        """The rows in display order."""
        return self._rows

    @property
    def row(self) -> R | None:
        """The row under the cursor."""
        return self._rows[self.cursor] if 0 <= self.cursor < len(self._rows) else None

    def set_rows(self, rows: Sequence[R], *, cursor: int | None = None) -> None:
        """Replace the rows; the cursor stays at its index unless given one."""
        self._rows = rows
        self._lines.clear()
        self.virtual_size = Size(0, len(rows) + self._header)
        wanted = self.cursor if cursor is None else cursor
        self.cursor = min(max(wanted, 0), max(len(rows) - 1, 0))
        self.refresh(layout=self.has_class("fit"))
        self.call_after_refresh(self._keep_visible)

    def set_columns(self, columns: Sequence[Column[R]]) -> None:
        """Replace the columns."""
        self._columns = list(columns)
        self._forget()

    def mark_sorted(self, key: str | None, descending: bool = True) -> None:
        """Show an arrow at the heading of column `key`."""
        self._mark = (key, descending) if key else None
        self.refresh()

    def markdown(self) -> str:
        """The rows as a Markdown table, without drawn columns; at most COPIED_ROWS of them."""
        columns = [c for c in self._columns if not c.drawn]
        if not self._rows or not columns:
            return ""
        lines = [[c.title for c in columns], ["--:" if c.align == "right" else "---" for c in columns]]
        rows = [[md(text_of(c.draw(row, WIDE)).strip()) for c in columns] for row in self._rows[:COPIED_ROWS]]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in (*lines, *rows))
        more = len(self._rows) - COPIED_ROWS
        return text + (f"\n\n… and {more:,} more" if more > 0 else "")

    def _forget(self) -> None:
        self._layout = None
        self._lines.clear()
        self.refresh()

    def notify_style_update(self) -> None:
        """Drop lines drawn with another theme's colours."""
        super().notify_style_update()
        self._lines.clear()

    def on_resize(self) -> None:
        """Drop lines drawn for another width."""
        self._forget()
        self._keep_visible()

    def on_focus(self) -> None:
        """The cursor line looks different with focus."""
        self._lines.clear()

    def on_blur(self) -> None:
        """The cursor line looks different without focus."""
        self._lines.clear()

    def _placed(self) -> list[tuple[Column[R], int]]:
        width = self.scrollable_content_region.width
        if self._layout is None or self._layout[0] != width:
            self._layout = (width, layout(self._columns, width))
            self._lines.clear()
        return self._layout[1]

    def render_line(self, y: int) -> Strip:
        """One line of the viewport."""
        width = self.scrollable_content_region.width
        placed = self._placed()
        if self._header and y == 0:
            return self._draw_header(placed, width)
        index = self.scroll_offset.y + y - self._header
        if not 0 <= index < len(self._rows):
            return Strip.blank(width, self.rich_style)
        key = (index, int(index == self.cursor))
        if key not in self._lines:
            self._lines[key] = self._draw_row(index, placed, width)
        return self._lines[key]

    def _draw_header(self, placed: list[tuple[Column[R], int]], width: int) -> Strip:
        style = self.rich_style + self.get_component_rich_style("table--header", partial=True)
        spans: list[tuple[str, Any]] = [(" " * GUTTER, "")]
        for number, (column, size) in enumerate(placed):
            title = column.title + self._arrow(column)
            spans += [(" " * GAP, "")] if number else []
            spans += fit(line(title), size, column.align)
        return self.strip_of(tuple(spans), style).adjust_cell_length(width, style)

    def _arrow(self, column: Column[R]) -> str:
        if self._mark is None or self._mark[0] != column.key:
            return ""
        return "▾" if self._mark[1] else "▴"

    def _draw_row(self, index: int, placed: list[tuple[Column[R], int]], width: int) -> Strip:
        here = index == self.cursor
        style = self._row_style(here)
        spans: list[tuple[str, Any]] = [("▌" if here and self.has_focus else " ", "accent")]
        row = self._rows[index]
        for number, (column, size) in enumerate(placed):
            spans += [(" " * GAP, "")] if number else []
            spans += fit(column.draw(row, size), size, column.align)
        return self.strip_of(tuple(spans), style).adjust_cell_length(width, style)

    def _row_style(self, here: bool) -> Style:
        if not here:
            return self.rich_style
        name = "table--cursor" if self.has_focus else "table--cursor-blurred"
        return self.rich_style + self.get_component_rich_style(name, partial=True)

    def watch_cursor(self, old: int, new: int) -> None:
        """Redraw the two lines and tell the pane."""
        for index in (old, new):
            self._lines.pop((index, 0), None)
            self._lines.pop((index, 1), None)
        self.refresh()
        self._keep_visible()
        if self.is_mounted and self.row is not None:
            self.post_message(self.Moved(self, self.row))

    def _keep_visible(self) -> None:
        page = self.scrollable_content_region.height - self._header
        if page <= 0:
            return
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + page:
            self.scroll_to(y=self.cursor - page + 1, animate=False)

    def _scrolling_ancestor(self) -> Widget | None:
        return next((a for a in self.ancestors if isinstance(a, Widget) and a.allow_vertical_scroll), None)

    def _show_in_ancestor(self) -> None:
        """A table as tall as its rows scrolls with what is around it."""
        if not self.has_focus or self.max_scroll_y > 0:
            return
        box = self._scrolling_ancestor()
        if box is None:
            return
        first = self.cursor == 0
        top = self.region.y - box.region.y + box.scroll_offset.y + (0 if first else self.cursor + self._header)
        box.scroll_to_region(Region(0, top, 1, 2 if first else 1), animate=False, x_axis=False)

    def action_move(self, step: int) -> None:
        """Move the cursor by `step` rows; at the end, go on with what is around the table."""
        before = self.cursor
        if self._rows:
            self.cursor = min(max(before + step, 0), len(self._rows) - 1)
        if self.cursor != before:
            self.call_after_refresh(self._show_in_ancestor)
        elif (box := self._scrolling_ancestor()) is not None:
            box.scroll_relative(y=1 if step > 0 else -1, animate=False)

    def action_page(self, pages: int) -> None:
        """Move the cursor by pages."""
        self.action_move(pages * max(self.scrollable_content_region.height - self._header - 1, 1))

    def action_select(self) -> None:
        """Choose the cursor's row."""
        if self.row is not None:
            self.post_message(self.Chosen(self, self.row))

    def on_click(self, event: events.Click) -> None:
        """Headings sort; a row is selected first and chosen by a second click."""
        if self._header and event.y == 0:
            self._click_heading(event.x)
            return
        index = self.scroll_offset.y + event.y - self._header
        if not 0 <= index < len(self._rows):
            return
        if event.chain > 1:
            self.action_select()
        else:
            self.cursor = index

    def _click_heading(self, x: int) -> None:
        left = GUTTER
        for column, size in self._placed():
            if left <= x < left + size + GAP:
                self.post_message(self.HeadingClicked(self, column.key))
                return
            left += size + GAP

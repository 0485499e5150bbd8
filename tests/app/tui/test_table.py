"""The table: which columns stay, how it moves, what it makes of many rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from costlab.app.tui.cells import Line, line
from costlab.app.tui.themes import COSTLAB_DARK, role_defaults
from costlab.app.tui.widgets.table import GAP, GUTTER, Column, Table, col, layout

COLUMNS: list[Column[int]] = [
    col("name", "name", lambda n: line(f"layer {n}"), 10, flex=1, max_width=30),
    col("ms", "time", lambda n: line(f"{n} ms"), 8, "right"),
    col("note", "note", lambda n: line("x" * n), 12, flex=2, priority=1),
    col("extra", "extra", lambda _: line("[bold]"), 12, priority=2),
]


class TableApp(App[None]):
    """A table and nothing else."""

    def __init__(self, rows: int, columns: list[Column[int]] = COLUMNS) -> None:
        super().__init__()
        self.count, self.columns = rows, columns
        self.events: list[tuple[str, object]] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return role_defaults(COSTLAB_DARK)

    def compose(self) -> ComposeResult:
        yield Table[int](self.columns, id="table")

    def on_mount(self) -> None:
        self.table.set_rows(range(self.count))
        self.table.focus()

    @property
    def table(self) -> Table[int]:
        return self.query_one("#table", Table)

    def on_table_moved(self, message: Table.Moved) -> None:
        self.events.append(("moved", message.row))

    def on_table_chosen(self, message: Table.Chosen) -> None:
        self.events.append(("chosen", message.row))

    def on_table_heading_clicked(self, message: Table.HeadingClicked) -> None:
        self.events.append(("heading", message.key))


@given(st.integers(1, 300))
def test_columns_fit_and_the_least_important_go_first(width: int) -> None:
    placed = layout(COLUMNS, width)
    keys = [column.key for column, _ in placed]
    assert keys[:2] == ["name", "ms"]
    assert keys == [c.key for c in COLUMNS[: len(keys)]]
    used = GUTTER + sum(size for _, size in placed) + GAP * (len(placed) - 1)
    assert used <= max(width, GUTTER + 4 + GAP + 8)
    assert all(size <= column.max_width for column, size in placed)


async def test_moving_choosing_and_clicking() -> None:
    app = TableApp(50)
    async with app.run_test(size=(60, 10)) as pilot:
        await pilot.press("down", "j", "up", "enter", "end")
        assert app.table.row == 49
        assert app.table.scroll_offset.y == 50 + 1 - 10
        await pilot.press("home")
        await pilot.click("#table", offset=(5, 3))
        assert app.table.row == 2
        await pilot.click("#table", offset=(22, 0))
    assert ("chosen", 1) in app.events
    assert ("heading", "ms") in app.events


async def test_names_are_text_not_markup() -> None:
    app = TableApp(3)
    async with app.run_test(size=(80, 6)):
        assert "[bold]" in "".join(segment.text for segment in app.table.render_line(1))


async def test_only_the_rows_on_screen_are_made_of_a_hundred_thousand() -> None:
    made: list[int] = []

    def name(n: int) -> Line:
        made.append(n)
        return line(f"layer {n}")

    app = TableApp(100_000, [col("name", "name", name, 10)])
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end", "home", "end")
        await pilot.pause()
        assert app.table.row == 99_999
    assert 24 < len(made) < 1000


async def test_markdown_of_a_table_escapes_and_says_what_it_leaves_out() -> None:
    app = TableApp(600)
    async with app.run_test(size=(80, 6)):
        text = app.table.markdown()
    assert text.splitlines()[0] == "| name | time | note | extra |"
    assert "\\[bold\\]" in text
    assert text.endswith("… and 100 more")

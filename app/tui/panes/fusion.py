"""Fusion: the rate by layer with its target, what is lost and why; kernels and missed fusions of the layer chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.timer import Timer
from textual.widgets import Input

from costlab.app import figures as fmt
from costlab.app.analysis.views import Figure, FusionView, RunReport
from costlab.app.tui.cells import Line, Tone, bar, crop_start, line, status, status_tone
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.panes.fusion_detail import LayerDetail
from costlab.app.tui.panes.fusion_rows import (
    SORTS,
    STATUSES,
    Filter,
    FusionLine,
    FusionTree,
    LayerIndex,
    Sort,
    causes,
    class_lines,
    next_of,
    within,
)
from costlab.app.tui.panes.fusion_tune import TunePanel
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col

TREE_SHARE = 0.6
REST_S = 0.08
HEADLINE = 4  # lines above the tree
ARROWS = {"open": "▾ ", "closed": "▸ ", "leaf": "  "}
LOST_HOW = "addressable bytes beyond the ideal traffic, per step, as Inductor scheduled them"
SAVES_HOW = "addressable lost bytes at the copy bandwidth measured in this run"


def cause_words(cause: str) -> str:
    """A cause's name as words."""
    return cause.replace("_", " ")


def _label(row: FusionLine, width: int) -> Line:
    indent = "  " * row.depth
    room = width - len(indent) - 2
    tone: Tone = "strong" if row.branch != "leaf" and row.depth == 0 else ""
    return line((indent + ARROWS[row.branch], "faint"), (crop_start(row.label, room), tone))


def _rate_bar(row: FusionLine, width: int) -> Line:
    return bar(row.rate, width, status_tone(row.status), row.target)


def _muted_if_none(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def _bytes(value: int | None) -> Line:
    return line(("·", "faint")) if value == 0 else _muted_if_none(fmt.size(value))


def _time(value: float | None) -> Line:
    return line(("·", "faint")) if value == 0 else _muted_if_none(fmt.ms(value))


def _saves(row: FusionLine) -> Line:
    return line((fmt.ms(row.saves_ms), "strong")) if row.saves_ms else line(("·", "faint"))


COLUMNS: list[Column[FusionLine]] = [
    Column("layer", "layer", _label, 18, flex=3, max_width=60),
    col("status", "", lambda r: status(r.status), 3),
    col("rate", "rate", lambda r: _muted_if_none(fmt.rate(r.rate)), 4, "right"),
    Column("bar", "0 ── target ── 1", _rate_bar, 15, flex=2, priority=3, max_width=40, drawn=True),
    col("ms", "time", lambda r: _time(r.ms), 8, "right", priority=1),
    col("bytes", "bytes", lambda r: _bytes(r.bytes), 8, "right", priority=4),
    col("lost", "lost", lambda r: _bytes(r.lost), 8, "right"),
    col("cause", "main cause", lambda r: line(cause_words(r.cause)), 12, flex=2, priority=2, max_width=34),
    col("saves", "saves", _saves, 8, "right"),
]


class FusionPane(Pane):
    """The fusion tree and the layer under the cursor."""

    TITLE: ClassVar[str] = "Fusion"
    FOCUS: ClassVar[str] = "#layers"
    HELP: ClassVar[str | None] = """\
**Rate** = 1 − addressable lost bytes / actual bytes of the fusible kernels. The mark in the bar is the layer class's
target. **Status**: `● C` complete, `◐ P` partial, `○ B` broken, `? U` unknown.

**Lost** is traffic an edit of the model, its data layout or a setting would remove; **saves** is that traffic at the
copy bandwidth measured in this run. Structural losses (a matrix product or a collective lies between) are not counted.

`→` `←` open and close layers, `enter` shows the layer's missed fusions and kernels, `f` `c` `a` filter, `/` searches,
`s` or a click on a heading sorts, `g` groups by layer class, `x` clears all filters.

`p` shows the candidates of `costlab tune`: what each rewrite was predicted to save and what was measured, kept or
dropped and why. Under *by*, `r` is the roofline policy and `s` the rule on L2 misses and latencies. `b` sets the layers
before and after the rewrites side by side.
"""
    SCOPED_CSS = False  # the rules look at the screen's size classes
    DEFAULT_CSS = """
    FusionPane #pane-body { overflow: hidden; }
    FusionPane #tree { height: 1fr; }
    FusionPane #layers { height: 1fr; }
    FusionPane #filter { height: 1; display: none; }
    FusionPane #filter.-on { display: block; }
    FusionPane #search { display: none; background: $cursor-line; }
    FusionPane #search.-on { display: block; }
    FusionPane LayerDetail { height: 1fr; border-top: hkey $faint; }
    FusionPane.-tune TunePanel { display: block; }
    FusionPane.-tune #tree { display: none; }
    FusionPane.-tune LayerDetail { display: none; }
    .-short FusionPane LayerDetail { display: none; }
    .-short FusionPane.-detail LayerDetail { display: block; height: 1fr; border-top: none; }
    .-short FusionPane.-detail #tree { display: none; }
    .-short FusionPane.-detail #headline { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/", id="fusion.search"),
        Binding("f", "filter_status", "Status", id="fusion.status"),
        Binding("c", "filter_cause", "Cause", id="fusion.cause"),
        Binding("a", "filter_addressable", "Addressable only", show=False, id="fusion.addressable"),
        Binding("s", "sort", "Sort", id="fusion.sort"),
        Binding("g", "group", "By class", id="fusion.group"),
        Binding("x", "clear", "Clear filters", show=False, id="fusion.clear"),
        Binding("p", "candidates", "Plan", id="fusion.candidates"),
        Binding("b", "before_after", "Before and after the rewrites", show=False, id="fusion.before"),
        Binding("right", "unfold", "Open the layer", show=False, id="fusion.open"),
        Binding("left", "fold", "Close the layer", show=False, id="fusion.close"),
        Binding("space", "turn", "Open or close the layer", show=False, id="fusion.toggle"),
        Binding("escape", "back", "Back", show=False, id="fusion.back"),
    ]

    layer_tree: FusionTree = FusionTree()
    wanted: Filter = Filter()
    grouped: bool = False
    _rest: Timer | None = None

    def body(self) -> ComposeResult:
        """Figures, tree, detail."""
        yield FigureStrip(id="headline")
        with Vertical(id="tree"):
            yield Lines(id="filter")
            yield Table[FusionLine](COLUMNS, id="layers")
            yield Input(id="search", compact=True, placeholder="part of a layer, class or cause")
        yield LayerDetail(id="detail")
        yield TunePanel(id="tuning")

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """No fusion section, or one without layers."""
        view = report.fusion
        if view is not None and (view.layers or view.kernels):
            return ()
        why = view.note if view and view.note else "The run has no fusion trace: it was not compiled, or not traced."
        return lacking(why, line(("n", "accent"), "  record one with compile = block"))

    @property
    def view(self) -> FusionView:
        """The open run's fusion view."""
        assert self.report is not None and self.report.fusion is not None
        return self.report.fusion

    def fill(self, report: RunReport) -> None:  # noqa: ARG002
        """Show the run."""
        view = self.view
        self.layer_tree = FusionTree.of(view)
        self.wanted, self.grouped = Filter(), False
        self.query_one("#headline", FigureStrip).show(headline(view))
        self.query_one("#tuning", TunePanel).show(view.tuning)
        self.query_one("#detail", LayerDetail).index = LayerIndex(view)
        self.refill(top=True)

    def refill(self, *, top: bool = False, keep: str | None = None) -> None:
        """Show the lines again; the cursor stays on the layer `keep`."""
        lines = class_lines(self.view.classes) if self.grouped else self.layer_tree.lines(self.wanted)
        at = next((i for i, row in enumerate(lines) if row.path == keep), None) if keep is not None else None
        table = self.query_one("#layers", Table)
        table.set_rows(lines, cursor=0 if top else at)
        table.mark_sorted(None if self.wanted.sort == "tree" else self.wanted.sort, self.wanted.sort != "rate")
        self._show_filter(len(lines))
        self._share_height(len(lines))
        self._show_detail()

    def _share_height(self, lines: int) -> None:
        """The tree takes what it needs up to TREE_SHARE of the pane, the detail takes the rest."""
        most = int((self.size.height - HEADLINE) * TREE_SHARE)
        wanted = lines + 1 + self.query_one("#filter").has_class("-on")
        alone = self.screen.has_class("-short")
        self.query_one("#tree").styles.height = "1fr" if alone else max(min(wanted, most), 6)

    def on_resize(self) -> None:
        """Share the height again."""
        self._share_height(len(self.query_one("#layers", Table).rows))

    def reveal(self, layer: str) -> None:
        """Open the tree down to `layer` and put the cursor on the closest line."""
        around = [row.path for row in self.view.layers if row.path and within(layer, row.path)]
        self.layer_tree.opened |= {"", *around}
        self.wanted, self.grouped = Filter(), False
        self.refill(keep=around[-1] if around else "")

    def _show_filter(self, count: int) -> None:
        words = self.wanted.words + (" · by layer class" if self.grouped else "")
        box = self.query_one("#filter", Lines)
        box.set_class(bool(words), "-on")
        noun = "class" if self.grouped else "layer"
        plural = "" if count == 1 else "es" if self.grouped else "s"
        box.show([line((f" {fmt.count(count)} {noun}{plural}  ", "strong"), (words.strip(" ·"), "accent"))])

    def _show_detail(self) -> None:
        row = self.query_one("#layers", Table).row
        if isinstance(row, FusionLine):
            self.query_one("#detail", LayerDetail).show(row, self.grouped)

    @on(Table.Moved, "#layers")
    def _moved(self) -> None:
        """The detail follows once the cursor rests, so that a held key stays smooth."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, self._show_detail)

    @on(Table.Chosen, "#layers")
    def _chosen(self) -> None:
        self._show_detail()
        self.add_class("-detail")
        self.call_after_refresh(self.query_one("#detail", LayerDetail).take_focus)

    @on(Table.HeadingClicked, "#layers")
    def _heading(self, event: Table.HeadingClicked) -> None:
        sort: Sort = event.key if event.key in SORTS else "tree"
        self.change(replace(self.wanted, sort=sort if sort != self.wanted.sort else "tree"))

    def change(self, wanted: Filter) -> None:
        """Apply a filter, leaving the grouping."""
        self.wanted, self.grouped = wanted, False
        self.refill(top=True)

    def action_back(self) -> None:
        """From the tuning or the detail to the tree, from a filter to all."""
        if self.has_class("-tune"):
            self.remove_class("-tune")
            self.take_focus()
        elif self.has_class("-detail"):
            self.remove_class("-detail")
            self.take_focus()
        elif self.wanted.flat or self.grouped:
            self.change(Filter())

    def action_sort(self) -> None:
        """Next order."""
        order = SORTS[(SORTS.index(self.wanted.sort) + 1) % len(SORTS)]
        self.change(replace(self.wanted, sort=order))

    def action_filter_status(self) -> None:
        """Next status."""
        chosen = next_of(STATUSES, self.wanted.status)
        self.change(replace(self.wanted, status=chosen))

    def action_filter_cause(self) -> None:
        """Next cause."""
        names = ["", *causes(self.view.layers)]
        self.change(replace(self.wanted, cause=next_of(names, self.wanted.cause)))

    def action_filter_addressable(self) -> None:
        """Only layers that lose something an edit can win back."""
        self.change(replace(self.wanted, addressable=not self.wanted.addressable))

    def action_group(self) -> None:
        """By class and back."""
        self.grouped = not self.grouped
        self.refill(top=True)

    def action_candidates(self) -> None:
        """The candidates of `costlab tune`, and back."""
        self._show_tuning(layers=False)

    def action_before_after(self) -> None:
        """The layers before and after the rewrites, and back."""
        self._show_tuning(layers=True)

    def _show_tuning(self, *, layers: bool) -> None:
        panel = self.query_one("#tuning", TunePanel)
        if self.has_class("-tune") and panel.has_class("-layers") == layers:
            self.action_back()
            return
        self.add_class("-tune")
        panel.show_layers(self.view.tuning, layers)
        self.call_after_refresh(panel.take_focus)

    def action_clear(self) -> None:
        """No filter."""
        self.change(Filter())

    def _current(self) -> FusionLine | None:
        row = self.query_one("#layers", Table).row
        return row if isinstance(row, FusionLine) and not self.wanted.flat and not self.grouped else None

    def action_unfold(self) -> None:
        """Open the layer, or go into it."""
        row = self._current()
        if row is None:
            return
        if row.branch == "closed":
            self.layer_tree.toggle(row.path, True)
            self.refill(keep=row.path)
        elif row.branch == "open":
            self.query_one("#layers", Table).action_move(1)

    def action_fold(self) -> None:
        """Close the layer, or go to the one around it."""
        row = self._current()
        if row is None:
            return
        if row.branch == "open":
            self.layer_tree.toggle(row.path, False)
            self.refill(keep=row.path)
        elif (parent := self.layer_tree.parent_of(row.path)) is not None:
            self.refill(keep=parent)

    def action_turn(self) -> None:
        """Open or close."""
        row = self._current()
        if row is not None and row.branch != "leaf":
            self.layer_tree.toggle(row.path)
            self.refill(keep=row.path)

    def action_search(self) -> None:
        """Show the search line."""
        box = self.query_one("#search", Input)
        box.add_class("-on")
        box.focus()

    @on(Input.Changed, "#search")
    def _typed(self, event: Input.Changed) -> None:
        self.change(replace(self.wanted, text=event.value))

    @on(Input.Submitted, "#search")
    def _submitted(self) -> None:
        self.query_one("#search").remove_class("-on")
        self.take_focus()

    def pointed(self) -> Named | None:
        """A headline figure or the layer's saving."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, FusionLine):
            row = table.row
            name = f"saves: {row.path or 'model'}"
            return computed(name, row.saves_ms, "ms", f"{SAVES_HOW}; lost: {fmt.size(row.lost)}", "modelled")
        return super().pointed()


def headline(view: FusionView) -> list[Named]:
    """Rate, target, what is lost, what it would save, how much of the kernel time is traced."""
    found: list[Named] = []
    if view.rate is not None:
        found.append(Named("fusion rate", view.rate, f"{fmt.rate(view.rate.value)} {_status_text(view)}", "accent"))
    if view.target is not None:
        found.append(Named("target", Figure(value=view.target, unit="rate", source="quoted", how="targets.toml")))
    root = next((row for row in view.layers if row.depth == 0), None)
    if root is not None:
        found.append(computed("lost", root.lost, "B", LOST_HOW))
        found.append(computed("saves", root.saves_ms, "ms", SAVES_HOW, "modelled"))
    if view.strict_rate is not None:
        how = "as the rate, structural losses counted too"
        found.append(computed("strict rate", view.strict_rate, "rate", how))
    if view.quality is not None:
        found.append(Named("trace quality", view.quality))
    return found


def _status_text(view: FusionView) -> str:
    return "".join(text for text, _ in status(view.status))

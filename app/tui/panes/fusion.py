"""Fusion: the rate by layer with its target, what is lost and why; kernels and missed fusions of the layer chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Input
from textual.worker import Worker, WorkerState, get_current_worker

from costlab.app import figures as fmt
from costlab.app.analysis.views import Figure, FusionView, KernelView, PatternView, RunReport, Source
from costlab.app.store import StoreError
from costlab.app.tui.cells import Line, Tone, bar, crop_start, line, status, status_tone, text_of
from costlab.app.tui.dialogs.base import Message as Reading
from costlab.app.tui.messages import WorkFailed, unexpected
from costlab.app.tui.panes.base import SearchPane, computed, lacking
from costlab.app.tui.panes.fusion_code import CodePanel, Generated, KernelKey, keys_of, read_code
from costlab.app.tui.panes.fusion_detail import LayerDetail, miss_lines
from costlab.app.tui.panes.fusion_patterns import COST_HOW, PatternPanel
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
GAP_HOW = "bytes that must go for the rate to reach the class's target, at the copy bandwidth measured in this run"
MODES = ("-tune", "-code", "-patterns")  # what takes the place of tree and detail
OF_TREE = {
    "search", "filter_status", "filter_cause", "filter_addressable", "sort", "group", "clear", "unfold", "fold", "turn",
}  # fmt: skip


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


def class_columns(currency: str) -> list[Column[FusionLine]]:
    """Of layer classes: the gap to the target in time and money in place of the cause and the bytes."""
    kept = [c for c in COLUMNS if c.key not in ("cause", "bytes")]

    def money(row: FusionLine) -> Line:
        return _muted_if_none(fmt.MISSING if row.gap_run_money is None else fmt.money(row.gap_run_money, currency))

    gap: Column[FusionLine] = col("gap", "gap", lambda r: _time(r.gap_ms), 8, "right")
    return [*kept, gap, col("money", "gap, run", money, 9, "right")]


class FusionPane(SearchPane):
    """The fusion tree and the layer under the cursor."""

    TITLE: ClassVar[str] = "Fusion"
    FOCUS: ClassVar[str] = "#layers"
    HELP: ClassVar[str | None] = """\
**Rate** = 1 − addressable lost bytes / actual bytes of the fusible kernels. The mark in the bar is the layer class's
target. **Status**: `● C` complete, `◐ P` partial, `○ B` broken, `? U` unknown.

**Lost** is traffic an edit of the model, its data layout or a setting would remove; **saves** is that traffic at the
copy bandwidth measured in this run. Structural losses (a matrix product or a collective lies between) are not counted.

`→` `←` open and close layers, `enter` shows the layer's missed fusions and kernels, `f` `c` `a` filter, `/` searches,
`s` or a click on a heading sorts, `x` clears all filters. `g` groups by layer class: **gap** is what reaching the
class's target would save a step, and in money over the whole run; `enter` shows the layers of a class.

`v` shows the code that Inductor generated for the kernel under the cursor, or for the slowest of the layer; `[` `]` go
to the layer's other kernels. In the detail, `enter` shows a missed fusion in full, or a kernel's code. `d` lists the
anti-patterns found in the model: source line, layer, cost a step and how it is known, and what mends them; `enter` goes
to the layer.

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
    FusionPane LayerDetail { height: 1fr; border-top: hkey $faint; }
    FusionPane.-tune TunePanel, FusionPane.-code CodePanel, FusionPane.-patterns PatternPanel { display: block; }
    FusionPane.-tune #tree, FusionPane.-code #tree, FusionPane.-patterns #tree { display: none; }
    FusionPane.-code #headline { display: none; }
    .-short FusionPane LayerDetail { display: none; }
    .-short FusionPane.-detail LayerDetail { display: block; height: 1fr; border-top: none; }
    .-short FusionPane.-detail #tree { display: none; }
    .-short FusionPane.-detail #headline { display: none; }
    .-short FusionPane.-patterns #headline { display: none; }
    FusionPane.-tune LayerDetail, FusionPane.-code LayerDetail, FusionPane.-patterns LayerDetail { display: none; }
    .-short FusionPane.-tune LayerDetail, .-short FusionPane.-code LayerDetail { display: none; }
    .-short FusionPane.-patterns LayerDetail { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Find", key_display="/", id="fusion.search"),
        Binding("f", "filter_status", "Status", id="fusion.status"),
        Binding("c", "filter_cause", "Cause", id="fusion.cause"),
        Binding("a", "filter_addressable", "Addressable only", show=False, id="fusion.addressable"),
        Binding("s", "sort", "Sort", id="fusion.sort"),
        Binding("g", "group", "Class", id="fusion.group"),
        Binding("x", "clear", "Clear filters", show=False, id="fusion.clear"),
        Binding("v", "code", "Code", id="fusion.code"),
        Binding("d", "patterns", "Patterns", id="fusion.patterns"),
        Binding("p", "candidates", "Plan", id="fusion.candidates"),
        Binding("b", "before_after", "Before and after the rewrites", show=False, id="fusion.before"),
        Binding("right", "unfold", "Open the layer", show=False, id="fusion.open"),
        Binding("left", "fold", "Close the layer", show=False, id="fusion.close"),
        Binding("space", "turn", "Open or close the layer", show=False, id="fusion.toggle"),
        Binding("left_square_bracket", "turn_code(-1)", "Previous", id="fusion.code-previous"),
        Binding("right_square_bracket", "turn_code(1)", "Next kernel", id="fusion.code-next"),
        Binding("escape", "back", "Back", show=False, id="fusion.back"),
    ]

    layer_tree: FusionTree = FusionTree()
    wanted: Filter = Filter()
    grouped: bool = False
    _rest: Timer | None = None

    class CodeRead(Message):
        """The sources of a layer's kernels were read."""

        def __init__(self, report: RunReport, found: Sequence[Generated], wanted: KernelKey | None) -> None:
            self.report = report
            self.found = found
            self.wanted = wanted
            super().__init__()

    def body(self) -> ComposeResult:
        """Figures, tree, detail."""
        yield FigureStrip(id="headline")
        with Vertical(id="tree"):
            yield Lines(id="filter")
            yield Table[FusionLine](COLUMNS, id="layers")
            yield Input(id="search", compact=True, placeholder="part of a layer, class or cause")
        yield LayerDetail(id="detail")
        yield TunePanel(id="tuning")
        yield CodePanel(id="generated")
        yield PatternPanel(id="antipatterns")

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
        self._take_over("")
        self.query_one("#tuning", TunePanel).show(view.tuning)
        self.query_one("#antipatterns", PatternPanel).show(view.patterns)
        self.query_one("#detail", LayerDetail).index = LayerIndex(view)
        self.refill(top=True)

    def refill(self, *, top: bool = False, keep: str | None = None) -> None:
        """Show the lines again; the cursor stays on the layer `keep`."""
        lines = class_lines(self.view.classes) if self.grouped else self.layer_tree.lines(self.wanted)
        at = next((i for i, row in enumerate(lines) if row.path == keep), None) if keep is not None else None
        table = self.query_one("#layers", Table)
        table.set_columns(class_columns(self._currency) if self.grouped else COLUMNS)
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

    @property
    def _currency(self) -> str:
        return self.report.cost.currency if self.report and self.report.cost else "USD"

    def reveal(self, layer: str) -> None:
        """Open the tree down to `layer` and put the cursor on the closest line."""
        self._take_over("")
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
    def _chosen(self, event: Table.Chosen) -> None:
        if self.grouped:
            self.change(Filter(layer_class=event.row.layer_class))
            return
        self._show_detail()
        self.add_class("-detail")
        self.call_after_refresh(self.query_one("#detail", LayerDetail).take_focus)

    @on(Table.Chosen, "#misses")
    def _miss_chosen(self, event: Table.Chosen) -> None:
        """A missed fusion in full: the scheduler's reason can be long."""
        lines = miss_lines(event.row)
        self.app.push_screen(Reading("missed fusion", lines, copy="\n".join(text_of(row) for row in lines)))

    @on(Table.Chosen, "#kernels")
    def _kernel_chosen(self) -> None:
        self.action_code()

    @on(Table.HeadingClicked, "#layers")
    def _heading(self, event: Table.HeadingClicked) -> None:
        sort: Sort = event.key if event.key in SORTS else "tree"
        self.change(replace(self.wanted, sort=sort if sort != self.wanted.sort else "tree"))

    @property
    def covered(self) -> bool:
        """Whether something takes the place of the tree."""
        return any(self.has_class(mode) for mode in MODES)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Keys of the tree rest while it is covered; those of the code work on code alone."""
        if action == "turn_code":
            return self.has_class("-code")
        return not (action in OF_TREE and self.covered)

    def change(self, wanted: Filter) -> None:
        """Apply a filter, leaving the grouping."""
        self.wanted, self.grouped = wanted, False
        self.refill(top=True)

    def action_back(self) -> None:
        """From what covers the tree to where it was opened, from the detail to the tree, from a filter to all."""
        if self.covered:
            self._take_over("")
            detail = self.query_one("#detail", LayerDetail)
            if self.has_class("-detail"):
                self.call_after_refresh(detail.take_focus)
            else:
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
        self._take_over("-tune")
        panel.show_layers(self.view.tuning, layers)
        self.call_after_refresh(panel.take_focus)

    def _take_over(self, mode: str) -> None:
        """Put a panel in the place of tree and detail; "" gives it back to them."""
        self.remove_class(*MODES)
        if mode:
            self.add_class(mode)
        self.refresh_bindings()

    def action_patterns(self) -> None:
        """The anti-patterns of the model, and back."""
        if self.has_class("-patterns"):
            self.action_back()
            return
        self._take_over("-patterns")
        self.call_after_refresh(self.query_one("#antipatterns", PatternPanel).take_focus)

    @on(Table.Chosen, "#patterns")
    def _pattern_chosen(self, event: Table.Chosen) -> None:
        """Go to the layer of an anti-pattern."""
        self.reveal(event.row.layer)
        self.take_focus()

    def action_code(self) -> None:
        """The generated code of the kernel under the cursor, else of the layer's slowest, and back."""
        row, loaded = self.query_one("#layers", Table).row, self.session.loaded
        index = self.query_one("#detail", LayerDetail).index
        if self.has_class("-code"):
            self.action_back()
        elif self.grouped:
            self.notify("Choose a layer first: enter shows those of the class", timeout=4)
        elif isinstance(row, FusionLine) and loaded is not None and index is not None and self.report is not None:
            kernels, focused = index.of(row.path)[1], self.screen.focused
            pointed = focused.row if isinstance(focused, Table) and isinstance(focused.row, KernelView) else None
            self._take_over("-code")
            self.query_one("#generated", CodePanel).wait(row.path or row.label)
            wanted = next(iter(keys_of([pointed])), None) if pointed else None
            self._read_code(self.report, loaded.path, keys_of(kernels), wanted)

    @work(thread=True, exclusive=True, exit_on_error=False, group="code", description="read the generated code")
    def _read_code(self, report: RunReport, path: Path, kernels: Sequence[KernelKey], wanted: KernelKey | None) -> None:
        worker = get_current_worker()
        try:
            message: Message = self.CodeRead(report, read_code(path, kernels, wanted), wanted)
        except (StoreError, OSError) as error:
            message = WorkFailed("cannot read the generated code", str(error))
        if not worker.is_cancelled:
            self.post_message(message)

    def on_fusion_pane_code_read(self, message: FusionPane.CodeRead) -> None:
        """Show the code, unless another run was opened or the panel left meanwhile."""
        if message.report is self.report and self.has_class("-code"):
            self.query_one("#generated", CodePanel).show(message.found, message.wanted)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A defect in the reading is told like any worker's."""
        error = event.worker.error
        if event.state is WorkerState.ERROR and error is not None:
            self.post_message(unexpected(event.worker.description, error))

    def action_turn_code(self, step: int) -> None:
        """The code of the layer's next kernel."""
        self.query_one("#generated", CodePanel).turn(step)

    def markdown(self) -> str:
        """What is shown; the code as a fenced block."""
        text = super().markdown()
        code = self.query_one("#generated", CodePanel).markdown() if self.has_class("-code") else ""
        return f"{text}\n{code}\n" if code else text

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

    def search(self, text: str) -> None:
        """Show what has this text in it."""
        self.change(replace(self.wanted, text=text))

    def pointed(self) -> Named | None:
        """A headline figure or the layer's saving."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, FusionLine):
            row = table.row
            if self.grouped:
                return computed(f"gap: {row.label}", row.gap_ms, "ms", GAP_HOW, "modelled")
            name = f"saves: {row.path or 'model'}"
            return computed(name, row.saves_ms, "ms", f"{SAVES_HOW}; lost: {fmt.size(row.lost)}", "modelled")
        if isinstance(table, Table) and isinstance(table.row, PatternView):
            cost = table.row
            source: Source = "modelled" if cost.cost_kind == "modelled" else "derived"
            return computed(
                f"{cost.kind}: {cost.layer or 'model'}", cost.cost_ms, "ms", COST_HOW[cost.cost_kind], source
            )
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

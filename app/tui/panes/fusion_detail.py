"""The layer under the cursor: its missed fusions with reason and source lines, and its kernels."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.views import KernelView, MissView
from costlab.app.text import operators
from costlab.app.tui.cells import EMPTY, Line, Span, bar, crop_start, line, status
from costlab.app.tui.panes.fusion_rows import FusionLine, LayerIndex
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Column, Table, col
from costlab.probes.fusion.causes import mend_of


def _edge(row: MissView) -> Line:
    return line(operators(row.producer) or "?", (" → ", "faint"), operators(row.consumer) or "?")


def _place(row: MissView, width: int) -> Line:
    return line((crop_start(row.consumer_source or row.producer_source, width), "muted"))


def _kind(row: MissView) -> Line:
    return line(("◆", "accent") if row.addressable else ("◇", "faint"))


def _number(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


MISSES: list[Column[MissView]] = [
    col("kind", "", _kind, 1),
    col("cause", "not fused because", lambda r: line(r.cause_text or r.cause), 24, flex=3, max_width=70),
    col("edge", "between", _edge, 18, flex=2, priority=2, max_width=50),
    Column("place", "where", _place, 14, flex=1, priority=1, max_width=30),
    col("count", "×", lambda r: line((fmt.count(r.count), "muted")), 4, "right", priority=3),
    col("bytes", "bytes", lambda r: _number(fmt.size(r.bytes)), 8, "right"),
    col("saves", "saves", lambda r: line((fmt.ms(r.saves_ms) if r.saves_ms else "·", "strong")), 8, "right"),
]


def _of_copy(row: KernelView, width: int) -> Line:
    if row.of_copy is None:
        return line((fmt.MISSING, "faint"))
    text = f"{fmt.share(row.of_copy):>6} "
    return (*line(text), *bar(row.of_copy, max(width - len(text), 0), "muted"))


KERNELS: list[Column[KernelView]] = [
    col("status", "", lambda r: status(r.status), 3),
    col("name", "kernel", lambda r: line(r.name), 22, flex=4, max_width=80),
    col("kind", "kind", lambda r: line((r.kind or r.category, "muted")), 10, priority=4),
    col("phase", "phase", lambda r: line((r.phase, "muted")), 9, priority=5),
    col("calls", "×", lambda r: line((fmt.times(r.calls), "muted")), 4, "right", priority=2),
    col("ms", "time", lambda r: _number(fmt.ms(r.ms)), 8, "right"),
    col("bytes", "bytes", lambda r: _number(fmt.size(r.bytes)), 8, "right", priority=3),
    col("gbps", "GB/s", lambda r: _number(fmt.number(r.gbps)), 6, "right", priority=1),
    Column("copy", "of copy", _of_copy, 8, flex=1, priority=2, max_width=24),
]


class LayerDetail(Vertical):
    """Two lists for one layer; `tab` goes from one to the other."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    LayerDetail #miss-text { height: auto; max-height: 7; padding: 0 1; }
    .-short LayerDetail #miss-text { max-height: 5; }
    LayerDetail #lists { height: 1fr; }
    LayerDetail .list { height: 1fr; width: 1fr; }
    LayerDetail #lists { layout: vertical; }
    LayerDetail #misses { height: 1fr; margin-bottom: 1; }
    LayerDetail #kernels { height: 1fr; }
    LayerDetail.-class #lists { display: none; }
    .-wide LayerDetail #lists { layout: horizontal; }
    .-wide LayerDetail #misses { margin: 0 3 0 0; }
    """
    index: LayerIndex | None = None

    def compose(self) -> ComposeResult:
        """Title, misses, kernels."""
        yield Lines(id="detail-title")
        with Horizontal(id="lists"):
            yield Table[MissView](MISSES, id="misses")
            yield Table[KernelView](KERNELS, id="kernels")
        yield Lines(id="miss-text", classes="wrap")

    def show(self, row: FusionLine, by_class: bool) -> None:
        """Show a layer; of a class only what reaching its target would save."""
        if self.index is None:
            return
        misses, kernels = ([], []) if by_class else self.index.of(row.path)
        self.set_class(by_class, "-class")
        self.query_one("#misses", Table).set_rows(misses, cursor=0)
        self.query_one("#kernels", Table).set_rows(kernels, cursor=0)
        head = class_title(row) if by_class else title(row, len(misses), len(kernels))
        self.query_one("#detail-title", Lines).show([head])
        self._explain(misses[0] if misses else None)

    def take_focus(self) -> None:
        """Focus the misses, or the kernels where there are none."""
        misses = self.query_one("#misses", Table)
        (misses if misses.rows else self.query_one("#kernels", Table)).focus()

    @on(Table.Moved, "#misses")
    def _moved(self, event: Table.Moved) -> None:
        self._explain(event.row)

    def _explain(self, miss: MissView | None) -> None:
        self.query_one("#miss-text", Lines).show(miss_lines(miss) if miss else ())


def title(row: FusionLine, misses: int, kernels: int) -> Line:
    """The layer, its class, how much there is."""
    name = row.path or row.label
    kind = f"  {row.layer_class}" if row.layer_class and row.layer_class != name else ""
    alike = f"  {row.alike} alike, together" if row.alike > 1 else ""
    counts = f"   {fmt.count(misses)} missed, {fmt.count(kernels)} kernels"
    return line((" " + name, "strong"), (kind + alike, "muted"), (counts, "muted"), *_gap(row))


def class_title(row: FusionLine) -> Line:
    """A layer class and its gap to the target; the layers are a key away."""
    known = _gap(row) or [("   no gap to its target is known" if row.gap_ms is None else "   at its target", "muted")]
    return line((" " + (row.label or "(none)"), "strong"), *known, ("   ", ""), ("enter", "accent"), "  its layers")


def _gap(row: FusionLine) -> list[Span]:
    if not row.gap_ms:
        return []
    return [(f"   target {fmt.rate(row.target)} would save ", "muted"), (fmt.ms(row.gap_ms), "strong")]


def miss_lines(miss: MissView) -> list[Line]:
    """The cause, both places, what mends it, and last, since it may be long, the scheduler's own reason."""
    places = [f"{name} at {place}" for name, place in _ends(miss) if place]
    lines = [
        line((miss.layer or "model", "strong"), ("  ", ""), miss.cause_text or miss.cause),
        line(("   ".join(places), "muted")) if places else EMPTY,
        line(("mend  ", "accent"), mend_of(miss.cause)),
        line(("reason  ", "accent"), (miss.reason, "muted")) if miss.reason else EMPTY,
    ]
    return [one for one in lines if one]


def _ends(miss: MissView) -> list[tuple[str, str]]:
    return [
        (operators(miss.producer) or "producer", miss.producer_source),
        (operators(miss.consumer) or "consumer", miss.consumer_source),
    ]

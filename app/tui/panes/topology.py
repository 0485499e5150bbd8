"""Topology: the machine's devices and links drawn, what each link gives, and where the run's collectives travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from costlab.app import figures as fmt
from costlab.app.analysis.views import Figure, RunReport
from costlab.app.report.topology import (
    MATRIX_NOTE,
    WEIGHT_NOTE,
    doubt_lines,
    latency,
    link_name,
    measure_cells,
    seed_of,
)
from costlab.app.store import home
from costlab.app.topology.draw import HOT, Key, LinkClass, classes, drawing, matrix
from costlab.app.topology.graph import bisection
from costlab.app.topology.model import Topology
from costlab.app.topology.of_run import check_in_facts, read_links, run_topology
from costlab.app.topology.use import Use, hot, uses
from costlab.app.tui.cells import EMPTY, Line, Span, line
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col
from costlab.probes.records import LinkRow

SMALL_RESIDUAL = 0.1


def _optional(text: str, tone: str = "") -> Line:
    return line((text, "faint" if text == fmt.MISSING else tone))  # type: ignore[arg-type]


def _efficiency(c: LinkClass) -> Line:
    value = c.link.efficiency
    return _optional(fmt.MISSING if value is None else f"{value:.2f}")


def _weight(c: LinkClass) -> Line:
    if c.link.weight is None:
        return _optional(fmt.MISSING)
    return line((fmt.number(c.link.weight), "strong"), (f" {c.link.weight_from[:1]}", "muted"))


def _seed(c: LinkClass) -> Line:
    seed = seed_of(c)
    return _optional(fmt.MISSING if seed is None else f"{seed.weight:g}", "muted")


def columns(use: Mapping[Key, float]) -> list[Column[LinkClass]]:
    """The table's columns; `use` is the share of its ceiling that each link reached in this run."""

    def used(c: LinkClass) -> Line:
        value = max((use[(x.src, x.dst)] for x in c.alike if (x.src, x.dst) in use), default=None)
        return _optional(fmt.share(value), "strong" if value is not None and value >= HOT else "")

    return [
        col("letter", "", lambda c: line((c.letter, "accent")), 2),
        col("link", "link", lambda c: line(link_name(c)), 14, flex=1, max_width=36),
        col("n", "n", lambda c: line((str(c.count), "muted")), 3, "right", priority=4),
        col("line", "line", lambda c: _optional(fmt.number(c.link.nominal_gbps)), 6, "right"),
        col("measured", "measured", lambda c: _optional(fmt.number(c.link.measured_gbps), "strong"), 8, "right"),
        col("used", "used", used, 6, "right", priority=2),
        col("efficiency", "eff.", _efficiency, 4, "right", priority=1),
        col("weight", "weight", _weight, 8, "right"),
        col("latency", "latency", lambda c: _optional(latency(c.link.latency_ns)), 8, "right", priority=1),
        col("nccl", "NCCL", lambda c: _optional(fmt.number(c.link.nccl_gbps), "muted"), 5, "right", priority=3),
        col("seed", "seed", _seed, 4, "right", priority=3),
    ]


class TopologyPane(Pane):
    """The drawing, the weight table with the facts of the link under the cursor, the matrix, doubts and check-in."""

    TITLE: ClassVar[str] = "Topology"
    FOCUS: ClassVar[str] = "#link-classes"
    HELP: ClassVar[str | None] = """\
Links of one kind and rate share a **letter**; `!71%` behind it marks a link that a collective of this run drove to more
than half of its ceiling. **Line** is the raw line rate, **measured** what a calibration found (`costlab topo
--calibrate`), **used** the largest share of it, else of the line rate, that a collective of this run reached.
**Weight** = measured (m), else line (n), over 64 GB/s, PCIe Gen5 x16. **NCCL** is the constant that its search takes;
**seed** is a reference column, wrong where the facts below say so.

`p` shows the path between every two devices in the words of `nvidia-smi topo -m`. Disagreements are shown, not merged.
"""
    DEFAULT_CSS = """
    TopologyPane #drawing { margin-bottom: 1; }
    TopologyPane #link-classes { margin-bottom: 1; }
    TopologyPane #facts, TopologyPane #more { padding: 0 1; margin-bottom: 1; }
    TopologyPane #matrix { display: none; margin-bottom: 1; }
    TopologyPane.-paths #matrix { display: block; }
    TopologyPane.-paths #drawing { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("p", "paths", "Paths", id="topology.paths")]

    def __init__(self, session: Session, *, id: str) -> None:
        super().__init__(session, id=id)
        self.topology: Topology | None = None
        self._links: list[LinkRow] = []
        self._read: Path | None = None

    def body(self) -> ComposeResult:
        """Figures; drawing or matrix; weights; facts; the rest."""
        yield FigureStrip(id="headline")
        yield Lines(id="drawing")
        yield Lines(id="matrix")
        yield Table[LinkClass](columns({}), id="link-classes", classes="fit")
        yield Lines(id="facts", classes="wrap")
        yield Lines(id="more", classes="wrap")

    def lacks(self, report: RunReport) -> Sequence[Line]:  # noqa: ARG002
        """A run without facts of links: recorded before check-in, or imported."""
        self._load()
        if self.topology is not None:
            return ()
        command = line(("costlab topo", "accent"), "  shows the machine you are on; --import FILE reads another's")
        return lacking("This run recorded nothing of its machine's links.", command)

    def _load(self) -> None:
        """The open run's topology; read once for each run."""
        loaded = self.session.loaded
        if loaded is None or loaded.path == self._read:
            return
        self._read = loaded.path
        self._links = read_links(loaded.path)
        self.topology = run_topology(self._links, loaded.path, home())

    def fill(self, report: RunReport) -> None:
        """Show the run's machine."""
        topology = self.topology
        if topology is None:
            return
        rows = report.collectives.rows if report.collectives else []
        found = uses(topology, rows, cpu=report.environment.device == "cpu")
        self.query_one("#headline", FigureStrip).show(headline(topology, found))
        width = max(self.size.width - 2, 78)
        self.query_one("#drawing", Lines).show([line(text) for text in drawing(topology, width, hot(found))])
        self.query_one("#matrix", Lines).show(matrix_lines(topology))
        table = self.query_one("#link-classes", Table)
        table.set_columns(columns(hot(found)))
        table.set_rows(classes(topology), cursor=0)
        self.query_one("#more", Lines).show([*use_lines(found), *check_in_lines(self._links), *rest_lines(topology)])
        self._show_facts()

    @on(Table.Moved, "#link-classes")
    def _moved(self) -> None:
        self._show_facts()

    def _show_facts(self) -> None:
        chosen = self.query_one("#link-classes", Table).row
        self.query_one("#facts", Lines).show(fact_lines(chosen) if isinstance(chosen, LinkClass) else [])

    def action_paths(self) -> None:
        """The matrix instead of the drawing, and back."""
        self.toggle_class("-paths")

    def pointed(self) -> Named | None:
        """A headline figure or the weight of the line."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, LinkClass):
            link = table.row.link
            how = link.measured_by if link.weight_from == "measured" else f"line rate: {link.nominal_source}"
            source = "measured" if link.weight_from == "measured" else "quoted"
            name = f"weight of {link_name(table.row)}"
            return computed(name, link.weight, "x 64 GB/s", how, source)  # type: ignore[arg-type]
        return super().pointed()


def headline(topology: Topology, found: Sequence[Use]) -> list[Named]:
    """GPUs, bisection bandwidth, the largest share of a ceiling."""
    count = Figure(value=len(topology.gpus), unit="count", source="quoted", how=topology.source)
    shown = [Named("GPUs", count)]
    flow = bisection(topology)
    if flow is not None and flow.gbps is not None:
        halves = f"{' '.join(flow.left)} | {' '.join(flow.right)}"
        how = "; ".join(t for t in (f"least maximum flow between halves of the GPUs ({halves})", flow.note) if t)
        shown.append(computed("bisection", flow.gbps, "GB/s", how))
    shares = [u for u in found if u.share is not None]
    if shares:
        top = max(shares, key=lambda u: u.share or 0.0)
        how = f"busbw of {top.row.kind} / bandwidth of the slowest link on its way; {top.route.how}"
        shown.append(computed("of its ceiling", top.share, "fraction", how))
    return shown


def matrix_lines(topology: Topology) -> list[Line]:
    """Rows of the matrix under its titles, with what the words mean."""
    table = matrix(topology)
    if table is None:
        return [line(("No matrix: fewer than two devices, or too many to be read.", "muted"))]
    wide = max(len(n) for n in table.names)
    cell = max(wide, *(len(c) for row in table.cells for c in row))
    head = " " * wide + "  " + " ".join(f"{n:>{cell}}" for n in table.names) + "  NUMA"
    rows = [
        line((f"{name:<{wide}}  ", "strong"), " ".join(f"{c:>{cell}}" for c in row), (f"  {numa:>4}", "muted"))
        for name, row, numa in zip(table.names, table.cells, table.numa, strict=True)
    ]
    return [line((head, "muted")), *rows, EMPTY, line((MATRIX_NOTE, "muted"))]


def fact_lines(chosen: LinkClass) -> list[Line]:
    """Everything known of the link class under the cursor, each with its source."""
    link = chosen.link
    lines = [line((f"{chosen.letter}  ", "accent"), (f"{link.src} → {link.dst}  ", "strong"), link_name(chosen))]
    if link.nominal_gbps is not None:
        after = f", {fmt.number(link.payload_gbps)} after encoding" if link.payload_gbps != link.nominal_gbps else ""
        text = f"{fmt.number(link.nominal_gbps)} GB/s{after}"
        lines.append(line(("line rate  ", "muted"), text, (f"  {link.nominal_source}", "muted")))
    else:
        lines.append(line(("line rate  ", "muted"), ("not told by any source", "faint")))
    for m in link.measures:
        what, way, gbps, at, fitted, alpha, residual = measure_cells(m)
        doubt = "  bandwidth depends on the size" if m.residual > SMALL_RESIDUAL else ""
        text = f"{what}, {way}: {gbps} GB/s at {at}; fit {fitted} GB/s + {alpha}, residual {residual}{doubt}"
        lines.append(line(("measured  ", "muted"), text, (f"  alpha: {m.alpha_is}; {m.date}", "muted")))
    if not link.measures:
        lines.append(line(("measured  ", "muted"), ("not measured: costlab topo --calibrate", "faint")))
    lines += [line((f"{f.name}  ", "muted"), f.value, (f"  {f.source}", "muted")) for f in link.facts]
    seed = seed_of(chosen)
    if seed is not None:
        lines.append(line(("seed  ", "muted"), f"weight {seed.weight:g}, for reference only: {seed.error}"))
    return lines


def use_lines(found: Sequence[Use]) -> list[Line]:
    """Where each collective of the run goes and what it reached."""
    lines: list[Line] = []
    for use in found:
        ceiling = use.route.bottleneck.capacity if use.route.bottleneck else None
        reached = f"{fmt.number(use.row.busbw_gbps)} of {fmt.number(ceiling)} GB/s, {fmt.share(use.share)}"
        ideal = f"; ideal {fmt.ms(use.ideal_ms)} a call" if use.ideal_ms is not None else ""
        lines.append(line((f"{use.row.kind}  ", "strong"), reached + ideal, (f"  {use.route.how}", "muted")))
    return [*lines, EMPTY] if lines else []


def check_in_lines(links: Sequence[LinkRow]) -> list[Line]:
    """What each rank found and did at check-in."""
    ranks = check_in_facts(links)
    lines = [
        line((f"rank {rank}  ", "muted"), facts.get("result", fmt.MISSING), _elsewhere(facts)) for rank, facts in ranks
    ]
    return [line(("check-in", "strong")), *lines, EMPTY] if lines else []


def _elsewhere(facts: dict[str, str]) -> Span:
    """Shares on other nodes, with and without the binding, and what copies from each node's memory reach."""
    names = {
        "fresh pages elsewhere, unbound": "fresh pages on other nodes unbound",
        "fresh pages elsewhere": "bound",
        "pages elsewhere": "all pages at the end",
    }
    parts = [f"{words} {facts[name]}" for name, words in names.items() if name in facts]
    parts += [f"{name} {value}" for name, value in facts.items() if name.startswith("host to device ")]
    return (f"  {', '.join(parts)}" if parts else "", "muted")


def rest_lines(topology: Topology) -> list[Line]:
    """Disagreements, notes, and how to read the weights."""
    doubts = [line(("? ", "warn"), text) for text in doubt_lines(topology)]
    notes = [line((note, "muted")) for note in topology.notes]
    return [*doubts, *notes, line((WEIGHT_NOTE, "muted"))]

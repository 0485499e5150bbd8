"""Cost: what a step costs in money, energy and memory, and which part of the step the money goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.views import MemoryPhase, MemoryView, RunReport
from costlab.app.tui.cells import EMPTY, Line, bar, beside, line
from costlab.app.tui.panes.base import Pane, computed, lacking
from costlab.app.tui.panes.overview import PartLine, part_bar, part_lines
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col

SPLIT_HOW = "the part's share of the step times the cost of the whole"


@dataclass(frozen=True)
class MoneyRow:
    """A part of the step and what it costs; texts, "–" where there is no price."""

    part: PartLine
    per_million: float | None
    million: str
    run: str


def money_rows(report: RunReport) -> list[MoneyRow]:
    """The waterfall in money."""
    cost = report.cost
    million = cost.per_million.value if cost and cost.per_million else None
    run = cost.per_run.value if cost and cost.per_run else None
    currency = cost.currency if cost else "USD"
    parts = part_lines(report.waterfall, causes=False) if report.waterfall else []

    def text(share: float, whole: float | None) -> str:
        if whole is None:
            return fmt.MISSING
        return fmt.money(1.0, currency).replace("1.00", beside(share * whole, whole))

    return [
        MoneyRow(p, None if million is None else p.share * million, text(p.share, million), text(p.share, run))
        for p in parts
    ]


def _money(text: str, row: MoneyRow) -> Line:
    return line((text, "faint" if text == fmt.MISSING else row.part.tone))


def _part_name(row: MoneyRow) -> Line:
    return line(("all" if row.part.level < 0 else row.part.name, row.part.tone))


MONEY: list[Column[MoneyRow]] = [
    col("name", "where the money goes", _part_name, 20, flex=1, max_width=26),
    col("share", "share", lambda r: line((fmt.share(r.part.share), r.part.tone)), 6, "right", priority=2),
    Column("bar", "", lambda r, w: part_bar(r.part, w), 6, flex=2, priority=3, max_width=34, drawn=True),
    col("million", "per 1 M", lambda r: _money(r.million, r), 10, "right"),
    col("run", "whole run", lambda r: _money(r.run, r), 10, "right"),
]


def _optional(value: int | None) -> Line:
    text = fmt.size(value)
    return line((text, "faint" if text == fmt.MISSING else ""))


def memory_columns(view: MemoryView) -> list[Column[MemoryPhase]]:
    """Peaks by phase, drawn against the device (or, without one, against the largest)."""
    on_device = any(p.reserved_peak is not None for p in view.phases)
    largest = max((_peak(p) or 0 for p in view.phases), default=0) or 1
    whole = view.device_total or largest

    def drawn(row: MemoryPhase, width: int) -> Line:
        peak = _peak(row)
        return EMPTY if peak is None else bar(peak / whole, width)

    device: list[Column[MemoryPhase]] = [
        col("allocated", "allocated", lambda r: _optional(r.allocated_peak), 9, "right"),
        col("reserved", "reserved", lambda r: _optional(r.reserved_peak), 9, "right"),
    ]
    return [
        col("phase", "memory peak in", lambda r: line(r.phase), 14, flex=1, max_width=24),
        *(device if on_device else []),
        col("host", "host", lambda r: _optional(r.host_peak), 9, "right", priority=2),
        Column(
            "bar", "of the device" if view.device_total else "", drawn, 13, flex=2, priority=1, max_width=34, drawn=True
        ),
    ]


def _peak(row: MemoryPhase) -> int | None:
    return row.reserved_peak if row.reserved_peak is not None else row.host_peak


class CostPane(Pane):
    """Money, energy and memory."""

    TITLE: ClassVar[str] = "Cost"
    FOCUS: ClassVar[str] = "#money"
    HELP: ClassVar[str | None] = """\
Money is price per GPU-hour × GPUs × time; the price and its date are quoted, from the price table or from `--price`.
Energy comes from the devices' own counters. Memory peaks are those of the rank that needs most.
"""
    SCOPED_CSS = False  # the rules look at the screen's size classes
    DEFAULT_CSS = """
    CostPane #columns { height: auto; }
    CostPane .column { height: auto; width: 1fr; }
    CostPane #left { margin-right: 3; width: 6fr; }
    CostPane #right { width: 5fr; }
    CostPane Table { margin-bottom: 1; }
    CostPane #notes { padding: 0 1; }
    .-narrow CostPane #columns { layout: vertical; }
    .-narrow CostPane .column { width: 100%; margin-right: 0; }
    """

    def body(self) -> ComposeResult:
        """Figures; money beside memory; notes."""
        yield FigureStrip(id="headline")
        with Horizontal(id="columns"):
            with Vertical(id="left", classes="column"):
                yield Table[MoneyRow](MONEY, id="money", classes="fit")
            with Vertical(id="right", classes="column"):
                yield Table[MemoryPhase](memory_columns(MemoryView()), id="memory", classes="fit")
        yield Lines(id="notes", classes="wrap")

    def lacks(self, report: RunReport) -> Sequence[Line]:
        """Neither money nor memory nor energy."""
        if report.cost or report.memory or report.energy:
            return ()
        return lacking("The run recorded neither money, energy nor memory.", line(("n", "accent"), "  record a run"))

    def fill(self, report: RunReport) -> None:
        """Show the run."""
        self.query_one("#headline", FigureStrip).show(headline(report))
        priced = report.cost is not None and report.cost.per_million is not None
        money = self.query_one("#money", Table)
        money.set_columns([c for c in MONEY if priced or c.key not in ("million", "run")])
        money.set_rows(money_rows(report), cursor=0)
        memory = report.memory or MemoryView()
        table = self.query_one("#memory", Table)
        table.set_columns(memory_columns(memory))
        table.set_rows(memory.phases, cursor=0)
        table.display = bool(memory.phases)
        self.query_one("#notes", Lines).show(notes(report))

    def pointed(self) -> Named | None:
        """A headline figure or the money of a part."""
        table = self.screen.focused
        if isinstance(table, Table) and isinstance(table.row, MoneyRow):
            cost = self.report.cost if self.report else None
            unit = cost.currency if cost else "USD"
            return computed(f"{table.row.part.name}, per 1 M", table.row.per_million, unit, SPLIT_HOW)
        return super().pointed()


def headline(report: RunReport) -> list[Named]:
    """Money first, then energy and memory."""
    cost, energy, memory = report.cost, report.energy, report.memory
    found: list[Named] = []
    if cost is not None:
        amounts = [(f"per 1 M {report.run.unit}", cost.per_million), ("per step", cost.per_step)]
        amounts += [(f"{fmt.count(cost.run_steps)} steps", cost.per_run)]
        found += [Named(name, f, fmt.money(f.value, cost.currency)) for name, f in amounts if f is not None]
    others = [
        ("energy/step", energy and energy.per_step),
        ("power", energy and energy.average_w),
        ("memory peak", memory and memory.peak),
        ("headroom", memory and memory.headroom),
        ("price", cost and cost.price_per_gpu_hour),
    ]
    found += [Named(name, f) for name, f in others if f]
    return [replace(named, tone="accent" if i == 0 else "strong") for i, named in enumerate(found)]


def notes(report: RunReport) -> list[Line]:
    """The assumptions in words, and what is missing."""
    lines: list[Line] = []
    cost = report.cost
    if cost is not None and cost.price_per_gpu_hour is not None:
        dated = f" ({cost.price_date})" if cost.price_date else ""
        run = f" · whole run = {fmt.count(cost.run_steps)} steps" if cost.run_steps else ""
        price = fmt.figure(cost.price_per_gpu_hour)
        lines.append(line(("price   ", "muted"), f"{price}{dated} · {cost.gpus} GPUs{run}"))
    sections = (("price", cost), ("energy", report.energy), ("memory", report.memory))
    lines += [line((f"{name:<8}", "muted"), view.note) for name, view in sections if view is not None and view.note]
    return lines

"""Overview: what a step costs, where it goes, and the moves that would make it cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message

from costlab.app import figures as fmt
from costlab.app.analysis.views import ClassRow, Figure, Finding, RunInfo, RunReport, WaterfallView
from costlab.app.tui.cells import EMPTY, Line, Tone, bar, beside, fit, line, run_status, status
from costlab.app.tui.dialogs.finding import finding_lines, open_finding
from costlab.app.tui.panes.base import Pane, computed
from costlab.app.tui.session import Proof, Session, proof_key
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.spark import chart
from costlab.app.tui.widgets.strip import FigureStrip, Named
from costlab.app.tui.widgets.table import Column, Table, col
from costlab.app.whatif.spec import from_command
from costlab.probes.spec import SpecError

IDLE = "idle: "
ABOUT: dict[str, str] = {  # rule -> the pane that shows more of what it found
    "broken-fusion": "fusion",
    "missed-fusion": "fusion",
    "trace-quality": "fusion",
    "exposed-communication": "comms",
    "straggler": "comms",
    "communicated-bytes": "comms",
    "graph-break": "compile",
    "recompiles": "compile",
    "compile-cost": "compile",
    "cache-misses": "compile",
    "checkpoint-stall": "checkpoint",
    "checkpoint-damaged": "checkpoint",
    "memory-free": "cost",
    "memory-full": "cost",
    "recompute-unneeded": "cost",
}
CLASSES = 8
LOG_TAIL = 8
ROOMY = 26  # lines from which causes, trend and the finding's detail are shown
VAST = 44  # lines from which all findings are shown in full
SEVERITY: dict[str, tuple[str, Tone]] = {
    "high": ("▲", "bad"),
    "medium": ("△", "warn"),
    "low": ("·", "muted"),
    "info": ("i", "muted"),
}


@dataclass(frozen=True)
class PartLine:
    """A line of the waterfall; `level` 1 is a cause of the part above it, `of` the longest part."""

    name: str
    ms: float
    share: float
    step_ms: float
    of: float
    note: str = ""
    level: int = 0

    @property
    def tone(self) -> Tone:
        """Causes stand back, the sum stands out."""
        return "strong" if self.level < 0 else "muted" if self.level else ""


def part_lines(view: WaterfallView, causes: bool) -> list[PartLine]:
    """The parts with all idle time as one, its causes under it where there is room, and the sum."""
    idle = [p for p in view.parts if p.name.startswith(IDLE)]
    longest = max([*(p.ms for p in view.parts if p not in idle), sum(p.ms for p in idle)], default=0.0) or 1.0

    def one(name: str, ms: float, note: str = "", level: int = 0) -> PartLine:
        return PartLine(name, ms, ms / view.step_ms if view.step_ms else 0.0, view.step_ms, longest, note, level)

    rows: list[PartLine] = []
    first = next((p for p in idle if p.ms), None)
    for part in view.parts:
        if part.ms == 0:
            continue  # measured and nothing: a line would only take room
        if part not in idle:
            rows.append(one(part.name, part.ms, part.note))
        elif part is first:
            main = max(idle, key=lambda p: p.ms)
            note = f"{main.name.removeprefix(IDLE)} {in_step(main.ms, view.step_ms)}"
            rows.append(one("idle", sum(p.ms for p in idle), "" if causes else note))
            rows += [one(p.name.removeprefix(IDLE), p.ms, p.note, 1) for p in idle if p.ms] if causes else []
    return [*rows, one("step", view.step_ms, level=-1)]


def in_step(ms: float, step_ms: float) -> str:
    """A time in the unit and with the decimals of the step."""
    scale, unit = (1e3, "µs") if step_ms < 1 else (1.0, "ms") if step_ms < 1000 else (1e-3, "s")
    return f"{beside(ms * scale, step_ms * scale)} {unit}"


def _part_name(row: PartLine) -> Line:
    return line(("  " * max(row.level, 0) + row.name, row.tone))


def part_bar(row: PartLine, width: int) -> Line:
    """The part against the longest one; a rule for the sum."""
    if row.level < 0:
        return line(("─" * width, "faint"))
    return bar(row.ms / row.of, width, "faint" if row.level else "accent")


PART_COLUMNS: list[Column[PartLine]] = [
    col("name", "where a step goes", _part_name, 21, flex=1, max_width=26),
    col("ms", "per step", lambda r: line((in_step(r.ms, r.step_ms), r.tone)), 8, "right"),
    col("share", "share", lambda r: line((fmt.share(r.share), r.tone)), 6, "right"),
    Column("bar", "", part_bar, 10, flex=5, max_width=60, drawn=True),
    col("note", "", lambda r: line((r.note, "muted")), 18, flex=2, priority=2, max_width=34),
]


def _saves(row: Finding) -> Line:
    return line((fmt.ms(row.saves_ms) if row.saves_ms is not None else "", "strong"))


def finding_columns(session: Session, run_id: str) -> list[Column[Finding]]:
    """Columns of the findings, the last with what a what-if has shown of it."""

    def proof(row: Finding) -> Line:
        return proof_words(row, proof_of(session, run_id, row)) or line((row.proves, "muted"))

    last = col("proves", "prove it with (p)", proof, 17, flex=1, priority=2, max_width=40)
    return [*FINDING_COLUMNS, last]


FINDING_COLUMNS: list[Column[Finding]] = [
    col("mark", "", lambda r: line(SEVERITY[r.severity]), 1),
    col("title", "best moves", lambda r: line(r.title), 30, flex=3, max_width=90),
    col("saves", "saves", _saves, 8, "right"),
    col("share", "step", lambda r: line(fmt.share(r.saves_share) if r.saves_share else ""), 6, "right"),
]


class OverviewPane(Pane):
    """Headline figures, waterfall, findings and one line each on compile, checkpoint and fusion."""

    TITLE: ClassVar[str] = "Overview"
    FOCUS: ClassVar[str] = "#findings"
    HELP: ClassVar[str | None] = """\
The answer first: what one training step costs and which change saves most.

- **Headline figures**: `tab` to reach them, `←` `→` to move, `i` says where a figure comes from.
- **Where a step goes**: parts sum to the unprofiled step. Busy parts are device time of the profiled steps, the rest is
  split like their idle time.
- **Best moves** (`▲` high, `△` medium, `·` low, `i` information): sorted by what they save; `enter` shows evidence and
  what to do, `g` goes to the pane that shows more, `p` puts the change that proves it into What-if. Once it has run,
  the finding says `● proven` or `○ refuted` with the measured change.
"""
    SCOPED_CSS = False  # the rules look at the screen's size classes
    DEFAULT_CSS = """
    OverviewPane #columns { height: auto; }
    OverviewPane .column { height: auto; width: 1fr; }
    OverviewPane #left { margin-right: 3; }
    OverviewPane #parts, OverviewPane #facts, OverviewPane #findings { margin-bottom: 1; }
    OverviewPane #detail, OverviewPane #trend, OverviewPane #classes { display: none; margin-bottom: 1; }
    OverviewPane.-vast #classes { display: block; }
    OverviewPane.-roomy #trend, OverviewPane.-roomy #detail { display: block; }
    OverviewPane.-unmeasured #headline, OverviewPane.-unmeasured #parts { display: none; }
    OverviewPane.-unmeasured #findings { display: none; }
    OverviewPane Lines { padding: 0 1; }
    OverviewPane #facts-below, .-narrow OverviewPane #facts { display: none; }
    .-narrow OverviewPane #facts-below { display: block; }
    .-narrow.-short OverviewPane #columns { height: 1fr; }
    .-narrow.-short OverviewPane #right { height: 1fr; }
    .-narrow.-short OverviewPane #findings { height: 1fr; min-height: 4; }
    .-narrow.-short OverviewPane #facts-below { max-height: 3; }
    .-narrow OverviewPane #columns { layout: vertical; }
    .-narrow OverviewPane #columns .column { width: 100%; margin-right: 0; }
    """

    class GoAsked(Message):
        """Show a pane, and in it a layer."""

        def __init__(self, pane: str, layer: str) -> None:
            self.pane = pane
            self.layer = layer
            super().__init__()

    class ProveAsked(Message):
        """Try the options that a finding names, as a fragment of a command line."""

        def __init__(self, fragment: str) -> None:
            self.fragment = fragment
            super().__init__()

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "prove", "Prove it", id="overview.prove"),
        Binding("g", "go", "Go to its pane", id="overview.go"),
    ]

    def body(self) -> ComposeResult:
        """Two columns that become one when it is narrow."""
        yield Lines(id="outcome", classes="wrap")
        yield FigureStrip(id="headline")
        with Horizontal(id="columns"):
            with Vertical(id="left", classes="column"):
                yield Table[PartLine](PART_COLUMNS, id="parts", classes="fit")
                yield Lines(id="trend")
                yield Lines(id="facts", classes="wrap")
                yield Lines(id="classes")
            with Vertical(id="right", classes="column"):
                yield Table[Finding](FINDING_COLUMNS, id="findings", classes="fit")
                yield Lines(id="detail", classes="wrap")
                yield Lines(id="facts-below")

    def fill(self, report: RunReport) -> None:
        """Show the run."""
        self.query_one("#pane-body").scroll_home(animate=False)
        self.query_one("#outcome", Lines).show(outcome(report.run))
        self.query_one("#headline", FigureStrip).show(headline(report))
        self.set_class(report.steps is None, "-unmeasured")
        self._fill_parts(report)
        self.fill_findings(report)
        for name in ("#facts", "#facts-below"):
            self.query_one(name, Lines).show(facts(report))
        self._fill_detail(report.findings[0] if report.findings else None)

    def fill_findings(self, report: RunReport) -> None:
        """Show the findings with what has been proven of them."""
        table = self.query_one("#findings", Table)
        table.set_columns(finding_columns(self.session, report.run.id))
        table.set_rows(report.findings, cursor=0)

    def _fill_parts(self, report: RunReport) -> None:
        rows = part_lines(report.waterfall, self.size.height >= ROOMY) if report.waterfall else []
        self.query_one("#parts", Table).set_rows(rows)
        width, tall = self._column_width() - 4, self.size.height >= VAST
        self.query_one("#trend", Lines).show(trend(report, width, 6 if tall else 2))
        self.query_one("#classes", Lines).show(class_summary(report))

    def _column_width(self) -> int:
        """Width of the left column, known before it is laid out for the first time."""
        return self.size.width if self.screen.has_class("-narrow") else self.size.width // 2

    def on_resize(self) -> None:
        """Causes, trend and detail appear where there is room for them."""
        self.set_class(self.size.height >= ROOMY, "-roomy")
        self.set_class(self.size.height >= VAST, "-vast")
        if self.report is not None:
            self.call_after_refresh(self._fill_parts, self.report)

    def _fill_detail(self, finding: Finding | None) -> None:
        """The finding under the cursor; where there is room, those after it too."""
        lines: list[Line] = []
        if finding is not None and self.report is not None:
            after = self.report.findings[self.report.findings.index(finding) :]
            for one in after if self.size.height >= VAST else [finding]:
                lines += finding_lines(one, self.report)
                words = proof_words(one, proof_of(self.session, self.report.run.id, one))
                lines += [words, EMPTY] if words else [EMPTY]
        self.query_one("#detail", Lines).show(lines[:-1])

    @on(Table.Moved, "#findings")
    def _moved(self, event: Table.Moved) -> None:
        self._fill_detail(event.row)

    @on(Table.Chosen, "#findings")
    def _chosen(self, event: Table.Chosen) -> None:
        if self.report is not None:
            open_finding(self.app, event.row, self.report)

    def action_go(self) -> None:
        """From a finding to the pane that shows what it is about."""
        row = self.query_one("#findings", Table).row
        if isinstance(row, Finding):
            pane = ABOUT.get(row.id)
            if pane:
                self.post_message(self.GoAsked(pane, row.layer))
            else:
                self.notify("No pane shows more of this", timeout=3)

    def action_prove(self) -> None:
        """Choose in What-if what would prove the finding under the cursor."""
        row = self.query_one("#findings", Table).row
        if isinstance(row, Finding) and row.proves:
            self.post_message(self.ProveAsked(row.proves))
        else:
            self.notify("No option of a run proves this one", timeout=3)

    def pointed(self) -> Named | None:
        """A headline figure, a part of the step or a finding's saving."""
        table = self.screen.focused
        if not isinstance(table, Table) or self.report is None:
            return super().pointed()
        return _explain_row(table.row, self.report)


def proof_of(session: Session, run_id: str, finding: Finding) -> Proof | None:
    """What a what-if of this sitting showed of the finding."""
    if not finding.proves:
        return None
    try:
        item = from_command(finding.proves)
    except SpecError:
        return None
    return session.proofs.get(proof_key(run_id, item))


def proof_words(finding: Finding, proof: Proof | None) -> Line:
    """ "● proven −8.2 % ±0.4" or "○ refuted"; empty without a proof."""
    if proof is None:
        return EMPTY
    if proof.verdict == "invalid":
        return line(("! could not be tried", "warn"))
    saved = finding.saves_ms is not None
    held = proof.verdict == "faster" if saved else proof.verdict != "slower"
    return line(("● proven" if held else "○ refuted", "good" if held else "bad"), f" {proof.words}")


def _explain_row(row: Any, report: RunReport) -> Named | None:
    if isinstance(row, PartLine) and report.waterfall:
        return computed(row.name, row.ms, "ms", report.waterfall.method)
    if isinstance(row, Finding):
        return computed(f"saving: {row.title}", row.saves_ms, "ms", row.how, row.source)
    return None


def outcome(run: RunInfo) -> list[Line]:
    """Why a run did not end well, what to try, its last words; nothing for a complete one."""
    if run.status == "complete":
        return []
    words = run.failure or {"cancelled": "cancelled before it was complete"}.get(run.status, "the run is not complete")
    rows = [line(*run_status(run.status), "  ", (words, "strong"))]
    if run.failure_advice:
        rows.append(line(("try  ", "muted"), run.failure_advice))
    rows += [line(("│ ", "faint"), (text, "muted")) for text in run.log_tail[-LOG_TAIL:]]
    return [*rows, EMPTY]


def headline(report: RunReport) -> list[Named]:
    """The figures of the first line, most asked-for first."""
    steps, cost = report.steps, report.cost
    found: list[Named] = []
    if steps is not None:
        found.append(_with_spread(steps.step_ms))
        if steps.throughput is not None:
            found.append(Named(steps.throughput.unit, steps.throughput, fmt.number(steps.throughput.value)))
        if steps.mfu is not None:
            found.append(Named("MFU", steps.mfu))
    if report.memory is not None and report.memory.peak is not None:
        found.append(Named("peak memory", report.memory.peak))
    if report.energy is not None and report.energy.per_step is not None:
        found.append(Named("energy/step", report.energy.per_step))
    if cost is not None and cost.per_million is not None:
        price = fmt.money(cost.per_million.value, cost.currency)
        found.append(Named(f"per 1 M {report.run.unit}", cost.per_million, price))
    return found


def _with_spread(f: Figure) -> Named:
    """The step time with half the width of its interval."""
    if f.value is None or f.low is None or f.high is None:
        return Named("step", f, tone="accent")
    return Named("step", f, f"{fmt.ms(f.value)} ±{fmt.number((f.high - f.low) / 2, 1)}", "accent")


def trend(report: RunReport, width: int, height: int) -> Sequence[Line]:
    """Step times in order, drawn between their smallest and largest value."""
    series = report.steps.series_ms if report.steps else []
    if len(series) < 2:
        return ()
    label = f"step times  {fmt.ms(min(series))} … {fmt.ms(max(series))}, {len(series)} steps in order"
    rows = [line((label, "muted")), *(line((row, "accent")) for row in chart(series, width, height))]
    ranks = report.steps.per_rank_ms if report.steps else []
    spread = max(ranks) - min(ranks) if ranks else 0.0
    if spread > 0:
        slowest = ranks.index(max(ranks))
        rows.append(line((f"ranks differ by {fmt.ms(spread)}; rank {slowest} is slowest", "muted")))
    return rows


def class_summary(report: RunReport) -> list[Line]:
    """The layer classes that lose most to missed fusion."""
    rows = sorted(report.fusion.classes if report.fusion else [], key=lambda c: -(c.saves_ms or 0.0))
    if not rows:
        return []
    head = line((f"{'fusion by layer class':<30}{'rate':>6}{'time':>11}{'saves':>11}", "muted"))
    return [head, *(_class_line(row) for row in rows[:CLASSES])]


def _class_line(row: ClassRow) -> Line:
    name = fit(line(f"{row.layer_class or 'other'} × {row.layers}"), 25)
    figures = f"{fmt.rate(row.rate):>6}{fmt.ms(row.ms):>11}"
    saves = f"{fmt.ms(row.saves_ms) if row.saves_ms else '·':>11}"
    return (*name, (" ", ""), *status(row.status), *line(" " + figures, (saves, "strong")))


def facts(report: RunReport) -> list[Line]:
    """One line each on fusion, fused kernels, compile, checkpoint, communication; then what is missing from the run."""
    told = (_fusion(report), _fused(report), _compile(report), _checkpoint(report), _comms(report))
    lines = [fact for fact in told if fact]
    lines += [line(("! ", "warn"), (note, "muted")) for note in report.run.notes]
    return lines


def _label(text: str) -> tuple[str, Tone]:
    return (f"{text:<12}", "muted")


def _fusion(report: RunReport) -> Line:
    view = report.fusion
    if view is None or view.rate is None:
        return EMPTY
    goal = f" → target {fmt.rate(view.target)}  " if view.target is not None else "  "
    quality = f"   trace quality {fmt.figure(view.quality)}" if view.quality else ""
    return line(_label("fusion"), (fmt.rate(view.rate.value), "strong"), goal, *status(view.status), (quality, "muted"))


def _fused(report: RunReport) -> Line:
    kernels = report.run.fused
    if not kernels:
        return EMPTY
    number = fmt.counted(sum(kernels.values()), "kernel")
    return line(_label("fused"), (number, "strong"), f" put in: {fmt.fused_kernels(kernels)}")


def _compile(report: RunReport) -> Line:
    view = report.compile
    if view is None or view.cold_s is None:
        return EMPTY
    warm = f" · {fmt.figure(view.warm_s)} warm" if view.warm_s else ""
    breaks = sum(b.count for b in view.breaks)
    again = sum(b.count for b in view.recompiles)
    tail = f"{_many(len(view.graphs), 'graph')} · {_many(breaks, 'break')} · {_many(again, 'recompile')}"
    return line(_label("compile"), (f"{fmt.figure(view.cold_s)} cold", "strong"), f"{warm} · {tail}")


def _checkpoint(report: RunReport) -> Line:
    view = report.checkpoint
    save = next((c for c in view.lines if c.op == "save" and c.stall), None) if view else None
    if view is None or save is None or save.stall is None:
        return EMPTY
    every = ""
    if view.per_step_ms is not None:
        every = f" every {fmt.count(view.every_steps)} steps = {fmt.ms(view.per_step_ms)} per step"
    best = f"   best: {view.best_mode}" if view.best_mode else ""
    return line(_label("checkpoint"), (f"{fmt.figure(save.stall)} stall", "strong"), every, (best, "muted"))


def _comms(report: RunReport) -> Line:
    view = report.collectives
    if view is None or view.bytes_per_step is None:
        return EMPTY
    expected = f" · {fmt.figure(view.expected_bytes)} by formula" if view.expected_bytes else ""
    wait = report.waterfall.wait_ms if report.waterfall else None
    waiting = f" · {fmt.ms(wait)} waiting for peers" if wait is not None else ""
    return line(
        _label("traffic"), (fmt.figure(view.bytes_per_step), "strong"), f" per step and rank{expected}{waiting}"
    )


def _many(count: int, noun: str) -> str:
    return f"{fmt.count(count)} {noun}" + ("" if count == 1 else "s")

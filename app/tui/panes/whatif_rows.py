"""What the what-if pane draws, and the state behind it: plain values, no Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from costlab.app import figures as fmt
from costlab.app.analysis.views import RunReport
from costlab.app.report.whatif import Axis, answer, delta_of, interval_cells, limits, parity_words, percent, verdict
from costlab.app.tui.cells import EMPTY, Line, Tone, bar, line
from costlab.app.tui.panes.live import clock_text
from costlab.app.tui.session import Proof
from costlab.app.tui.widgets.table import Column, col
from costlab.app.whatif import events
from costlab.app.whatif.results import Arm, Prediction, WhatIfResult
from costlab.app.whatif.spec import Variant, WhatIfSpec, accept, make_whatif
from costlab.app.whatif.toggles import TOGGLES, Machine, Toggle
from costlab.probes.records import PhaseEvent, Progress
from costlab.probes.spec import RunSpec

DEFAULT_LEGS, LEAST_LEGS, MOST_LEGS = 3, 2, 12
TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no difference": "muted", "invalid": "warn"}
PARITY: dict[str, tuple[str, Tone]] = {
    "same": ("● same", "good"),
    "different": ("○ different", "bad"),
    "unknown": ("? unknown", "muted"),
    "not comparable": ("– other work", "muted"),
}


@dataclass(frozen=True)
class ToggleLine:
    """One line of the list of toggles: a named one, or an option typed in."""

    name: str
    title: str
    chosen: bool
    reason: str = ""  # why it cannot be tried


@dataclass
class Board:
    """The baseline, what is chosen, and the baselines that were left behind by accepting variants."""

    baselines: list[RunSpec]
    machine: Machine
    chosen: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    factorial: bool = False
    legs: int = DEFAULT_LEGS

    @property
    def baseline(self) -> RunSpec:
        """The present baseline."""
        return self.baselines[-1]

    def lines(self) -> list[ToggleLine]:
        """The options typed in, then all toggles."""
        typed = [ToggleLine(a, "option", a in self.chosen) for a in reversed(self.added)]
        return [*typed, *(self._toggle(t) for t in TOGGLES.values())]

    def _toggle(self, toggle: Toggle) -> ToggleLine:
        reason = toggle.unavailable(self.baseline, self.machine)
        return ToggleLine(toggle.name, toggle.title, toggle.name in self.chosen, reason)

    def flip(self, name: str) -> str:
        """Choose or drop; why it cannot be chosen, "" when it could."""
        reason = next((t.reason for t in self.lines() if t.name == name), "")
        if name in self.chosen:
            self.chosen.remove(name)
        elif not reason:
            self.chosen.append(name)
        return reason if name not in self.chosen else ""

    def add(self, setting: str) -> None:
        """Add a typed option and choose it; SpecError where it cannot be tried."""
        make_whatif(self.baseline, [setting], machine=self.machine)
        if setting not in self.added:
            self.added.append(setting)
        if setting not in self.chosen:
            self.chosen.append(setting)

    def ask(self) -> WhatIfSpec:
        """The what-if of what is chosen; SpecError where it cannot be tried."""
        return make_whatif(self.baseline, self.chosen, factorial=self.factorial, legs=self.legs, machine=self.machine)

    def accept(self, arm: Arm) -> None:
        """Make a variant the baseline."""
        self.baselines.append(accept(self.baseline, Variant(name=arm.name, options=arm.options)))
        self.accepted.append(arm.name)
        self.chosen.clear()

    def undo(self) -> str:
        """Go back to the baseline before the last accepted variant; its name, "" when there is none."""
        if not self.accepted:
            return ""
        self.baselines.pop()
        self.chosen.clear()
        return self.accepted.pop()


def proof_of_arm(arm: Arm) -> Proof:
    """What the arm shows of a finding that names its option: of saves their stall, else the step."""
    stall = arm.saves.stall if arm.saves is not None else None
    if stall is not None and stall.a and stall.b is not None:
        better = stall.b < stall.a
        return Proof("faster" if better else "slower", f"stall of a save {100 * (stall.b / stall.a - 1):+.0f} %")
    change = arm.change
    if change is None or change.value is None or change.low is None or change.high is None:
        return Proof("invalid")
    return Proof(arm.verdict, f"{100 * change.value:+.1f} % ±{50 * (change.high - change.low):.1f}")


def board_of(report: RunReport, machine: Machine) -> Board | None:
    """A board with the run's options as baseline; None for a run whose options are not known or cannot be run."""
    if not report.run.spec.get("workload"):
        return None
    try:
        spec = msgspec.convert(report.run.spec, RunSpec)
    except msgspec.ValidationError:
        return None
    return Board([msgspec.structs.replace(spec, preset=None, checkpoint=False)], machine)


@dataclass
class Running:
    """What is known of the what-if in progress."""

    began: float
    leg: events.LegStarted | None = None
    doing: str = ""
    done: int = 0
    of: int = 0
    predictions: dict[str, Prediction | None] = field(default_factory=dict)
    result: WhatIfResult | None = None
    cancelling: bool = False

    def feed(self, event: events.WhatIfEvent) -> None:
        """Take one event in."""
        match event:
            case events.LegStarted():
                self.leg, self.doing, self.done, self.of = event, "starting", 0, 0
            case events.LegEvent(inner) if isinstance(inner, PhaseEvent):
                self.doing, self.done, self.of = inner.phase, 0, 0
            case events.LegEvent(inner) if isinstance(inner, Progress) and inner.rank == 0:
                self.doing, self.done, self.of = inner.phase, inner.done, inner.total
            case events.Predicted(predictions):
                self.predictions = predictions
            case events.Interim(result) | events.Ended(result):
                self.result = result
            case _:
                pass


def baseline_lines(board: Board) -> list[Line]:
    """The baseline, what was accepted into it, and how the next what-if would run."""
    spec = board.baseline
    compiled = "eager" if spec.compile == "none" else f"compiled ({spec.compile})"
    text = f"{spec.workload} {spec.size} · {compiled} {spec.parallel} · {spec.dtype}"
    added = f" + {', '.join(board.accepted)}" if board.accepted else ""
    how = f"   {board.legs} legs each{' · factorial' if board.factorial else ''}"
    return [line(("baseline  ", "muted"), (text, "strong"), (added, "accent"), (how, "muted"))]


def progress_lines(running: Running | None, now: float, width: int) -> list[Line]:
    """The leg that runs: which of how many, its phase, a bar, the time left; then what was predicted."""
    if running is None:
        return []
    leg = running.leg
    if leg is None:
        return [line(("starting", "muted"))]
    state = "cancelling " if running.cancelling else ""
    head = f"leg {leg.number}/{leg.total}  {leg.arm}  "
    eta = f"  ETA {clock_text(leg.eta_s)}" if leg.eta_s is not None else f"  {clock_text(now - running.began)}"
    count = f" {running.done}/{running.of}" if running.of else ""
    tail = f"  {state}{running.doing}{count}{eta}"
    room = max(min(width - len(head) - len(tail), 30), 6)
    total = (leg.number - 1 + (running.done / running.of if running.of else 0.0)) / max(leg.total, 1)
    rows = [(*line((head, "strong")), *bar(total, room), *line((tail, "muted")))]
    if running.result is None:
        rows += [_foretold(name, found) for name, found in running.predictions.items()]
    return rows


def _foretold(name: str, found: Prediction | None) -> Line:
    if found is None:
        return line(("predicted  ", "muted"), name, ("  no model says what this does", "faint"))
    return line(("predicted  ", "muted"), f"{name}  {percent(found.change)}", (f"  {found.how}", "muted"))


TOGGLE_COLUMNS: list[Column[ToggleLine]] = [
    col("mark", "", lambda t: line(("[x]" if t.chosen else "[ ]", "accent" if t.chosen else "faint")), 3),
    col("name", "toggle", lambda t: line((t.name, "faint" if t.reason else "strong")), 14, flex=1, max_width=24),
    col("title", "", lambda t: line((t.title, "faint" if t.reason else "")), 16, flex=1, max_width=36, priority=1),
    col("reason", "", lambda t: line((t.reason, "muted")), 20, flex=2),
]


def arm_columns(axis: Axis) -> list[Column[Arm]]:
    """Columns of the forest plot; the plot is drawn to the axis's range at whatever width it gets."""

    def drawn(arm: Arm, width: int) -> Line:
        return line((interval_cells(arm.change, Axis(axis.low, axis.high, width)), TONES[arm.verdict]))

    return [
        col("arm", "variant", lambda a: line((a.name, "strong")), 14, flex=2, max_width=30),
        col("predicted", "predicted", _predicted, 9, "right", priority=2),
        col("measured", "measured", lambda a: line(percent(a.change.value if a.change else None)), 8, "right"),
        col("interval", "interval, %", lambda a: line((limits(a.change), "muted")), 16, priority=1),
        Column("plot", f"{percent(axis.low)} … {percent(axis.high)}", drawn, 20, flex=3, max_width=60, drawn=True),
        col("verdict", "", lambda a: line((verdict(a), TONES[a.verdict])), 15),
        col("loss", "loss", _loss, 12, priority=3),
        col("memory", "memory", _memory, 8, "right", priority=4),
    ]


def _predicted(arm: Arm) -> Line:
    return line((percent(arm.predicted.change) if arm.predicted else fmt.MISSING, "muted"))


def _loss(arm: Arm) -> Line:
    return line(PARITY[arm.parity.verdict]) if arm.parity and not arm.failure else EMPTY


def _memory(arm: Arm) -> Line:
    change = delta_of(arm, "peak memory")
    return line(percent(change.ratio) if change else fmt.MISSING)


def about_lines(result: WhatIfResult, arm: Arm) -> list[Line]:
    """The arm under the cursor in words: the answer, the prediction's error, the losses, what else changed."""
    rows = [line((answer(result, arm), "strong"))]
    if arm.predicted and arm.predicted.error is not None:
        error = f"{arm.predicted.error * 100:+.1f} points off"
        rows.append(line(("predicted  ", "muted"), f"{percent(arm.predicted.change)}, {error}: {arm.predicted.how}"))
    if arm.parity and not arm.failure:
        rows.append(line(("loss  ", "muted"), parity_words(arm.parity)))
    moved = [f"{d.name} {percent(d.ratio)}" for d in arm.deltas if d.ratio is not None and d.verdict != "same"]
    if arm.money and arm.money.ratio is not None:
        moved.append(f"{arm.money.name} {percent(arm.money.ratio)}")
    if moved:
        rows.append(line(("also  ", "muted"), ", ".join(moved)))
    rows += [line(("note  ", "muted"), note) for note in arm.notes]
    if arm.advice:
        rows.append(line(("try  ", "muted"), arm.advice))
    return rows


def note_lines(result: WhatIfResult) -> Sequence[Line]:
    """How it ended, over how many rounds, and remarks."""
    noise = f" · a leg varies by {fmt.share(result.noise)}" if result.noise is not None else ""
    rows = [line((f"{result.status} · {fmt.counted(result.rounds, 'round')}{noise}", "muted"))]
    return [*rows, *(line(("! ", "warn"), note) for note in result.notes)]

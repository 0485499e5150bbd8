"""A what-if as a document and in every form: answers, a forest plot of the intervals, what else changed, the legs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from costlab.app.analysis.compare import Change
from costlab.app.analysis.views import Figure
from costlab.app.figures import MISSING, count, counted, interval, ms, number, resolved, seconds, share, size, value
from costlab.app.report.compare import signed
from costlab.app.report.document import Cell, Code, Document, Log, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.app.text import plain
from costlab.app.whatif.results import Arm, LegRecord, Parity, SaveEffect, WhatIfResult, is_variant
from costlab.app.whatif.spec import command_of
from costlab.app.whatif.static_dynamic import Row, StaticDynamic
from costlab.app.whatif.store import Accuracy

LABEL, PLOT = 20, 26  # cells of the forest plot's names and of its axis
TELLING = 1.0  # an interval wider than this, in relative change, says nothing
TENFOLD = 10.0
_VERDICT = {"faster": "● faster", "slower": "○ slower", "no difference": "= no difference", "invalid": "! invalid"}
_PARITY = {"same": "● same", "different": "○ different", "unknown": "? unknown", "not comparable": "– not comparable"}
_ENDED = {
    "running": "more legs were to come when this was written",
    "complete": "all legs were run",
    "stopped early": "stopped early: every interval was decided",
    "out of time": "the budget was used up",
    "cancelled": "cancelled: what was complete is shown",
    "failed": "the baseline failed",
}


def render_whatif(result: WhatIfResult, form: str, width: int = 80, *, stale: bool = False) -> str:
    """The what-if as "md", "text" (for `width` columns) or "json"; ends with a line feed."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    doc = build_whatif(result, stale=stale)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def build_whatif(result: WhatIfResult, *, stale: bool = False) -> Document:
    """Answers first, then the plot, the table, other changes, predictions, parity, legs and method."""
    doc = Document()
    doc.heading(f"What if: {', '.join(v.name for v in result.variants)}", 1)
    doc.say(f"{result.title or 'the workload'}; costlab what-if ", Code(result.id), f", {result.created}.")
    if stale:
        doc.say("Stale: measured on other hardware or software than this machine has now.")
    doc.items([[answer(result, v)] for v in result.variants])
    doc.items([[f"{v.name}: {saving(v.saves)}"] for v in result.variants if v.saves is not None])
    doc.blocks.append(Log(forest(result)))
    _write_table(doc, result)
    _write_effects(doc, result)
    for arm in result.variants:
        _write_arm(doc, arm)
    _write_predictions(doc, result)
    _write_parity(doc, result)
    _write_method(doc, result)
    _write_legs(doc, result)
    return doc


def verdict(arm: Arm) -> str:
    """The verdict by mark and word."""
    if not arm.fits:
        return "✗ does not fit"
    untold = arm.verdict == "invalid" and arm.change is None and not arm.failure
    return "· too few rounds" if untold else _VERDICT[arm.verdict]


def percent(amount: float | None) -> str:
    """A relative change: -9.2 %, +0.1 %."""
    return MISSING if amount is None else f"{amount * 100:+.{1 if abs(amount) < 0.9995 else 0}f} %"


def limits(figure: Figure | None) -> str:
    """The interval of a relative change: [-9.6, -8.8]; an end beyond tenfold is no more than that."""
    if figure is None or figure.low is None or figure.high is None:
        return ""
    high = f"{figure.high * 100:+.1f}" if figure.high < TENFOLD else f">+{TENFOLD * 100:.0f}"
    return f"[{figure.low * 100:+.1f}, {high}]"


def tells(figure: Figure) -> bool:
    """Whether the interval is narrow enough to say anything."""
    return figure.low is None or figure.high is None or figure.high - figure.low <= TELLING


def answer(result: WhatIfResult, arm: Arm) -> str:
    """One variant in a sentence."""
    if not arm.fits:
        more = f": it needs at least {size(arm.needs_bytes)} more" if arm.needs_bytes else ""
        return f"{arm.name} does not fit{more}. {sentence(arm.failure)}"
    if arm.failure:
        return f"{arm.name} failed. {sentence(arm.failure)}"
    if arm.change is None or arm.step_ms is None:
        return f"{arm.name} was not measured in enough rounds to be compared."
    between = f"{ms(_baseline_ms(result))} to {ms(arm.step_ms.value)} a step"
    if arm.verdict == "no difference" and not tells(arm.change):
        rounds = counted(arm.change.n, "round") if arm.change.n else "the rounds"
        return (
            f"{arm.name}: the noise of {rounds} hides whatever it does to the {arm.measure},"
            f" {limits(arm.change)} %. More rounds (--legs) or a quieter machine would tell."
        )
    if arm.verdict == "no difference":
        return f"{arm.name}: no difference in {arm.measure} that the noise allows to see, {limits(arm.change)} %."
    money = f", {signed(arm.money.change, arm.money.unit)} {arm.money.name.removeprefix('cost ')}" if arm.money else ""
    return (
        f"{arm.name} is {share(abs(arm.change.value or 0.0))} {arm.verdict} in {arm.measure}"
        f" {limits(arm.change)} %: {between}{money}."
    )


def saving(effect: SaveEffect) -> str:
    """What a save costs another way, foretold and measured."""
    if effect.stall_after is None or effect.stall_before is None:
        return f"the stall of a save with {effect.after} is not known. {sentence(effect.note)}".rstrip()
    before, after = (f"{resolved(f)} {interval(f)}".rstrip() for f in (effect.stall_before, effect.stall_after))
    told = "" if effect.predicted_stall is None else f"; predicted {resolved(effect.predicted_stall)}"
    expected = "" if effect.predicted_bytes is None else f"; predicted {size(effect.predicted_bytes)}"
    back = {True: "within its error bound" if effect.lossy else "bit by bit", False: "WRONG", None: "not compared"}
    error = "" if effect.update_error is None else f", first resumed update off by {share(effect.update_error)}"
    return (
        f"a save with {effect.after} stalls training for {after} instead of {before} with {effect.before}{told}; it "
        f"writes {size(effect.bytes.b)} instead of {size(effect.bytes.a)}{expected}. Restored: "
        f"{back[effect.restored]}{error}."
    )


def _baseline_ms(result: WhatIfResult) -> float | None:
    return result.baseline.step_ms.value if result.baseline.step_ms else None


@dataclass(frozen=True)
class Axis:
    """A linear axis of relative changes over a number of cells."""

    low: float
    high: float
    cells: int

    def at(self, amount: float) -> int:
        """The cell of a value, kept on the axis."""
        place = (amount - self.low) / (self.high - self.low) * (self.cells - 1)
        return min(max(round(place), 0), self.cells - 1)


def axis_of(arms: Sequence[Arm], cells: int) -> Axis:
    """An axis that holds zero, every estimate and every variant's interval as far as it tells anything.

    The control's interval has the fewest degrees of freedom and may be very wide, as all are after two rounds: it is
    cut rather than let squeeze the rest.
    """
    figures = [a.change for a in arms if a.change is not None and is_variant(a.name)]
    values = [a.change.value for a in arms if a.change is not None and a.change.value is not None]
    reach = max([TELLING / 2, *(1.5 * abs(v) for v in values)])
    ends = [v for f in figures for v in (f.low, f.high) if v is not None and math.isfinite(v)]
    ends = [*values, *(min(max(v, -reach), reach) for v in ends)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    pad = max((high - low) * 0.04, 0.001)
    return Axis(low - pad, high + pad, cells)


def interval_cells(figure: Figure | None, axis: Axis) -> str:
    """An interval drawn on the axis: ├──■──┤, with the line of zero behind it; ◂ and ▸ where it goes on beyond."""
    cells = [" "] * axis.cells
    zero = axis.at(0.0)
    cells[zero] = "│"
    if figure is None or figure.value is None:
        return "".join(cells)
    low, high = (axis.at(figure.value if v is None else v) for v in (figure.low, figure.high))
    for k in range(low, high + 1):
        cells[k] = "┼" if k == zero else "─"
    if high > low:
        cells[low] = "┼" if low == zero else "├"
        cells[high] = "┼" if high == zero else "┤"
    if figure.low is not None and figure.low < axis.low:
        cells[0] = "◂"
    if figure.high is not None and figure.high > axis.high:
        cells[-1] = "▸"
    cells[axis.at(figure.value)] = "■"
    return "".join(cells)


def axis_labels(axis: Axis) -> str:
    """Zero and a round number on each side that has room."""
    cells = [" "] * axis.cells
    for tick in (0.0, *(_round_down(v) for v in (axis.low, axis.high))):
        text = "0" if tick == 0 else f"{tick * 100:+.3g} %"
        start = min(max(axis.at(tick) - len(text) // 2, 0), axis.cells - len(text))
        place = cells[max(start - 1, 0) : start + len(text) + 1]
        if start >= 0 and not "".join(place).strip():
            cells[start : start + len(text)] = text
    return "".join(cells)


def _round_down(amount: float) -> float:
    """The number 1, 2 or 5 times a power of ten nearest to zero from `amount`, half of it at least."""
    if abs(amount) < 1e-6:
        return 0.0
    power = 10.0 ** math.floor(math.log10(abs(amount)))
    return math.copysign(max(m for m in (1, 2, 5) if m * power <= abs(amount)) * power, amount)


def forest(result: WhatIfResult, label: int = LABEL, plot: int = PLOT) -> list[str]:
    """The forest plot of all variants and the A/A control, one line each under an axis."""
    arms = [*result.variants, result.control]
    axis = axis_of(arms, plot)
    lines = [f"{'':{label}} {'measured':>8} {'interval, %':^16} {axis_labels(axis)}".rstrip()]
    for arm in arms:
        measured = percent(arm.change.value if arm.change else None)
        drawn = interval_cells(arm.change, axis)
        lines.append(f"{plain(arm.name, label):{label}} {measured:>8} {limits(arm.change):^16} {drawn} {verdict(arm)}")
    return [line.rstrip() for line in lines]


def delta_of(arm: Arm, name: str) -> Change | None:
    """A named other change of an arm."""
    return next((d for d in arm.deltas if d.name == name), None)


def _relative(change: Change | None) -> str:
    return MISSING if change is None or change.ratio is None else percent(change.ratio)


def _write_table(doc: Document, result: WhatIfResult) -> None:
    doc.heading("Measured")
    rows: list[list[Cell]] = [_table_row(result, result.baseline)]
    rows += [_table_row(result, arm) for arm in (*result.variants, result.control)]
    headers = ["arm", "step", "change", "interval, %", "predicted", "verdict", "loss", "memory", "traffic", "cost"]
    doc.table(headers, rows, right=(1, 2, 3, 4, 7, 8, 9), drop=(8, 4, 9, 7, 3))


def _table_row(result: WhatIfResult, arm: Arm) -> list[Cell]:
    base = arm is result.baseline
    loss = _PARITY[arm.parity.verdict] if arm.parity and not arm.failure else MISSING
    return [
        arm.name,
        ms(arm.step_ms.value) if arm.step_ms else MISSING,
        percent(arm.change.value) if arm.change else MISSING,
        limits(arm.change),
        percent(arm.predicted.change) if arm.predicted else MISSING,
        MISSING if base and arm.fits and not arm.failure else verdict(arm),
        loss,
        _relative(delta_of(arm, "peak memory")),
        _relative(delta_of(arm, "communicated bytes")),
        _relative(arm.money),
    ]


def _write_effects(doc: Document, result: WhatIfResult) -> None:
    if not result.effects:
        return
    doc.heading("Main effects and interactions")
    rows: list[list[Cell]] = []
    for item in result.effects:
        kind = "main effect" if len(item.factors) == 1 else "interaction"
        clear = item.change.low is not None and item.change.high is not None
        apart = clear and not (item.change.low or 0.0) <= 0 <= (item.change.high or 0.0)
        said = "not told from zero" if not apart else "slows" if (item.change.value or 0) > 0 else "speeds up"
        rows.append([" × ".join(item.factors), kind, percent(item.change.value), limits(item.change), said])
    doc.table(["", "", "change", "interval, %", ""], rows, right=(2, 3))
    doc.say(
        "A main effect is the mean over all settings of the others. An interaction is how much more the options do"
        " together than their main effects say; near zero means that they add up."
    )


def _write_arm(doc: Document, arm: Arm) -> None:
    changes = [*arm.deltas, *([arm.money] if arm.money else [])]
    if not changes or arm.failure:
        return
    inner = Document()
    rows: list[list[Cell]] = [
        [
            c.name, value(c.a, c.unit), value(c.b, c.unit), signed(c.change, c.unit), percent(c.ratio),
            MISSING if c.again is None else percent(c.again), MISSING if c.verdict == "unknown" else c.verdict,
        ]
        for c in changes
    ]  # fmt: skip
    inner.table(["", "baseline", arm.name, "change", "relative", "A/A", ""], rows, right=range(1, 6))
    inner.items([[sentence(n)] for n in arm.notes])
    inner.say(
        "Memory, energy, garbage collection and cost are of all legs; the rest is of the two legs that were profiled."
        " A/A: what two legs that are alike differ by; up to three times that, or an overlap of a figure's own"
        " intervals, is the same."
    )
    doc.details(f"What else {arm.name} changes", inner)


def _write_predictions(doc: Document, result: WhatIfResult) -> None:
    doc.heading("Predicted, then measured")
    rows: list[list[Cell]] = []
    for arm in result.variants:
        foretold, change = arm.predicted, arm.change
        measured = percent(change.value) if change else MISSING
        if foretold is None:
            rows.append([arm.name, MISSING, measured, MISSING, "no model says what this does"])
            continue
        inside = "" if foretold.inside is None else "inside the interval" if foretold.inside else "outside it"
        error = MISSING if foretold.error is None else f"{foretold.error * 100:+.1f} points"
        rows.append([arm.name, percent(foretold.change), measured, error, inside])
    doc.table(["", "predicted", "measured", "error", "prediction"], rows, right=(1, 2, 3), wide=4)
    doc.items([[f"{arm.name}: {arm.predicted.how}."] for arm in result.variants if arm.predicted])


def parity_words(parity: Parity) -> str:
    """The losses in a sentence with their numbers."""
    parts = [parity.why]
    if parity.difference is not None and parity.largest:
        apart = "" if parity.low is None else f" [{parity.low:+.3g}, {parity.high:+.3g}]"
        parts.append(f"mean loss {parity.difference:+.3g}{apart} at equal seeds")
        parts.append(f"at most {number(parity.largest)} in a step")
        parts += [] if parity.spread is None else [f"another seed moves it by {number(parity.spread)}"]
        again = f"the baseline run again differs by at most {number(parity.rerun)} in a step"
        parts += [] if parity.rerun is None else [again]
    if parity.worst is not None and parity.gradient is not None:
        again = f" ({share(parity.worst_again)} run again)" if parity.worst_again is not None else ""
        tensor = f", most in {parity.worst_tensor}: {share(parity.worst)}{again}" if parity.worst else ""
        parts.append(f"gradient norm {percent(parity.gradient)}{tensor}")
    if parity.seeds:
        parts.append(f"{counted(parity.seeds, 'seed')} x {counted(parity.steps, 'step')}")
    return "; ".join(parts)


def _write_parity(doc: Document, result: WhatIfResult) -> None:
    said: list[list[Cell]] = [
        [f"{a.name}: {_PARITY[a.parity.verdict]}: {parity_words(a.parity)}."]
        for a in result.variants
        if a.parity and not a.failure
    ]
    if said:
        doc.heading("Losses")
        doc.items(said)


def _write_method(doc: Document, result: WhatIfResult) -> None:
    doc.heading("How it was measured")
    spec = result.spec
    level = f"{100 * result.level:.3g} %"
    early = f", at {level} each so that stopping early raises no false alarm" if spec.budget_s else f", at {level}"
    doc.say(
        f"{counted(result.rounds, 'complete round')} of {len(spec.arms())} legs, {_ENDED[result.status]}. Each leg is a"
        " fresh process group; baseline and variants alternate, the baseline runs twice a round (A/A). A leg counts"
        " once, by the median of its unprofiled steps; intervals are Student's t on the differences within"
        f" rounds{early}."
    )
    if result.noise is not None:
        doc.say(f"A leg of the same run differs from the next by {share(result.noise)} (one standard deviation).")
    doc.items([[sentence(n)] for n in result.notes])
    doc.say("Options: ", Code(command_of(spec) or "all default"), f". Took {seconds(result.seconds)}.")


def _write_legs(doc: Document, result: WhatIfResult) -> None:
    inner = Document()
    rows = [_leg(leg) for leg in result.legs]
    headers = ["round", "arm", "step", "steps", "loss, last", "memory", "took", "status"]
    inner.table(headers, rows, right=(0, 2, 3, 4, 5, 6), wide=7)
    doc.details(f"All {len(rows)} legs, in the order they were run", inner)


def _leg(leg: LegRecord) -> list[Cell]:
    last = list(leg.losses.values())[-1] if leg.losses else None
    status = leg.status if not leg.failure else f"{leg.status}: {leg.failure}"
    return [
        str(leg.round + 1),
        leg.arm,
        ms(leg.step_ms),
        count(leg.steps),
        number(last, 4),
        size(leg.peak_bytes),
        seconds(leg.seconds),
        status,
    ]


def render_static_dynamic(table: StaticDynamic, form: str, width: int = 80) -> str:
    """The static against dynamic table as "md", "text" or "json"; ends with a line feed."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(table), indent=2).decode() + "\n"
    doc = build_static_dynamic(table)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def build_static_dynamic(table: StaticDynamic) -> Document:
    """The table, the quoted ratios beside the measured ones, then the what-if's own evidence."""
    result, doc = table.result, Document()
    doc.heading("Static against dynamic", 1)
    doc.say(f"{result.title or 'the workload'}; costlab what-if ", Code(result.id), f", {result.created}.")
    headers = [
        "",
        "step",
        f"{table.unit}/s",
        "peak memory",
        "bytes a step",
        "speed-up",
        "interval",
        "memory",
        "traffic",
    ]
    rows: list[list[Cell]] = [
        [r.name, ms(r.step_ms), number(r.throughput), size(r.peak_bytes), size(r.comm_bytes), *_ratios(r)]
        for r in table.rows
    ]
    q = table.quoted
    quoted = [f"{q.speedup:.1f} x", "", f"{q.memory:.2f} x", f"{q.traffic:.2f} x"]
    rows.append(["quoted, not measured", MISSING, MISSING, MISSING, MISSING, *quoted])
    doc.table(headers, rows, right=range(1, 9), drop=(6, 2))
    doc.say(f"Ratios are against eager DDP. The last line is quoted for compiled FSDP: {q.source}.")
    doc.items([[f"{r.name}: {r.problem}"] for r in table.rows if r.problem])
    doc.blocks.append(Log(forest(result)))
    _write_predictions(doc, result)
    _write_parity(doc, result)
    _write_method(doc, result)
    _write_legs(doc, result)
    return doc


def _ratios(row: Row) -> list[Cell]:
    def times(ratio: float | None) -> str:
        return MISSING if ratio is None else f"{ratio:.2f} x"

    apart = ""
    if row.speedup_low is not None and row.speedup_high is not None:
        apart = f"[{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
    return [times(row.speedup), apart, times(row.memory_ratio), times(row.traffic_ratio)]


def render_accuracy(rows: Sequence[Accuracy]) -> str:
    """How good the predictions have been so far, one line a toggle; ends with a line feed."""
    doc = Document()
    doc.table(
        ["toggle", "predictions", "median error", "inside the interval"],
        [[r.toggle, count(r.count), f"{r.median_error * 100:.1f} points", f"{r.inside} of {r.count}"] for r in rows],
        right=(1, 2, 3),
    )
    return to_text(doc) if rows else "no prediction has been checked yet\n"

"""The recomputation sweep: real runs of one workload under each policy, time a step against peak memory.

Rounds of legs, each a run of its own, in the opposite order every other round so that a drift hits all policies alike.
A policy is on the Pareto front when no other is both as fast and as small. One that cannot run is a row with its
reason: `budget` below 1 is refused where the forward draws random numbers (pytorch#190758: silently wrong gradients).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from costlab.app.analysis.views import View
from costlab.app.figures import MISSING, ms, share, size
from costlab.app.report.document import Cell, Document, Log, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.app.text import plain
from costlab.app.whatif.legs import LauncherFactory, Launching, read_leg
from costlab.app.whatif.results import LegRecord
from costlab.probes.launch import Launcher, LaunchError
from costlab.probes.records import AnyEvent
from costlab.probes.spec import RunSpec, SpecError, validate

POLICIES = ("none", "block", "operator", "budget:0.75", "budget:0.5", "budget:0.25")
MARKS = "abcdefghijklmnopqrstuvwxyz"
WORTH = 0.01  # of the memory: less is within what two runs of one policy differ by
PLOT_WIDTH, PLOT_HEIGHT = 56, 12


def default_policies(spec: RunSpec) -> list[str]:
    """Those of POLICIES that `spec` can have: budgets need a compiled model."""
    return [p for p in POLICIES if spec.compile != "none" or not p.startswith("budget")]


class PolicyPoint(View, frozen=True, kw_only=True):
    """One policy: medians over its legs; `spread` is largest less smallest leg over the median."""

    policy: str
    step_ms: float | None = None
    low_ms: float | None = None  # fastest leg
    high_ms: float | None = None  # slowest leg
    peak_bytes: float | None = None  # largest leg
    legs: int = 0
    pareto: bool = False
    failure: str = ""
    advice: str = ""


class RecomputeSweep(View, frozen=True, kw_only=True):
    """All policies of one workload."""

    title: str
    spec: RunSpec
    points: list[PolicyPoint]
    rounds: int
    memory: str = ""  # what peak memory is of
    seconds: float = 0.0
    cancelled: bool = False


class Sweep:
    """Runs the legs; `cancel` may be called from a signal handler or another thread."""

    def __init__(
        self, spec: RunSpec, policies: Sequence[str], rounds: int, launcher: LauncherFactory = Launcher
    ) -> None:
        """Raises SpecError for a policy that is none, or that this spec cannot have."""
        self.spec = msgspec.structs.replace(
            spec, preset=None, checkpoint=False, profile_steps=0, lean=True, keep_raw=False
        )
        self.policies = list(dict.fromkeys(policies))
        self.rounds = rounds
        self._launcher = launcher
        self._current: Launching | None = None
        self._cancelled = False
        for policy in self.policies:
            validate(self.arm(policy))

    def arm(self, policy: str) -> RunSpec:
        """Options of one policy's legs."""
        return msgspec.structs.replace(self.spec, recompute=policy)

    def cancel(self) -> None:
        """End the running leg and the sweep; what was measured is kept."""
        self._cancelled = True
        if self._current is not None:
            self._current.cancel()

    def run(self, directory: Path, told: Callable[[str], None], on_event: Callable[[AnyEvent], None]) -> RecomputeSweep:
        """All rounds below `directory`; a policy that failed is left out of later rounds."""
        began, legs = time.monotonic(), list[LegRecord]()
        title = memory = ""
        for number in range(self.rounds):
            failed = {leg.arm for leg in legs if leg.status == "failed"}
            order = [p for p in self.policies if p not in failed]
            for policy in order if number % 2 == 0 else reversed(order):
                if self._cancelled:
                    break
                told(f"round {number + 1} of {self.rounds}: --recompute {policy}")
                leg, found = self._leg(policy, number, directory, on_event)
                legs.append(leg)
                title, memory = found[0] or title, found[1] or memory
        points = mark_pareto([point_of(p, [leg for leg in legs if leg.arm == p]) for p in self.policies])
        return RecomputeSweep(
            title=title, spec=self.spec, points=points, rounds=self.rounds, memory=memory,
            seconds=time.monotonic() - began, cancelled=self._cancelled,
        )  # fmt: skip

    def _leg(
        self, policy: str, number: int, directory: Path, on_event: Callable[[AnyEvent], None]
    ) -> tuple[LegRecord, tuple[str, str]]:
        path = directory / f"r{number + 1:02d}-{policy.replace(':', '-').replace('.', '_')}"
        began = time.monotonic()
        seed = self.spec.seed
        try:
            self._current = self._launcher(self.arm(policy), path)
            if self._cancelled:
                self._current.cancel()
            self._current.run(on_event)
            leg, report = read_leg(
                path, arm=policy, round_=number, position=0, seed=seed, seconds=time.monotonic() - began,
                directory=path.name,
            )  # fmt: skip
        except (LaunchError, SpecError) as error:
            failure = LegRecord(
                arm=policy, round=number, position=0, directory=path.name, seed=seed, status="failed",
                seconds=time.monotonic() - began, failure=str(error),
            )  # fmt: skip
            return failure, ("", "")
        finally:
            self._current = None
        peak = report.memory.peak if report.memory else None
        return leg, (report.run.title, peak.how if peak else "")


def point_of(policy: str, legs: Sequence[LegRecord]) -> PolicyPoint:
    """One policy's legs together."""
    failed = next((leg for leg in legs if leg.status == "failed"), None)
    if failed is not None:
        return PolicyPoint(policy=policy, legs=len(legs), failure=failed.failure, advice=failed.advice)
    times = [leg.step_ms for leg in legs if leg.step_ms is not None and leg.status == "complete"]
    peaks = [leg.peak_bytes for leg in legs if leg.peak_bytes is not None and leg.status == "complete"]
    return PolicyPoint(
        policy=policy,
        step_ms=statistics.median(times) if times else None,
        low_ms=min(times, default=None),
        high_ms=max(times, default=None),
        peak_bytes=max(peaks, default=None),
        legs=len(times),
    )


def mark_pareto(points: Sequence[PolicyPoint]) -> list[PolicyPoint]:
    """The points with `pareto` set; one without time or memory is never on the front."""
    known = [(p.step_ms, p.peak_bytes) for p in points if p.step_ms is not None and p.peak_bytes is not None]

    def on_front(point: PolicyPoint) -> bool:
        if point.step_ms is None or point.peak_bytes is None:
            return False
        here = (point.step_ms, point.peak_bytes)
        return not any(t <= here[0] and m <= here[1] and (t, m) != here for t, m in known)

    return [msgspec.structs.replace(p, pareto=on_front(p)) for p in points]


def render(sweep: RecomputeSweep, form: str, width: int = 80) -> str:
    """The sweep as "text", "md" or "json"; ends with a line feed."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(sweep), indent=2).decode() + "\n"
    doc = build(sweep)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def build(sweep: RecomputeSweep) -> Document:
    """Answer, table, plot, reasons."""
    doc = Document()
    doc.heading("Activation recomputation: time against memory", 1)
    rounds = f"{sweep.rounds} round{'s' * (sweep.rounds > 1)}"
    doc.say(f"{sweep.title or sweep.spec.workload}; {rounds} of real runs.")
    doc.say("Cancelled: what was complete is shown." if sweep.cancelled else "")
    doc.say(answer(sweep.points))
    base = next((p for p in sweep.points if p.policy == "none"), None)
    headers = ["", "policy", "step", "legs from-to", "against none", "peak memory", "against none", "Pareto"]
    doc.table(headers, [_row(n, p, base) for n, p in enumerate(sweep.points)], right=(2, 3, 4, 5, 6), wide=1, drop=(3,))
    drawn = plot(sweep.points)
    if drawn:
        doc.blocks.append(Log(drawn))
    doc.items([[f"{p.policy}: {sentence(p.failure)} {sentence(p.advice)}".strip()] for p in sweep.points if p.failure])
    doc.say(
        f"Step: median over legs of each leg's median, slowest rank. Peak memory: {sweep.memory or 'not measured'}."
    )
    return doc


def answer(points: Sequence[PolicyPoint]) -> str:
    """What to choose, in a sentence or two."""
    front = sorted((p for p in points if p.pareto), key=lambda p: p.step_ms or 0.0)
    if not front:
        return "No policy has both a time and a memory figure."
    if len(front) == 1:
        return f"{front[0].policy} is both the fastest and the smallest."
    kept = worthwhile(front)
    if len(kept) == 1:
        return (
            f"{kept[0].policy} is the fastest ({ms(kept[0].step_ms)}), and no other saves {share(WORTH)} of its"
            f" {size(kept[0].peak_bytes)}: recomputing buys nothing here."
        )
    steps = [f"{p.policy} ({ms(p.step_ms)}, {size(p.peak_bytes)})" for p in kept]
    return f"Worth choosing from, fastest first: {', '.join(steps)}. The others are slower without being smaller."


def worthwhile(front: Sequence[PolicyPoint]) -> list[PolicyPoint]:
    """Of the front, fastest first: the fastest, and each that saves at least 1 % of the memory of the one before."""
    kept: list[PolicyPoint] = []
    for point in front:
        if not kept or (point.peak_bytes or 0.0) <= (1 - WORTH) * (kept[-1].peak_bytes or 0.0):
            kept.append(point)
    return kept


def _row(number: int, p: PolicyPoint, base: PolicyPoint | None) -> list[Cell]:
    if p.failure:
        return [MARKS[number % 26], p.policy, "cannot run", "", "", "", "", ""]
    legs = f"{ms(p.low_ms)} - {ms(p.high_ms)}" if p.low_ms is not None else MISSING
    return [
        MARKS[number % 26], p.policy, ms(p.step_ms), legs, _against(p.step_ms, base.step_ms if base else None),
        size(p.peak_bytes), _against(p.peak_bytes, base.peak_bytes if base else None), "● yes" if p.pareto else "no",
    ]  # fmt: skip


def _against(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return MISSING
    change = value / base - 1
    return f"{'+' if change >= 0 else '-'}{share(abs(change))}"


def plot(points: Sequence[PolicyPoint], width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> list[str]:
    """Time upwards, memory to the right; policies by their letter, capital on the Pareto front."""
    known = [(n, p) for n, p in enumerate(points) if p.step_ms is not None and p.peak_bytes is not None]
    if not known:
        return []
    times, peaks = [p.step_ms or 0.0 for _, p in known], [p.peak_bytes or 0.0 for _, p in known]
    grid = [[" "] * width for _ in range(height)]
    for n, p in known:
        row = height - 1 - _place(p.step_ms or 0.0, times, height)
        mark = MARKS[n % 26].upper() if p.pareto else MARKS[n % 26]
        at = _place(p.peak_bytes or 0.0, peaks, width)
        while grid[row][at] != " " and at + 1 < width:
            at += 1
        grid[row][at] = mark
    labels = {0: ms(max(times)), height - 1: ms(min(times))}
    lines = [f"{labels.get(n, ''):>9} │{''.join(row).rstrip()}" for n, row in enumerate(grid)]
    left, right = size(min(peaks)), size(max(peaks))
    axis = f"{'':11}{left}{right:>{max(width - len(left), 1)}}"
    return [*lines, f"{'':10}└{'─' * width}", axis, plain("capital letters are on the Pareto front")]


def _place(value: float, values: Sequence[float], cells: int) -> int:
    low, high = min(values), max(values)
    return round((value - low) / (high - low) * (cells - 1)) if high > low else cells // 2

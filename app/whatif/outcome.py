"""From legs to the result: estimates, verdicts, parity, deltas, predictions with their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costlab.app.analysis.compare import Change
from costlab.app.analysis.views import Figure, RunReport
from costlab.app.figures import counted
from costlab.app.whatif import stats
from costlab.app.whatif.deltas import deltas, money_change, typical
from costlab.app.whatif.legs import MEMORY_KINDS, missing_bytes, saves
from costlab.app.whatif.parity import judge
from costlab.app.whatif.predict import checked
from costlab.app.whatif.put_in import put_in
from costlab.app.whatif.results import Arm, FactorEffect, LegRecord, Prediction, SaveEffect, WhatIfResult, WhatIfStatus
from costlab.app.whatif.saves import save_effect
from costlab.app.whatif.spec import BASELINE, CONTROL, Variant, WhatIfSpec
from costlab.probes.records import Environment

NOTES = 8  # of one arm
RARE = (
    "steps are compared by their medians, which collections in a few of them do not move: see the mean time of garbage "
    "collection per step, where there was any"
)


@dataclass
class Evidence:
    """All that has been measured so far."""

    id: str
    created: str
    spec: WhatIfSpec
    spec_key: str
    environment_key: str
    legs: list[LegRecord] = field(default_factory=list)
    reports: dict[str, RunReport] = field(default_factory=dict)  # of each arm's first complete leg
    predictions: dict[str, Prediction | None] = field(default_factory=dict)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def of(self, arm: str) -> list[LegRecord]:
        """The arm's complete legs with a step time."""
        return [leg for leg in self.legs if leg.arm == arm and leg.status == "complete" and leg.step_ms]

    def rounds(self) -> list[Mapping[str, float]]:
        """Log of time per unit, by arm, of each round; time per step where every step does the same work."""
        out: dict[int, dict[str, float]] = {}
        for leg in self.legs:
            if leg.status == "complete" and leg.step_ms:
                out.setdefault(leg.round, {})[leg.arm] = math.log(leg.step_ms / (leg.units_per_step or 1))
        return [out[r] for r in sorted(out)]

    def quiet_rounds(self) -> list[Mapping[str, float]]:
        """The rounds that estimates are made from: those without a disturbed leg."""
        return stats.undisturbed(self.rounds())

    def failed(self, arm: str) -> LegRecord | None:
        """The arm's leg that failed."""
        return next((leg for leg in self.legs if leg.arm == arm and leg.status == "failed"), None)


def conclude(evidence: Evidence, status: WhatIfStatus, level: float) -> WhatIfResult:
    """The result of what has been measured so far."""
    spec, rounds = evidence.spec, evidence.quiet_rounds()
    report = evidence.reports.get(BASELINE)
    control = stats.effect(rounds, CONTROL, level)
    cost = report.cost if report else None
    return WhatIfResult(
        id=evidence.id,
        created=evidence.created,
        title=report.run.title if report else "",
        status=status,
        spec=spec,
        spec_key=evidence.spec_key,
        environment_key=evidence.environment_key,
        environment=report.environment if report else Environment(),
        unit=report.run.unit if report else "",
        baseline=_baseline(evidence),
        control=_arm(evidence, Variant(name=CONTROL, options={}), rounds, control, level),
        variants=[_arm(evidence, v, rounds, control, level) for v in spec.variants],
        effects=_effects(spec, rounds, level) if spec.factorial else [],
        rounds=len(stats.complete_rounds(rounds, [])),
        level=level,
        noise=control.noise if control else None,
        price=cost.price_per_gpu_hour if cost else None,
        currency=cost.currency if cost else "USD",
        legs=list(evidence.legs),
        seconds=evidence.seconds,
        notes=[*evidence.notes, *_disturbed(evidence, rounds), *_remarks(spec, control), *_few(rounds)],
    )


def _disturbed(evidence: Evidence, kept: list[Mapping[str, float]]) -> list[str]:
    out = len(evidence.rounds()) - len(kept)
    more = len(stats.complete_rounds(kept, [])) - evidence.spec.legs
    notes = []
    if out:
        which = "round was" if out == 1 else "rounds were"
        notes = [f"{out} {which} disturbed and left out: a leg lay far off what its arm and its round have in common"]
    if more > 0:
        why = "an earlier one looked disturbed, and beside the new legs does not"
        notes.append(f"{counted(more, 'round')} more than asked: {why}")
    return notes


def _few(rounds: list[Mapping[str, float]]) -> list[str]:
    """Why intervals of two rounds are wide: at 98 %, Student's t is 31.8 of one degree of freedom and 7.0 of two."""
    if len(stats.complete_rounds(rounds, [])) != 2:
        return []
    return ["two rounds can hardly tell noise from an effect: a third makes the intervals two to five times narrower"]


def _remarks(spec: WhatIfSpec, control: stats.Estimate | None) -> list[str]:
    notes = []
    if control is not None and not control.low <= 0 <= control.high:
        notes.append(
            "the A/A control differs from its own baseline: expected of 1 in 50 what-ifs, or the machine was not quiet"
        )
    if len(spec.variants) >= 5:
        notes.append(
            f"each interval holds with its own probability; of {len(spec.variants)} variants without any effect about"
            f" {stats.ALPHA * len(spec.variants):.1f} would be called different at {100 * (1 - stats.ALPHA):.0f} %"
        )
    return notes


def _step_figure(evidence: Evidence, arms: Sequence[str]) -> Figure | None:
    value = typical(evidence.legs, arms, "step_ms")
    if value is None:
        return None
    count = sum(len(evidence.of(a)) for a in arms)
    how = "median over legs of each leg's median unprofiled step, slowest rank"
    return Figure(value=value, unit="ms", source="measured", how=how, n=count)


def _baseline(evidence: Evidence) -> Arm:
    failed = evidence.failed(BASELINE) or evidence.failed(CONTROL)
    first = next(iter(evidence.of(BASELINE)), None)
    return Arm(
        name=BASELINE,
        verdict="invalid" if failed or first is None else "no difference",
        step_ms=_step_figure(evidence, [BASELINE, CONTROL]),
        legs=len(evidence.of(BASELINE)) + len(evidence.of(CONTROL)),
        run=first.directory if first else "",
        **_failure(failed),  # type: ignore[arg-type]
    )


def _failure(leg: LegRecord | None) -> dict[str, object]:
    if leg is None:
        return {}
    lacking = leg.failure_kind in MEMORY_KINDS
    return {
        "fits": not lacking,
        "needs_bytes": missing_bytes(leg.failure) if lacking else None,
        "failure": leg.failure,
        "advice": leg.advice,
    }


def change_figure(estimate: stats.Estimate | None, measure: str) -> Figure | None:
    """A relative change with its interval."""
    if estimate is None:
        return None
    how = (
        f"change of the {measure}, paired within {estimate.rounds} rounds; Student's t on legs,"
        f" {100 * estimate.level:.3g} % interval"
    )
    return Figure(
        value=estimate.change,
        unit="fraction",
        source="measured",
        how=how,
        n=estimate.rounds,
        low=estimate.low,
        high=estimate.high,
    )


def _arm(
    evidence: Evidence,
    variant: Variant,
    rounds: list[Mapping[str, float]],
    control: stats.Estimate | None,
    level: float,
) -> Arm:
    name = variant.name
    failed, own = evidence.failed(name), evidence.of(name)
    estimate = control if name == CONTROL else stats.effect(rounds, name, level)
    measure = _measure(evidence, name)
    change = change_figure(estimate, measure)
    prediction = evidence.predictions.get(name)
    if estimate is not None:
        prediction = checked(prediction, estimate.change, estimate.low, estimate.high)
    return Arm(
        name=name,
        options=variant.options,
        factors=variant.factors,
        verdict="invalid" if failed else _verdict(estimate, control, own_control=name == CONTROL),
        measure=measure,
        step_ms=_step_figure(evidence, [name]),
        change=change,
        predicted=prediction,
        parity=judge(evidence.legs, name, variant.options),
        deltas=deltas(evidence.legs, name, *(evidence.reports.get(a) for a in (BASELINE, name, CONTROL))),
        money=_money(evidence, name),
        saves=_saves(evidence, name),
        legs=len(own),
        run=own[0].directory if own else "",
        notes=_own_notes(evidence, name),
        **_failure(failed),  # type: ignore[arg-type]
    )


def _own_notes(evidence: Evidence, name: str) -> list[str]:
    """What the arm's options put in, and what its run notes and the baseline's does not: a fall-back, for example."""
    before, after = evidence.reports.get(BASELINE), evidence.reports.get(name)
    if before is None or after is None:
        return []
    notes = [*put_in(before, after), *(n for n in after.run.notes if n not in before.run.notes)]
    if before.run.spec.get("gc") != after.run.spec.get("gc"):
        notes.insert(0, RARE)
    return notes[:NOTES]


def _verdict(estimate: stats.Estimate | None, control: stats.Estimate | None, *, own_control: bool) -> stats.Verdict:
    if own_control and estimate is not None:
        return "no difference" if estimate.low <= 0 <= estimate.high else "faster" if estimate.change < 0 else "slower"
    return stats.decide(estimate, control)


def _measure(evidence: Evidence, name: str) -> str:
    """What is compared: the step, or the time per unit where the variant's step does other work."""
    before = {leg.units_per_step for leg in evidence.of(BASELINE)}
    after = {leg.units_per_step for leg in evidence.of(name)}
    report = evidence.reports.get(BASELINE)
    unit = (report.run.unit if report else "unit").removesuffix("s")
    return "step time" if not after or before == after else f"time per {unit}"


def _saves(evidence: Evidence, name: str) -> SaveEffect | None:
    if not saves(evidence.spec, name):
        return None
    before, after = (evidence.reports.get(arm) for arm in (BASELINE, name))
    return save_effect(before, after, evidence.spec.baseline, evidence.spec.arm(name))


def _money(evidence: Evidence, name: str) -> Change | None:
    before, after = typical(evidence.legs, [BASELINE, CONTROL], "step_ms"), typical(evidence.legs, [name], "step_ms")
    base, own = evidence.reports.get(BASELINE), evidence.reports.get(name)
    if before is None or after is None or base is None or own is None:
        return None
    return money_change(
        base, (before, base.run.units_per_step, base.run.ranks), (after, own.run.units_per_step, own.run.ranks)
    )


def _effects(spec: WhatIfSpec, rounds: list[Mapping[str, float]], level: float) -> list[FactorEffect]:
    arms = {v.name: frozenset(v.factors) for v in spec.variants} | {BASELINE: frozenset()}
    out = []
    for found in stats.factorial_effects(rounds, arms, level):
        figure = change_figure(found.estimate, "step time")
        if figure is not None:
            out.append(FactorEffect(factors=list(found.factors), change=figure))
    return out

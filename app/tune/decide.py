"""From measured legs to decisions: what won beyond the noise is kept, everything else dropped with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from costlab.app.analysis.views import BeforeAfter, CandidateView, FusionView
from costlab.app.whatif.results import Arm, WhatIfResult
from costlab.kernels.fused.plan import Guards, Measured, Plan, Policy, Rewrite, environment_key
from costlab.probes.tune_records import Scan

TOGETHER = "all candidates"
MOST_WHY = 300
_DTYPES = ("float32", "bfloat16", "float16")


def rewrite_of(candidate: CandidateView, scan: Scan) -> Rewrite:
    """The plan's entry of a candidate."""
    kinds = {s.dtype for s in scan.sites if s.kernel == candidate.kernel and s.where == candidate.where}
    dtypes = tuple(sorted(k for k in kinds if k in _DTYPES)) if candidate.how == "pattern" else ()
    policies = [p for p, on in (("roofline", candidate.roofline), ("seed", candidate.seed)) if on]
    measured = None
    if candidate.change is not None and candidate.change_low is not None and candidate.change_high is not None:
        measured = Measured(
            change=candidate.change,
            low=candidate.change_low,
            high=candidate.change_high,
            n=0,
            ms=candidate.measured_ms,
        )
    return Rewrite(
        kernel=candidate.kernel,
        how=candidate.how,  # type: ignore[arg-type]
        where=candidate.where,
        guards=Guards(dtypes=dtypes),  # type: ignore[arg-type]
        places=candidate.places,
        predicted_ms=candidate.predicted_ms,
        predicted_how=candidate.predicted_how[:MOST_WHY],
        lost_bytes=candidate.lost,
        kernel_bytes=candidate.kernel_bytes,
        measured=measured,
        decision=candidate.decision,  # type: ignore[arg-type]
        why=candidate.why[:MOST_WHY],
        chosen_by=tuple(policies),  # type: ignore[arg-type]
    )


def plan_of(found: Sequence[CandidateView], scan: Scan, title: str, policy: Policy, notes: Sequence[str]) -> Plan:
    """The plan of all candidates for which there is a kernel."""
    return Plan(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=title[:MOST_WHY],
        policy=policy,
        environment=scan.environment,
        key=environment_key(scan.environment),
        rewrites=tuple(rewrite_of(c, scan) for c in found if c.how != "none"),
        notes=tuple(n[:MOST_WHY] for n in notes),
    )


def decide(found: Sequence[CandidateView], tried: Sequence[str], result: WhatIfResult | None) -> list[CandidateView]:
    """The candidates with what was measured of each and the decision."""
    arms = {arm.name: arm for arm in result.variants} if result else {}
    together = arms.get(TOGETHER)
    step = result.baseline.step_ms.value if result and result.baseline.step_ms else None
    if any(_won(arm) for name, arm in arms.items() if name != TOGETHER):
        # What won alone explains the joint win: it is no evidence for those that did not.
        together = None
    return [_one(c, c.name in tried, arms.get(c.name), together, step, len(tried)) for c in found]


def _one(
    c: CandidateView, tried: bool, arm: Arm | None, together: Arm | None, step: float | None, count: int
) -> CandidateView:
    if c.how == "none":
        return c
    if c.checked is False:
        return _decided(c, "dropped", f"its numerics are not the plain step's: {c.check}")
    if not tried:
        return _decided(c, "dropped", "the policy does not choose it")
    measured = arm or (together if count == 1 else None)
    if measured is not None:
        c = with_change(c, measured, step)
        decision, why = verdict(measured)
        if measured.verdict == "no difference" and together is not None and _won(together):
            return _decided(c, "kept", f"{why} alone; all candidates together win")
        return _decided(c, decision, why)
    if together is not None:
        decision, why = verdict(together)
        return _decided(c, decision, f"measured with all {count} candidates together: {why}")
    return c


def _won(arm: Arm) -> bool:
    return verdict(arm)[0] == "kept"


def verdict(arm: Arm) -> tuple[str, str]:
    """Kept, dropped, or untried where too few rounds were run to tell; and why."""
    if arm.failure:
        return "dropped", f"its run failed: {arm.failure}"
    if arm.parity is not None and arm.parity.verdict == "different":
        return "dropped", f"its losses are not the baseline's: {arm.parity.why}"
    amount = "" if arm.change is None or arm.change.value is None else f"{arm.change.value * 100:+.1f} %"
    if arm.verdict == "faster":
        return "kept", f"faster beyond the noise ({amount})"
    if arm.verdict == "slower":
        return "dropped", f"slower ({amount})"
    if not amount:
        return "untried", "not measured: it ended before two rounds of legs were complete"
    return "dropped", f"no difference beyond the noise ({amount})"


def with_change(c: CandidateView, arm: Arm, step: float | None) -> CandidateView:
    """The candidate with the arm's measured change."""
    if arm.change is None or arm.change.value is None:
        return c
    return msgspec.structs.replace(
        c,
        change=arm.change.value,
        change_low=arm.change.low,
        change_high=arm.change.high,
        measured_ms=None if step is None else -arm.change.value * step,
    )


def _decided(c: CandidateView, decision: str, why: str) -> CandidateView:
    return msgspec.structs.replace(c, decision=decision, why=why)


def before_after(before: FusionView | None, after: FusionView | None) -> list[BeforeAfter]:
    """The layers of both traces side by side, by path; [] where one of them is missing."""
    if before is None or after is None:
        return []
    others = {row.path: row for row in after.layers}
    rows = []
    for row in before.layers:
        other = others.get(row.path)
        rows.append(
            BeforeAfter(
                path=row.path,
                label=row.label,
                depth=row.depth,
                rate=row.rate,
                ms=row.ms,
                lost=row.lost,
                rate_after=other.rate if other else None,
                ms_after=other.ms if other else None,
                lost_after=other.lost if other else None,
            )
        )
    return rows

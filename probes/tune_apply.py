"""Puts a plan's rewrites into a workload, and says what became of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costlab.probes.worker import RankRun
    from costlab.probes.workloads.base import Workload


def put_in_plan(run: RankRun, workload: Workload) -> None:
    """Apply the plan of the run's spec to model and loss; what is kept unfused, and why, goes to the run's facts."""
    from costlab.kernels.fused.planned import apply
    from costlab.probes.workloads.base import batch_beside

    facts = run.facts
    applied = apply(workload.model, run.spec.plan)
    loss = applied.fused_loss(workload.loss, batch_beside(workload))
    facts.fused = list(applied.swapped)
    if loss is not None:
        workload.loss = loss
        facts.fused.append("linear_cross_entropy: loss")
    patterns = [] if applied.idle else [r for r in applied.plan.kept() if r.how == "pattern"]
    facts.fused += [f"{r.kernel}: {r.where or 'model'} (in the compiled graph)" for r in patterns]
    facts.fused_notes += applied.findings
    run.voice.log(f"{len(facts.fused)} rewrites of the plan put in")
    for note in facts.fused_notes:
        run.voice.log(note, "warning")

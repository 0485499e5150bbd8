"""All rules, and how their findings are ranked."""

from __future__ import annotations

from collections.abc import Callable

from costlab.app.analysis.views import Finding, RunReport
from costlab.app.diagnosis import (
    checkpoint,
    communication,
    compilation,
    fusion,
    idle,
    memory,
    patterns,
    precision,
    quality,
)
from costlab.app.diagnosis.rule import Context, Rule

RULES: dict[str, Rule] = {
    "uncompiled": compilation.uncompiled,
    "broken-fusion": fusion.broken,
    "missed-fusion": fusion.missed,
    "anti-pattern": patterns.patterns,
    "launch-bound": idle.launch_bound,
    "host-sync": idle.host_sync,
    "data-loading": idle.data_loading,
    "garbage-collection": idle.garbage_collection,
    "exposed-communication": communication.exposed,
    "straggler": communication.straggler,
    "communicated-bytes": communication.unexpected_bytes,
    "graph-break": compilation.graph_breaks,
    "passed-over": compilation.passed_over,
    "recompiles": compilation.recompiles,
    "compile-cost": compilation.cost,
    "cache-misses": compilation.cold_cache,
    "checkpoint-stall": checkpoint.stall,
    "checkpoint-damaged": checkpoint.damaged,
    "memory-free": memory.room,
    "memory-full": memory.tight,
    "recompute-unneeded": memory.recompute,
    "low-precision": precision.full_precision,
    "loss-not-finite": quality.loss,
    "trace-quality": quality.trace,
    "profiler-cost": quality.profiler,
    "unsteady-steps": quality.unsteady,
}

# What makes the run itself worthless stands before all that could be saved.
_FIRST = frozenset({"loss-not-finite", "checkpoint-damaged"})
# Where a finding without a modelled saving stands among the others: as if it saved this share of the step.
_ASSUMED = {"high": 0.05, "medium": 0.01, "low": 0.001, "info": 0.0}


def diagnose(report: RunReport, note: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """All findings of `report`, the largest saving first. A rule that fails is named to `note` and skipped."""
    context, found = Context(report), []
    for name, rule in RULES.items():
        try:
            found += rule(context)
        except Exception as error:
            note(f"rule {name} failed ({type(error).__name__}: {error})")
    return sorted(found, key=_rank)


def _rank(finding: Finding) -> tuple[bool, float, str]:
    known = finding.saves_share
    return finding.id not in _FIRST, -(_ASSUMED[finding.severity] if known is None else known), finding.id

"""Anti-patterns whose cost the byte accounting of missed fusions does not already name."""

from __future__ import annotations

from costlab.app.analysis.views import Finding, PatternView
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import count, size

# The rest is told by missed-fusion, graph-break and recompiles, with its cost.
KINDS = frozenset({"mutation", "opaque_op", "op_without_fake", "library_rng", "cross_device", "per_parameter_loop"})
MOST = 3


def patterns(context: Context) -> list[Finding]:
    """At most three lines of code that cost fusion, the costliest first."""
    fusion = context.report.fusion
    found = [p for p in fusion.patterns if p.kind in KINDS] if fusion else []
    return [_finding(context, p) for p in found[:MOST]]


def _finding(context: Context, pattern: PatternView) -> Finding:
    where = f" in {pattern.layer}" if pattern.layer else ""
    return context.finding(
        "anti-pattern",
        f"{pattern.text[:1].upper()}{pattern.text[1:]}{where}",
        [
            f"{size(pattern.bytes)} of traffic a call of the graph" if pattern.bytes else "",
            f"seen {count(pattern.count)} times" if pattern.count > 1 else "",
            f"operators: {pattern.ops}" if pattern.ops else "",
        ],
        f"{pattern.mend[:1].upper()}{pattern.mend[1:]}.",
        saves_ms=pattern.saves_ms,
        how="traffic of one call of the graph / measured copy bandwidth" if pattern.saves_ms else "",
        layer=pattern.layer,
        where=pattern.source,
    )

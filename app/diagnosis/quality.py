"""How far the trace can be trusted."""

from __future__ import annotations

from costlab.app.analysis.views import Finding
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, share

QUALITY, SLOWER, SPREAD = 0.9, 1.5, 0.15


def trace(context: Context) -> list[Finding]:
    """Less than 90 % of kernel time has a span with a whole chain of parents."""
    view = context.report.fusion
    if view is None or view.quality is None or view.quality.value is None or view.quality.value >= QUALITY:
        return []
    return [
        context.finding(
            "trace-quality",
            f"Only {share(view.quality.value)} of kernel time is tied to a layer",
            [f"{view.quality.n or 0:,} kernel spans: {view.quality.how}", view.note],
            "Read the fusion figures as a part of the step. A cold compile is needed for the fusion trace, and eager "
            "layers have no spans.",
            severity="info",
            source="derived",
        )
    ]


def loss(context: Context) -> list[Finding]:
    """Some timed step had no finite loss."""
    steps = context.report.steps
    if steps is None or not steps.loss_bad:
        return []
    reduced = context.report.run.dtype == "bf16"
    return [
        context.finding(
            "loss-not-finite",
            f"The loss is not a finite number in {steps.loss_bad} of {len(steps.series_ms)} timed steps",
            [
                f"first in timed step {steps.loss_bad_from}",
                "times stay true, but they are of a training that has failed",
            ],
            "Look for a bad batch, too high a learning rate (--lr), a logarithm or division that meets zero, or a "
            "range that 16 bits do not have.",
            severity="high",
            source="measured",
            proves="--dtype fp32" if reduced else "",
        )
    ]


def profiler(context: Context) -> list[Finding]:
    """Profiled steps are at least half as long again as plain ones."""
    steps = context.report.steps
    if steps is None or steps.profiled_ms is None or not context.step_ms:
        return []
    if steps.profiled_ms < SLOWER * context.step_ms:
        return []
    return [
        context.finding(
            "profiler-cost",
            f"The profiler makes steps {steps.profiled_ms / context.step_ms:.1f} times as long",
            [f"profiled step {ms(steps.profiled_ms)}, plain step {ms(context.step_ms)}"],
            "Step times are those of plain steps; read the division of idle time by cause as approximate.",
            severity="info",
            source="measured",
        )
    ]


def unsteady(context: Context) -> list[Finding]:
    """The middle 80 % of the timed steps spread over at least 15 % of their median."""
    steps = context.report.steps
    if steps is None or steps.p10_ms is None or steps.p90_ms is None or not context.step_ms:
        return []
    spread = steps.p90_ms - steps.p10_ms
    if spread < SPREAD * context.step_ms:
        return []
    return [
        context.finding(
            "unsteady-steps",
            f"Step times vary by {share(spread / context.step_ms)}: small differences between runs mean nothing",
            [f"10th to 90th percentile of {steps.step_ms.n or 0} steps: {ms(steps.p10_ms)} to {ms(steps.p90_ms)}"],
            "Run on an otherwise idle machine, with fixed clocks and more steps (--steps 50), before comparing runs.",
            severity="info",
            source="measured",
            proves="--steps 50",
        )
    ]

"""What every rule works with: the report, its step time and prices, and the making of a finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from costlab.app.analysis.cost import money_per_ms
from costlab.app.analysis.views import Finding, RunReport, Source
from costlab.app.figures import ms, share

Severity = Literal["high", "medium", "low", "info"]
HIGH, MEDIUM = 0.05, 0.015  # share of the step from which a saving counts as that


class Context:
    """One report with the figures that most rules need."""

    def __init__(self, report: RunReport) -> None:
        self.report = report
        self.spec: dict[str, Any] = report.run.spec

    @cached_property
    def step_ms(self) -> float | None:
        """Median unprofiled step, None where none was measured."""
        return self.report.steps.step_ms.value if self.report.steps else None

    @cached_property
    def parts(self) -> dict[str, float]:
        """Part of the waterfall -> ms; empty without a waterfall."""
        return {p.name: p.ms for p in self.report.waterfall.parts} if self.report.waterfall else {}

    @property
    def on_gpu(self) -> bool:
        """Whether the run's devices are GPUs."""
        return self.report.run.device == "cuda"

    @property
    def compiled(self) -> bool:
        """Whether anything was compiled."""
        return self.report.run.compile not in ("", "none")

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the run."""
        value = self.spec.get(name)
        return default if value is None else value

    def of_step(self, part_ms: float) -> str:
        """ "8.9 ms of 114 ms (7.8 %)" """
        if not self.step_ms:
            return ms(part_ms)
        return f"{ms(part_ms)} of {ms(self.step_ms)} ({share(part_ms / self.step_ms)})"

    def share_of(self, part_ms: float | None) -> float | None:
        """Share of the step, None where either is unknown."""
        return part_ms / self.step_ms if part_ms is not None and self.step_ms else None

    def money(self, saved_ms: float | None) -> tuple[float | None, float | None]:
        """What `saved_ms` a step is worth per 1 M units and over the planned run."""
        cost, units = self.report.cost, self.report.run.units_per_step
        if saved_ms is None or cost is None or cost.price_per_gpu_hour is None:
            return None, None
        step = money_per_ms(cost.price_per_gpu_hour.value or 0.0, cost.gpus) * saved_ms
        return (step * 1e6 / units if units else None), (step * cost.run_steps if cost.run_steps else None)

    def finding(
        self,
        rule: str,
        title: str,
        evidence: Sequence[str],
        action: str,
        *,
        saves_ms: float | None = None,
        severity: Severity | None = None,
        source: Source = "modelled",
        how: str = "",
        proves: str = "",
        layer: str = "",
        where: str = "",
    ) -> Finding:
        """A finding with share and money worked out; without `severity` it follows from the share of the step."""
        part = self.share_of(saves_ms)
        per_million, per_run = self.money(saves_ms)
        return Finding(
            id=rule,
            title=title,
            severity=severity or severity_of(part),
            evidence=[e for e in evidence if e],
            action=action,
            saves_ms=saves_ms,
            saves_share=part,
            saves_money=per_million,
            saves_run_money=per_run,
            source=source,
            how=how,
            proves=proves,
            layer=layer,
            where=where,
        )


Rule = Callable[[Context], list[Finding]]


def severity_of(part: float | None) -> Severity:
    """Severity from the share of the step that is saved; "low" where it is not known."""
    if part is None:
        return "low"
    return "high" if part >= HIGH else "medium" if part >= MEDIUM else "low"

"""Money: price per GPU-hour times time."""

from __future__ import annotations

import msgspec

from costlab.app.analysis.views import CheckpointView, CostView, Figure, StepsView
from costlab.app.figures import money
from costlab.app.pricing import Quote, quote_for
from costlab.probes.records import Environment, WorkloadFacts


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the run's owner said of its price and length; from the run's options."""

    price: float | None = None
    price_note: str = ""
    run_steps: int = 0


def cost_view(
    environment: Environment,
    facts: WorkloadFacts,
    ranks: int,
    steps: StepsView | None,
    checkpoint: CheckpointView | None,
    plan: Plan,
) -> CostView:
    """Cost per step, per 1 M units and per run. Without a price everything is None and the note says why."""
    quote, problem = quote_for(environment, plan.price, plan.price_note)
    if quote is None:
        return CostView(gpus=ranks, run_steps=plan.run_steps, note=problem)
    price = Figure(value=quote.per_hour, unit=f"{quote.currency}/{quote.per}", source="quoted", how=quote.note)
    step = _per_step(quote, ranks, steps)
    return CostView(
        price_per_gpu_hour=price,
        currency=quote.currency,
        price_date=quote.date,
        gpus=ranks,
        per_step=step,
        per_million=_scaled(step, 1e6 / facts.units_per_step, f" per 1 M {facts.unit}")
        if facts.units_per_step
        else None,
        per_run=_scaled(step, plan.run_steps, f" per {plan.run_steps:,} steps") if plan.run_steps else None,
        run_steps=plan.run_steps,
        note=_note(quote, ranks, checkpoint, plan.run_steps, problem),
    )


def money_per_ms(price_per_hour: float, gpus: int) -> float:
    """What one millisecond of all GPUs costs."""
    return price_per_hour * gpus / 3.6e6


def _per_step(quote: Quote, gpus: int, steps: StepsView | None) -> Figure | None:
    if steps is None or steps.step_ms.value is None:
        return None
    rate, ms = money_per_ms(quote.per_hour, gpus), steps.step_ms
    how = f"{quote.per_hour:g} {quote.currency}/{quote.per} x {gpus} x median step time"
    return Figure(
        value=rate * (ms.value or 0.0),
        unit=quote.currency,
        source="derived",
        how=how,
        n=ms.n,
        low=None if ms.low is None else rate * ms.low,
        high=None if ms.high is None else rate * ms.high,
    )


def _scaled(step: Figure | None, factor: float, per: str) -> Figure | None:
    if step is None or step.value is None or not factor:
        return None
    return Figure(
        value=step.value * factor,
        unit=step.unit + per,
        source="derived",
        how=f"cost of a step x {factor:,.6g}",
        n=step.n,
        low=None if step.low is None else step.low * factor,
        high=None if step.high is None else step.high * factor,
    )


def _note(quote: Quote, gpus: int, checkpoint: CheckpointView | None, run_steps: int, problem: str) -> str:
    """What the figures leave out."""
    parts = [problem] if problem else []
    stall = checkpoint.per_step_ms if checkpoint else None
    if stall and run_steps:
        extra = money_per_ms(quote.per_hour, gpus) * stall * run_steps
        chosen = checkpoint.chosen if checkpoint else "sync"
        saves = "synchronous saves" if chosen == "sync" else f"saves with {chosen}"
        parts.append(
            f"plain steps only; {saves} every {checkpoint.every_steps if checkpoint else 0:,} steps "
            f"would add {money(extra, quote.currency)} to the run"
        )
    return "; ".join(parts)

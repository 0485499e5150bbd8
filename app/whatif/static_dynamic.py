"""Static against dynamic: the same model as eager DDP, eager FSDP2 and compiled FSDP2, measured as one what-if."""

from __future__ import annotations

from typing import Any

import msgspec

from costlab.app.analysis.views import View
from costlab.app.whatif.results import Arm, WhatIfResult
from costlab.app.whatif.spec import Variant, WhatIfSpec, resolved
from costlab.probes.spec import RunSpec, validate

EAGER_DDP, EAGER_FSDP, COMPILED_FSDP, GRAPHED_FSDP = "eager DDP", "eager FSDP2", "compiled FSDP2", "+ CUDA graphs"


class Quoted(View, frozen=True, kw_only=True):
    """Ratios somebody else gave for compiled FSDP over eager DDP; quoted, not measured here."""

    speedup: float = 2.0
    memory: float = 0.69
    traffic: float = 0.58
    source: str = "the article costlab grew from; its set-up is not given"


class Row(View, frozen=True, kw_only=True):
    """One way to run the step. Ratios are against eager DDP; None where a figure was not measured."""

    name: str
    step_ms: float | None
    throughput: float | None  # units a second, all ranks
    peak_bytes: float | None
    comm_bytes: float | None  # one rank, one step
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    memory_ratio: float | None = None
    traffic_ratio: float | None = None
    problem: str = ""


class StaticDynamic(View, frozen=True, kw_only=True):
    """The table, with the what-if it was made of."""

    rows: list[Row]
    unit: str
    quoted: Quoted
    result: WhatIfResult


def static_dynamic_spec(
    spec: RunSpec, *, legs: int = 3, budget_s: float | None = None, cudagraphs: bool = False
) -> WhatIfSpec:
    """The what-if: `spec`'s own parallel and compile options are replaced; SpecError where one cannot work."""
    eager: dict[str, Any] = {"parallel": "ddp", "compile": "none", "cudagraphs": False, "checkpoint": False}
    baseline = msgspec.structs.replace(resolved(spec), **eager)
    compiled = {"parallel": "fsdp", "compile": spec.compile if spec.compile != "none" else "block"}
    variants = [
        Variant(name=EAGER_FSDP, options={"parallel": "fsdp"}),
        Variant(name=COMPILED_FSDP, options=dict(compiled)),
    ]
    if cudagraphs:
        variants.append(Variant(name=GRAPHED_FSDP, options={**compiled, "cudagraphs": True}))
    whatif = WhatIfSpec(baseline=baseline, variants=variants, legs=legs, budget_s=budget_s)
    for name in whatif.arms():
        validate(whatif.arm(name))
    return whatif


def static_dynamic(result: WhatIfResult) -> StaticDynamic:
    """The table of a finished what-if of `static_dynamic_spec`."""
    first = _figures(result, result.baseline)
    rows = [_row(EAGER_DDP, result.baseline, first, first)]
    rows += [_row(arm.name, arm, _figures(result, arm), first) for arm in result.variants]
    return StaticDynamic(rows=rows, unit=result.unit, quoted=Quoted(), result=result)


def _figures(result: WhatIfResult, arm: Arm) -> dict[str, float | None]:
    """Step, throughput, memory and traffic of an arm; the baseline's are the left sides of the variants' changes."""
    units = next((leg.units_per_step for leg in result.legs if leg.arm == arm.name and leg.units_per_step), 0)
    step = arm.step_ms.value if arm.step_ms else None
    return {
        "step": step,
        "throughput": units / step * 1e3 if step and units else None,
        "memory": _side(result, arm, "peak memory"),
        "traffic": _side(result, arm, "communicated bytes"),
    }


def _side(result: WhatIfResult, arm: Arm, name: str) -> float | None:
    if arm is result.baseline:
        found = [d.a for v in (*result.variants, result.control) for d in v.deltas if d.name == name]
        return next((v for v in found if v is not None), None)
    return next((d.b for d in arm.deltas if d.name == name), None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _row(name: str, arm: Arm, own: dict[str, float | None], base: dict[str, float | None]) -> Row:
    change = arm.change
    turned = [1 / (1 + v) if v is not None and v > -1 else None for v in (change.low, change.high)] if change else []
    return Row(
        name=name,
        step_ms=own["step"],
        throughput=own["throughput"],
        peak_bytes=own["memory"],
        comm_bytes=own["traffic"],
        speedup=1 / (1 + change.value) if change and change.value is not None else None,
        speedup_low=turned[1] if turned else None,
        speedup_high=turned[0] if turned else None,
        memory_ratio=_ratio(own["memory"], base["memory"]) if own is not base else None,
        traffic_ratio=_ratio(own["traffic"], base["traffic"]) if own is not base else None,
        problem=arm.failure,
    )

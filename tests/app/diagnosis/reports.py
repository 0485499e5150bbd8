"""Reports made by hand: a healthy one, and changes to it."""

from __future__ import annotations

from typing import Any

import msgspec

from costlab.app.analysis.views import (
    CheckpointLine,
    CheckpointView,
    CollectivesView,
    CollectiveView,
    CompileView,
    CostView,
    Figure,
    Finding,
    FusionView,
    LayerRow,
    MemoryPhase,
    MemoryView,
    MissView,
    Part,
    RunInfo,
    RunReport,
    StepsView,
    WaterfallView,
)
from costlab.app.diagnosis import RULES, diagnose
from costlab.app.diagnosis.rule import Context
from costlab.probes.records import Environment

STEP_MS = 100.0


def figure(value: float | None, unit: str = "ms", **more: Any) -> Figure:
    return Figure(value=value, unit=unit, source="measured", how="", **more)


def parts(wait: float | None = None, **ms: float) -> WaterfallView:
    """A waterfall of 100 ms, `wait` of its exposed communication waiting.

    Names have underscores for spaces and `idle_x` for "idle: x"; the rest is matrix math.
    """
    named = {n.replace("idle_", "idle: ").replace("_", " ").replace("memory b", "memory-b"): v for n, v in ms.items()}
    whole = {"matrix math": STEP_MS - sum(named.values())} | named
    shown = [Part(name=n, ms=v, share=v / STEP_MS) for n, v in whole.items()]
    return WaterfallView(step_ms=STEP_MS, parts=shown, wait_ms=wait)


def healthy(**changes: Any) -> RunReport:
    """Two H200, a compiled bf16 model, nothing to find; `changes` replace sections, `run__x` a field of the run."""
    run = RunInfo(
        id="r", title="t", status="complete", created="", duration_s=1.0, workload="llama", size="1b", ranks=2,
        device="cuda", parallel="fsdp", compile="block", dtype="bf16", unit="tokens", units_per_step=10_000,
        parameters=10, spec={"batch": 4, "run_steps": 100_000, "compile_mode": "default", "checkpoint_steps": 8},
    )  # fmt: skip
    for key in [k for k in changes if k.startswith("run__")]:
        run = msgspec.structs.replace(run, **{key.removeprefix("run__"): changes.pop(key)})
    spec = changes.pop("spec", {})
    run = msgspec.structs.replace(run, spec=run.spec | spec)
    base = RunReport(
        run=run,
        environment=Environment(device="cuda"),
        steps=StepsView(step_ms=figure(STEP_MS), per_rank_ms=[99.0, 100.0], host_ms=60.0, profiled_ms=110.0),
        waterfall=parts(),
        fusion=FusionView(rate=figure(0.97, "rate"), strict_rate=0.9, target=0.95, status="complete",
                          quality=figure(0.99, "fraction", n=10)),
        collectives=CollectivesView(wait_ms=0.0, transfer_ms=10.0, bytes_per_step=figure(100.0, "B"),
                                    expected_bytes=figure(100.0, "B")),
        checkpoint=None,
        compile=CompileView(cold_s=figure(10.0, "s"), warm_s=figure(2.0, "s"), amortised_ms=0.1),
        memory=memory(headroom=20.0),
        energy=None,
        cost=CostView(price_per_gpu_hour=figure(3.6, "USD/GPU-hour"), gpus=2, run_steps=100_000),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def memory(headroom: float, peak: float | None = None, build: float = 10.0) -> MemoryView:
    """Memory of a device of 100 bytes."""
    reserved = round(100 - headroom if peak is None else peak)
    phases = [
        MemoryPhase(phase="build", allocated_peak=round(build), reserved_peak=round(build), host_peak=1),
        MemoryPhase(phase="measure", allocated_peak=reserved, reserved_peak=reserved, host_peak=1),
    ]
    return MemoryView(peak=figure(reserved, "B"), headroom=figure(headroom, "B"), device_total=100, phases=phases)


def layer(path: str, status: str, **values: Any) -> LayerRow:
    base: dict[str, Any] = {
        "label": path.rpartition(".")[2], "depth": path.count(".") + 1 if path else 0, "layer_class": "X", "rate": 0.4,
        "target": 0.95, "ms": 5.0, "bytes": 100, "lost": 60, "structural": 0, "main_cause": "graph_break",
        "saves_ms": 2.0,
    }  # fmt: skip
    return LayerRow(path=path, status=status, **(base | values))  # type: ignore[arg-type]


def miss(path: str, cause: str, saves_ms: float | None, **values: Any) -> MissView:
    base: dict[str, Any] = {
        "phase": "forward", "cause_text": "why", "addressable": saves_ms is not None, "bytes": 10, "reason": "because",
        "producer": "aten.a", "consumer": "aten.b", "producer_source": "m.py:7", "consumer_source": "",
    }  # fmt: skip
    return MissView(layer=path, cause=cause, saves_ms=saves_ms, **(base | values))


def collective(**values: Any) -> CollectiveView:
    base: dict[str, Any] = {
        "kind": "all_gather", "group": "0,1", "group_size": 2, "dtype": "bf16", "calls": 4.0, "bytes_in": 50,
        "bytes_out": 100, "bytes_step": 400, "ms": 10.0, "transfer_ms": 5.0, "wait_ms": 5.0, "exposed_ms": 4.0,
        "algbw_gbps": 1.0, "busbw_gbps": 1.0,
    }  # fmt: skip
    return CollectiveView(**(base | values))


def line(mode: str, stall_ms: float | None, op: str = "save", **values: Any) -> CheckpointLine:
    stall = None if stall_ms is None else figure(stall_ms)
    base: dict[str, Any] = {"ok": True, "bytes": 1, "blocked_ms": 1.0, "total_ms": 1.0, "gbps": 1.0, "identical": None}
    return CheckpointLine(mode=mode, op=op, stall=stall, **(base | values))


def checkpoint(*lines: CheckpointLine, every: int = 500) -> CheckpointView:
    return CheckpointView(lines=list(lines), every_steps=every)


def found(rule: str, report: RunReport) -> list[Finding]:
    """What one rule says of a report."""
    return RULES[rule](Context(report))


def ids(report: RunReport) -> list[str]:
    """All findings' rules, in order."""
    return [f.id for f in diagnose(report)]

"""Checkpoint, compile, memory, energy and cost from their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costlab.app.analysis.checkpoint import best_save, checkpoint_view
from costlab.app.analysis.compilation import compile_view
from costlab.app.analysis.cost import Plan, cost_view, money_per_ms
from costlab.app.analysis.energy import energy_view
from costlab.app.analysis.memory import memory_view
from costlab.app.analysis.views import CheckpointView, CompileView, CostView, Figure, StepsView
from costlab.probes.records import (
    CheckpointRow,
    CheckpointStageRow,
    CompileRow,
    Environment,
    Gpu,
    MemoryRow,
    PowerRow,
    ResumeRow,
    WorkloadFacts,
)
from tests.app.analysis.tables import frame


@pytest.fixture(autouse=True)
def no_price_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))


def save(rank: int = 0, mode: str = "sync", op: str = "save", **values: Any) -> CheckpointRow:
    return CheckpointRow(**({"rank": rank, "mode": mode, "op": op, "ok": True} | values))


def checkpoint(*rows: CheckpointRow, every: int = 500) -> CheckpointView:
    view = checkpoint_view(frame(CheckpointRow, rows), every)
    assert view is not None
    return view


def test_a_save_is_as_slow_as_its_slowest_rank_and_as_large_as_all() -> None:
    view = checkpoint(
        save(0, bytes=4_000_000, total_ms=10.0, blocked_ms=9.0, stall_ms=100.0, stall_low_ms=90.0, stall_high_ms=110.0),
        save(
            1, bytes=6_000_000, total_ms=20.0, blocked_ms=8.0, stall_ms=120.0, stall_low_ms=115.0, stall_high_ms=130.0
        ),
    )
    (line,) = view.lines
    assert (line.bytes, line.total_ms, line.blocked_ms, line.gbps) == (10_000_000, 20.0, 9.0, 0.5)
    assert line.stall is not None
    assert (line.stall.value, line.stall.low, line.stall.high) == (120.0, 115.0, 130.0)
    assert view.per_step_ms == pytest.approx(0.24)


def test_the_best_save_is_whole_and_came_back_right() -> None:
    view = checkpoint(
        save(mode="sync", stall_ms=3000.0),
        save(mode="async:a", stall_ms=100.0),
        save(mode="async:b", stall_ms=50.0),
        save(mode="async:c", stall_ms=1.0, ok=False),
        save(mode="async:d", note="not run: no memory", ok=False),
        save(mode="async:b", op="load", identical=False),
        save(mode="async:a", op="load", identical=True),
    )
    assert view.best_mode == "async:a"
    assert [c.op for c in view.lines] == ["save"] * 5 + ["load"] * 2
    assert best_save([]) is None


def test_one_rank_that_came_back_wrong_is_enough() -> None:
    view = checkpoint(save(0, op="load", identical=True), save(1, op="load", identical=False))
    assert view.lines[0].identical is False
    unknown = checkpoint(save(0, op="load", identical=True), save(1, op="load"))
    assert unknown.lines[0].identical is None


def test_a_stall_not_measured_is_none_and_a_negative_one_costs_nothing() -> None:
    assert checkpoint(save(bytes=1)).per_step_ms is None
    assert checkpoint(save(stall_ms=-5.0)).per_step_ms == 0.0
    assert "no synchronous save" in checkpoint(save(mode="async:a", stall_ms=1.0)).note
    assert checkpoint_view(frame(CheckpointRow, []), 500) is None


def test_a_lossy_save_is_never_the_best_and_is_whole_within_its_bound() -> None:
    view = checkpoint(
        save(mode="sync", stall_ms=3000.0),
        save(mode="costlab:fp8", stall_ms=1.0, lossy=True, bits=8.2, update_error=0.02),
        save(1, mode="costlab:fp8", stall_ms=1.0, lossy=True, bits=8.3, update_error=0.03),
        save(mode="costlab:fp8", op="load", lossy=True, within_bound=True),
        save(1, mode="costlab:fp8", op="load", lossy=True, within_bound=False),
        save(mode="costlab:exact", stall_ms=5.0),
    )
    assert view.best_mode == "costlab:exact"
    lossy, load = (next(c for c in view.lines if (c.mode, c.op) == ("costlab:fp8", op)) for op in ("save", "load"))
    assert (lossy.lossy, lossy.bits, lossy.update_error) == (True, 8.3, 0.03)
    assert load.within_bound is False and load.identical is None


def test_the_stall_per_step_is_of_the_way_that_was_asked_for() -> None:
    rows = frame(CheckpointRow, [save(stall_ms=900.0, bytes=8), save(mode="costlab:fp8", stall_ms=5.0, bytes=2)])
    plain, fp8, absent = (checkpoint_view(rows, 500, codec) for codec in ("dcp", "fp8", "exact"))
    assert plain is not None and fp8 is not None and absent is not None
    assert (plain.per_step_ms, plain.bytes, plain.chosen) == (1.8, 8, "sync")
    assert (fp8.per_step_ms, fp8.bytes, fp8.chosen) == (0.01, 2, "costlab:fp8")
    assert absent.per_step_ms is None and "no save with costlab:exact was measured" in absent.note


def test_a_stage_is_its_slowest_ranks_and_its_pace_is_of_its_busy_time() -> None:
    def stage(rank: int, name: str, busy: float, **values: Any) -> CheckpointStageRow:
        return CheckpointStageRow(rank=rank, mode="costlab:exact", op="save", stage=name, busy_ms=busy, **values)

    rows = [
        stage(0, "write", 10.0, start_ms=5.0, end_ms=15.0, bytes=10_000_000, ceiling_gbps=2.0),
        stage(1, "write", 20.0, start_ms=5.0, end_ms=25.0, bytes=10_000_000, ceiling_gbps=2.0),
        stage(0, "launch", 3.0, start_ms=0.0, end_ms=3.0),
        stage(0, "encode", 1.0),
    ]
    view = checkpoint_view(frame(CheckpointRow, [save()]), 500, "dcp", frame(CheckpointStageRow, rows))
    assert view is not None
    assert [s.stage for s in view.stages] == ["encode", "launch", "write"]
    write = view.stages[-1]
    assert (write.busy_ms, write.gbps, write.of_ceiling) == (20.0, 0.5, 0.25)
    assert view.stages[0].gbps is None and view.stages[0].of_ceiling is None


def test_resumed_losses_are_the_mean_over_ranks() -> None:
    rows = [ResumeRow(rank=k, mode="costlab:fp8", after=1, loss=2.0 + k, exact_loss=1.0 + k) for k in range(2)]
    view = checkpoint_view(frame(CheckpointRow, [save()]), 500, resumed=frame(ResumeRow, rows))
    assert view is not None
    assert [(r.after, r.loss, r.exact_loss) for r in view.resumed] == [(1, 2.5, 1.5)]


def compiled(*rows: CompileRow, memory: tuple[MemoryRow, ...] = (), step_ms: float | None = 100.0) -> CompileView:
    view = compile_view(frame(CompileRow, rows), frame(MemoryRow, memory), step_ms, 1000, True)
    assert view is not None
    return view


def event(kind: str, rank: int = 0, run: str = "cold", **values: Any) -> CompileRow:
    return CompileRow(rank=rank, kind=kind, run=run, **values)  # type: ignore[arg-type]


def test_compile_time_is_that_of_the_slowest_rank() -> None:
    view = compiled(
        event("phase", name="total", seconds=8.0),
        event("phase", rank=1, name="total", seconds=9.0),
        event("phase", name="total", seconds=1.0, run="warm"),
        event("phase", name="dynamo", seconds=3.0),
        event("phase", name="first step", seconds=20.0),
    )
    assert view.cold_s is not None
    assert view.warm_s is not None
    assert (view.cold_s.value, view.warm_s.value, view.cold_s.source) == (9.0, 1.0, "measured")
    assert view.amortised_ms == pytest.approx(9.0)
    assert [(p.name, p.ms) for p in view.phases] == [("dynamo", 3000.0)]


def test_without_a_total_the_first_step_tells_and_then_the_graphs() -> None:
    first = compiled(event("phase", name="first step", seconds=5.0)).cold_s
    assert first is not None
    assert (first.value, first.source) == (pytest.approx(4.9), "derived")
    graphs = compiled(event("graph", name="0/0", seconds=2.0, count=5), event("graph", name="0/0", seconds=3.0)).cold_s
    assert graphs is not None
    assert graphs.value == 5.0
    assert compiled(event("break", detail="x")).cold_s is None


def test_breaks_and_recompiles_are_counted_once_over_ranks() -> None:
    view = compiled(
        *(event("break", rank=r, detail="print", source="m.py:1", count=2) for r in range(4)),
        event("break", detail="item", source="m.py:2"),
        event("break", detail="print", source="m.py:1", count=2, run="warm"),
        *(event("recompile", name=f"0/{n}", detail="size", source="m.py:3", seconds=1.5) for n in (1, 2)),
    )
    assert [(b.reason, b.source, b.count) for b in view.breaks] == [("print", "m.py:1", 2), ("item", "m.py:2", 1)]
    assert [(r.reason, r.count, r.seconds, r.compile_id) for r in view.recompiles] == [("size", 2, 3.0, "0/1")]


def test_what_differs_between_ranks_by_a_number_is_one_recompile() -> None:
    view = compiled(
        event("recompile", rank=0, name="2/1", detail="2/0: x == 4.5 # if x > 1:", source="m.py:3", seconds=1.0),
        *(
            event(
                "recompile", rank=1, name=f"2/{n}", detail=f"2/0: x == {n}.25 # if x > 1:", source="m.py:3", seconds=1.0
            )
            for n in (1, 2)
        ),
        event("recompile", rank=0, name="3/1", detail="3/0: y is None", source="m.py:9"),
    )
    assert [(r.reason, r.source, r.count) for r in view.recompiles] == [
        ("2/0: x == 1.25 # if x > 1:", "m.py:3", 1),
        ("2/0: x == 2.25 # if x > 1:", "m.py:3", 1),
        ("3/0: y is None", "m.py:9", 1),
    ]


def test_caches_are_three_counts_per_rank_and_run() -> None:
    view = compiled(
        event("cache", name="fx_graph", detail="hit", count=3),
        event("cache", name="fx_graph", detail="miss", count=1),
        event("cache", name="fx_graph", detail="bypass", count=0, run="warm"),
        event("cache", rank=1, name="autograd_cache_miss", count=2),
        event("cache", name="nonsense", count=2),
    )
    assert [(c.rank, c.run, c.cache, c.hit, c.miss, c.bypass) for c in view.caches] == [
        (0, "cold", "fx_graph", 3, 1, 0),
        (0, "warm", "fx_graph", 0, 0, 0),
        (1, "cold", "autograd_cache", 0, 2, 0),
    ]


def test_memory_while_compiling_is_the_compilers_own_or_the_phases() -> None:
    own = compiled(event("memory", name="host peak", bytes=7), event("memory", name="host before", bytes=99))
    assert own.peak_host_bytes is not None
    assert own.peak_host_bytes.value == 7
    phase = MemoryRow(rank=0, phase="compile", host_peak=11, allocated_peak=None)
    other = compiled(event("graph", name="0/0"), memory=(phase,))
    assert other.peak_host_bytes is not None
    assert (other.peak_host_bytes.value, other.peak_device_bytes) == (11, None)


def test_an_eager_run_compiled_nothing() -> None:
    empty = frame(CompileRow, []), frame(MemoryRow, [])
    view = compile_view(*empty, 100.0, 1000, False)
    assert view is not None
    assert (view.cold_s, view.amortised_ms) == (None, None)
    assert "eager" in view.note
    assert compile_view(*empty, 100.0, 1000, True) is None
    steps = frame(CompileRow, [event("phase", name="first step", seconds=0.5)])
    eager = compile_view(steps, empty[1], 100.0, 1000, False)
    assert eager is not None
    assert eager.cold_s is None


def test_memory_of_the_largest_rank_and_what_is_left() -> None:
    rows = [
        MemoryRow(rank=0, phase="build", allocated_peak=5, reserved_peak=6, device_total=100, host_peak=1),
        MemoryRow(rank=0, phase="measure", allocated_peak=50, reserved_peak=60, device_total=100, host_peak=2),
        MemoryRow(rank=1, phase="measure", allocated_peak=55, reserved_peak=70, device_total=100, host_peak=3),
        MemoryRow(rank=0, phase="checkpoint", allocated_peak=90, reserved_peak=95, device_total=100),
    ]
    view = memory_view(frame(MemoryRow, rows))
    assert view is not None
    assert view.peak is not None
    assert view.headroom is not None
    assert (view.peak.value, view.headroom.value, view.device_total) == (55, 30, 100)
    assert [p.phase for p in view.phases] == ["build", "measure", "checkpoint"]
    assert view.phases[2].host_peak is None


def test_memory_without_a_device_is_the_hosts() -> None:
    view = memory_view(frame(MemoryRow, [MemoryRow(rank=0, phase="build", host_peak=9)]))
    assert view is not None
    assert view.peak is not None
    assert (view.peak.value, view.headroom, view.device_total) == (9, None, None)
    assert "over all phases" in view.peak.how
    assert memory_view(frame(MemoryRow, [])) is None


def test_energy_is_summed_over_devices() -> None:
    rows = [PowerRow(rank=r, phase="measure", joules=600.0, seconds=2.0, steps=20, source="NVML") for r in range(2)]
    rows.append(PowerRow(rank=0, phase="build", joules=1e9, seconds=1.0, steps=1, source="NVML"))
    view = energy_view(frame(PowerRow, rows), 3)
    assert view.per_step is not None
    assert view.average_w is not None
    assert (view.per_step.value, view.per_step.n, view.average_w.value) == (60.0, 20, 600.0)
    assert "1 of 3 devices" in view.note
    assert energy_view(frame(PowerRow, []), 2).per_step is None


STEPS = StepsView(step_ms=Figure(value=100.0, unit="ms", source="measured", how="", n=20, low=99.0, high=101.0))
FACTS = WorkloadFacts(units_per_step=10_000, unit="tokens")
H200 = Environment(device="cuda", gpus=[Gpu(index=n, name="NVIDIA H200") for n in range(2)])


def cost(environment: Environment = H200, steps: StepsView | None = STEPS, **plan: Any) -> CostView:
    stall = CheckpointView(every_steps=500, per_step_ms=6.0)
    return cost_view(environment, FACTS, 2, steps, stall, Plan(**({"run_steps": 100_000} | plan)))


def test_money_is_price_times_time() -> None:
    view = cost(price=3.6)
    assert view.per_step is not None
    assert view.per_million is not None
    assert view.per_run is not None
    # 3.6 an hour is 1e-6 a ms; two GPUs for 100 ms
    assert money_per_ms(3.6, 2) == pytest.approx(2e-6)
    assert view.per_step.value == pytest.approx(2e-4)
    assert (view.per_step.low, view.per_step.high) == (pytest.approx(1.98e-4), pytest.approx(2.02e-4))
    assert view.per_million.value == pytest.approx(2e-2)
    assert (view.per_million.unit, view.per_run.unit) == ("USD per 1 M tokens", "USD per 100,000 steps")
    assert view.per_run.value == pytest.approx(20.0)
    assert "$1.20" in view.note


def test_a_listed_price_is_quoted_with_its_date() -> None:
    view = cost()
    assert view.price_per_gpu_hour is not None
    assert view.price_per_gpu_hour.source == "quoted"
    assert view.price_date.startswith("20")
    assert "edit or pass --price" in view.price_per_gpu_hour.how


@pytest.mark.parametrize("environment", [Environment(device="cpu"), Environment(device="cuda")])
def test_without_a_price_there_is_no_money(environment: Environment) -> None:
    view = cost(environment)
    assert (view.price_per_gpu_hour, view.per_step, view.per_million, view.per_run) == (None,) * 4
    assert "--price" in view.note


def test_without_steps_there_is_a_price_and_no_cost() -> None:
    view = cost(steps=None, price=2.0)
    assert view.price_per_gpu_hour is not None
    assert (view.per_step, view.per_run) == (None, None)

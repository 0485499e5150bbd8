"""Writes small run directories in the real format from hand-made rows, for unit tests only: nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from costlab.probes import records as r
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes, write_rows
from tests.app.make_model import (
    BATCH,
    COPY_GBPS,
    DIM,
    PEAK_TFLOPS,
    SEQ,
    TOKENS,
    VOCAB,
    Example,
    layer_classes,
    parameters_of,
)
from tests.app.make_rows import calls_of, hostile_row, rows_of


def environment_of(example: Example) -> r.Environment:
    """The machine the example ran on."""
    base: dict[str, Any] = {
        "costlab": "0.1.0",
        "python": "3.12.3",
        "platform": "Linux x86_64",
        "cpu": "Xeon 8480",
        "cpu_count": 32,
        "memory_bytes": 256 << 30,
        "device": "cpu" if example.device == "cpu" else example.gpu,
    }
    if example.device != "cuda":
        return r.Environment(**base, torch="2.13.0+cpu", backend="gloo", limits=["no NVIDIA GPU: no energy counter"])
    gpus = [
        r.Gpu(
            index=n,
            name=example.gpu,
            memory_bytes=141_000_000_000,
            sm_count=132,
            capability="9.0",
            pcie="gen 5 x16",
            power_limit_w=700.0,
        )
        for n in range(example.ranks)
    ]
    return r.Environment(
        **base,
        torch="2.11.0+cu130",
        triton="3.6.0",
        cuda="13.0",
        nccl="2.28.9",
        driver="580.95",
        backend="nccl",
        gpus=gpus,
    )


def workload_of(example: Example) -> r.WorkloadFacts:
    """The workload's own facts; expected bytes follow from the calls of a step."""
    count = parameters_of(example)
    flops = 6.0 * (count - VOCAB * DIM) * TOKENS * example.ranks
    return r.WorkloadFacts(
        name="llama",
        title="llama example",
        parameters=count,
        parameter_bytes=4 * count,
        unit="tokens",
        units_per_step=TOKENS * example.ranks,
        flops_per_step=flops,
        flops_formula="6 x (parameters - embedding) x tokens",
        peak_tflops=PEAK_TFLOPS,
        peak_method="bf16 matmul 8192x8192x8192, best of 10",
        copy_gbps=COPY_GBPS,
        expected_comm_bytes=sum(size for _, _, size, _ in calls_of(example)),
        expected_comm_formula="2 all-gathers and 1 reduce-scatter of each block, 1 and 1 of the root",
        layer_classes=layer_classes(example),
        source="built in",
    )


def manifest_of(example: Example) -> r.Manifest:
    """The identity card of the example."""
    spec = RunSpec(
        workload="llama",
        size="example",
        ranks=example.ranks,
        device="auto",
        parallel=example.parallel,
        compile=example.compile,
        dtype=example.dtype,
        batch=BATCH,
        seq=SEQ,
        steps=example.steps,
        profile_steps=example.profile_steps,
        price_per_gpu_hour=example.price,
    )
    failed = example.status == "failed"
    failure = r.FailureInfo(
        kind="out_of_memory",
        rank=1,
        phase="warm-up",
        message="rank 1 ran out of GPU memory",
        advice="halve --batch",
        log_tail=["allocating 2.0 GiB", "OutOfMemoryError"],
    )
    return r.Manifest(
        schema_version=example.schema_version,
        run_id=example.run_id,
        created=example.created,
        status=example.status,
        spec=msgspec.to_builtins(spec) | example.spec,
        ranks=example.ranks,
        environment=environment_of(example),
        workload=workload_of(example),
        failure=failure if failed else None,
        duration_s=None if example.status == "running" else 71.5,
        pid=example.pid,
        pid_started=example.pid_started,
    )


def _events(example: Example) -> bytes:
    events: list[r.Event] = [r.Hello(t=1.0 + n, rank=n, pid=4000 + n) for n in range(example.ranks)]
    for n, phase in enumerate(("check-in", "build", "compile", "warm-up", "measure", "profile", "checkpoint", "write")):
        events += [
            r.PhaseEvent(t=10.0 + n, rank=0, phase=phase),
            r.Progress(t=10.5 + n, rank=0, phase=phase, done=1, total=1),
        ]
    events += [
        r.StepEvent(t=20.0, rank=0, step=1, ms=31.0, loss=10.4, role="timed"),
        r.Log(t=21.0, rank=0, text="no GPUDirect Storage driver", level="warning"),
        r.Finished(t=30.0, status=example.status),
    ]
    return b"".join(r.encode_event(e) for e in events)


def write_example_run(path: Path, **variations: Any) -> Path:
    """Write a run directory at `path`; `variations` are fields of Example. The same arguments give the same content."""
    example = replace(Example(), **variations)
    path.mkdir(parents=True, exist_ok=True)
    for rank in range(example.ranks):
        for kind, rows in rows_of(example, rank).items():
            if kind.table not in example.omit and (rows or kind in (r.MissRow, r.CollectiveRow)):
                write_rows(path / f"rank-{rank:05d}", kind, map(hostile_row, rows) if example.hostile else rows)
    write_bytes(path / "events.jsonl", _events(example))
    write_bytes(path / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest_of(example)), indent=1))
    return path

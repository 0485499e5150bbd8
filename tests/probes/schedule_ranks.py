"""What the ranks do in test_schedule.py: wrap a model with and without a planned all-reduce, compare the gradients."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from costlab.kernels.schedule import measure
from costlab.probes.parallel import wrap
from costlab.probes.profiling import all_threads
from costlab.probes.spec import RunSpec, SpecError
from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse

CPU = torch.device("cpu")


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 17))


def gradients(spec: RunSpec, rank: int, seed: int) -> tuple[list[Tensor], list[str]]:
    """Gradients of one batch as this rank holds them, and what wrapping said."""
    wrapped = wrap(model(seed), ["0", "2"], spec, CPU)
    generator = torch.Generator().manual_seed(100 + rank)
    x, y = torch.randn(8, 33, generator=generator), torch.randn(8, 17, generator=generator)
    (wrapped.model(x) - y).square().mean().backward()
    found: list[Tensor] = [getattr(p.grad, "to_local", lambda g=p.grad: g)() for p in wrapped.base.parameters()]
    return [g.clone() for g in found], wrapped.notes


def against_stock(rank: int, parallel: str, schedule: str) -> tuple[float, bool, list[str]]:
    """Largest difference to stock in units of the reduction-order bound, equality over replicas, what was said.

    HSDP's planned way must start all replicas alike itself, so only there ranks begin with other parameters.
    """
    spec = RunSpec(ranks=4, device="cpu", parallel=parallel, compile="none", dtype="fp32")  # type: ignore[arg-type]
    stock, _ = gradients(spec, rank, seed=11)
    replica = rank // 2 if parallel == "hsdp" else 0
    planned = msgspec.structs.replace(spec, schedule=schedule)
    ours, said = gradients(planned, rank, seed=11 + replica)
    unit = torch.finfo(torch.float32).eps / 2
    worst = max(
        ((a - b).abs().max() / (2 * 5 * unit * b.abs().max().clamp_min(1e-6))).item()
        for a, b in zip(ours, stock, strict=True)
        if b.numel()
    )
    return worst, _same(ours, rank, parallel), said


def _same(found: list[Tensor], rank: int, parallel: str) -> bool:
    raw = torch.cat([g.reshape(-1) for g in found]).view(torch.int32)
    rows: list[Any] = [None] * 4
    dist.all_gather_object(rows, raw)
    peers = range(4) if parallel == "ddp" else (rank % 2, rank % 2 + 2)
    return all(torch.equal(rows[p], raw) for p in peers)


def refused(rank: int) -> str:
    """Symmetric memory on CPUs."""
    spec = RunSpec(ranks=4, device="cpu", parallel="ddp", compile="none", dtype="fp32", schedule="symmetric")
    try:
        gradients(spec, rank, seed=11)
    except SpecError as error:
        return str(error)
    return "no error"


def choices(rank: int) -> list[dict[str, Any]]:
    """What a wrapped model keeps of its choices, before and after a step."""
    spec = RunSpec(ranks=4, device="cpu", parallel="ddp", compile="none", dtype="fp32", schedule="auto")
    wrapped = wrap(model(11), ["0", "2"], spec, CPU)
    before = len(wrapped.schedules)
    for _ in range(2):
        wrapped.model(torch.ones(8, 33)).square().mean().backward()
    return [{**msgspec.to_builtins(c), "before": i < before} for i, c in enumerate(wrapped.schedules)]


def repeated(rank: int, parallel: str, folder: str, spoil: str) -> tuple[list[str], list[str], int]:
    """What two arms of a what-if say of their choices, and how often the second measured."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    spec = RunSpec(ranks=4, device="cpu", parallel=parallel, compile="none", dtype="fp32")  # type: ignore[arg-type]
    first = msgspec.structs.replace(spec, schedule="auto", cache_salt="what-if/hybrid")
    said = wrap(model(11), ["0", "2"], first, CPU).notes
    if rank == 0 and spoil:
        for path in Path(folder).glob("costlab-curves-*"):
            path.write_text(spoil)
    dist.barrier()
    own, calls = measure.curves, []
    measure.curves = lambda *a, **k: calls.append(1) or own(*a, **k)  # type: ignore[func-returns-value,assignment]
    try:
        wrapped = wrap(model(11), ["0", "2"], msgspec.structs.replace(first, cache_salt="what-if/fused + hybrid"), CPU)
        wrapped.model(torch.ones(8, 33)).square().mean().backward()
    finally:
        measure.curves = own
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return said, wrapped.notes, len(calls)


def traced(rank: int, parallel: str, schedule: str) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The collectives of one profiled backward as the trace's reader sees them, and the reader's doubts."""
    spec = RunSpec(ranks=4, device="cpu", parallel=parallel, compile="none", dtype="fp32", schedule=schedule)  # type: ignore[arg-type]
    wrapped = wrap(model(11), ["0", "2"], spec, CPU)
    x = torch.ones(8, 33)
    wrapped.model(x).square().mean().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, record_shapes=True, experimental_config=all_threads(spec)
    ) as profiler:
        with torch.profiler.record_function("costlab::step::0"):
            wrapped.model(x).square().mean().backward()
            dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = analyse(kineto.read(path.read_bytes()), device="cpu", blocks=[])
    calls = [c for c in trace.collectives if c.kind != "barrier"]
    return [(c.kind, c.schedule, c.group, c.bytes_in, c.bytes_out) for c in calls], trace.problems

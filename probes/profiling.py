"""Profiled steps: record with torch.profiler, read the trace back, join it to the fusion trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costlab.probes.records import (
    CollectiveRow,
    KernelRow,
    KernelSourceRow,
    MissRow,
    PartRow,
    PatternRow,
    SpanRow,
    StepRow,
)

if TYPE_CHECKING:
    from costlab.probes.fusion.model import FusionTrace
    from costlab.probes.spec import RunSpec
    from costlab.probes.steps import Trainer
    from costlab.probes.worker import RankRun


@dataclass
class Profile:
    """Tables made of the profiled steps."""

    steps: list[StepRow]
    collectives: list[CollectiveRow]
    parts: list[PartRow]
    spans: list[SpanRow]
    misses: list[MissRow]
    kernels: list[KernelRow]
    patterns: list[PatternRow]
    sources: list[KernelSourceRow]


def profile_steps(run: RankRun, trainer: Trainer) -> Profile:
    """Profile `spec.profile_steps` steps on this rank and turn the trace into tables."""
    from costlab.probes.fusion.model import FusionTrace
    from costlab.probes.fusion.spans import join
    from costlab.probes.trace import kineto
    from costlab.probes.trace.analyse import analyse, rows

    path = run.run_dir / "raw" / f"rank-{run.rank:05d}.trace.json.gz"
    steps = record(run, trainer, path)
    run.voice.log(f"reading {path.name}, {path.stat().st_size / 1e6:.1f} MB")
    blocks = trainer.wrapped.compiled or trainer.wrapped.blocks
    trace = analyse(kineto.read(path), device=run.device.type, blocks=blocks)
    for problem in trace.problems:
        run.voice.log(problem, "warning")
    fusion = run.fusion or FusionTrace(supported=False, note="nothing was compiled")
    spans, misses, kernels = join(
        fusion,
        trace,
        trace_id=trace_id(run.run_dir.name),
        rank=run.rank,
        layer_classes=run.facts.layer_classes,
        blocks=blocks,
        compiled=run.spec.compile != "none",
    )
    collectives, parts = rows(trace, run.rank)
    if run.spec.keep_raw:
        keep_fusion(run, fusion)
    else:
        path.unlink()
    return Profile(
        steps, collectives, parts, spans, misses, kernels, pattern_rows(fusion, run.rank), source_rows(fusion, run.rank)
    )


def pattern_rows(fusion: FusionTrace, rank: int) -> list[PatternRow]:
    """The anti-patterns of all graphs as rows."""
    names = ("kind", "layer", "phase", "source", "text", "mend", "bytes", "count", "ops")
    return [PatternRow(rank=rank, **{name: getattr(p, name) for name in names}) for p in fusion.antipatterns]


def source_rows(fusion: FusionTrace, rank: int) -> list[KernelSourceRow]:
    """The kernels' generated source, of rank 0 only: all ranks compile the same."""
    return [
        KernelSourceRow(
            rank=rank,
            name=s.name,
            phase=s.phase,
            compile_id=s.compile_id,
            language=s.language,
            source=s.text,
            cut=s.cut,
        )
        for s in (fusion.sources if rank == 0 else ())
    ]


def keep_fusion(run: RankRun, fusion: FusionTrace) -> None:
    """Keep the fusion trace beside the Kineto trace, so that both can be read again by a later costlab."""
    import gzip

    import msgspec

    path = run.run_dir / "raw" / f"rank-{run.rank:05d}.fusion.json.gz"
    path.write_bytes(gzip.compress(msgspec.json.encode(fusion)))


def record(run: RankRun, trainer: Trainer, path: Path) -> list[StepRow]:
    """Run the profiler; its first step is thrown away, since Kineto loses kernels at the start of a session."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    from costlab.probes.steps import annotated

    count = run.spec.profile_steps
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    steps: list[StepRow] = []
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)
    with annotated(trainer):
        trainer.timed_step()  # annotations run once outside the profile
        dist.barrier()
        with profile(
            activities=activities, schedule=plan, record_shapes=True, experimental_config=all_threads(run.spec)
        ) as profiler:
            trainer.timed_step()
            profiler.step()
            for i in range(count):
                with record_function(f"costlab::step::{i}"):
                    ms = trainer.timed_step()
                if i < count - 1:
                    profiler.step()
                steps.append(StepRow(rank=run.rank, step=i, role="profiled", ms=ms))
                run.voice.progress(i + 1, count, f"{ms:.1f} ms profiled")
        profiler.export_chrome_trace(str(path))
    return steps


def all_threads(spec: RunSpec) -> Any:
    """All threads where a planned schedule works on its own; None, torch's default, elsewhere and where it can't."""
    from torch._C._profiler import _ExperimentalConfig

    if spec.schedule == "stock":
        return None
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def trace_id(run_name: str) -> str:
    """The trace's id, the same on every rank: 16 bytes of the run's name as hex."""
    import hashlib

    return hashlib.blake2b(run_name.encode(), digest_size=16).hexdigest()

"""The tables of an example run, row by row and consistent with one another.

Kernel times follow from bytes and FLOPs, the parts of a step sum to it, collective bytes follow from parameter sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec

from costlab.probes import records as r
from tests.app.make_model import (
    BLOCK_PARAMETERS,
    NASTY,
    ROOT_PARAMETERS,
    Example,
    Kernel,
    kernels_of,
    layer_classes,
    losses_of,
    parameters_of,
    shards_of,
    width_of,
)


def _status(rate: float | None, layer: str) -> str:
    if layer == "loss":
        return "broken"
    return "complete" if rate is None or rate >= 0.95 else "partial" if rate >= 0.5 else "broken"


class _Spans:
    """Builds one rank's span tree: step > phase > layer > kernel."""

    def __init__(self, example: Example, rank: int) -> None:
        self.example, self.rank = example, rank
        self.trace = f"{example.run_id}:0"
        self.classes = layer_classes(example)
        self.kernels, self.losses = kernels_of(example), losses_of(example)
        self.rows: list[r.SpanRow] = []

    def _under(self, layer: str, prefix: str | None) -> bool:
        if prefix is None:
            return True
        return layer == prefix or (not self.example.own_spans and layer.startswith(f"{prefix}."))

    def _sums(self, phase: str | None, prefix: str | None) -> dict[str, Any]:
        inside = [k for k in self.kernels if phase in (None, k.phase) and self._under(k.layer, prefix)]
        fusible = [k for k in inside if k.kind not in ("extern", "foreach")]
        lost = [x for x in self.losses if phase in (None, x.phase) and self._under(x.layer, prefix)]
        actual = sum(k.read + k.written for k in fusible)
        addressable = sum(x.bytes for x in lost if x.addressable)
        structural = sum(x.bytes for x in lost if not x.addressable)
        rate = 1 - addressable / actual if actual else None
        strict = 1 - (addressable + structural) / actual if actual else None
        worst = max(lost, key=lambda x: (x.addressable, x.bytes), default=None)
        return {
            "fusion_rate": rate,
            "strict_rate": strict,
            "fusion_status": _status(rate, prefix or ""),
            "ms": sum(k.ms for k in inside) / self.example.speed,
            "bytes_read": sum(k.read for k in fusible),
            "bytes_written": sum(k.written for k in fusible),
            "addressable_lost": addressable,
            "structural_lost": structural,
            "main_cause": worst.cause if worst else "",
            "calls": len(inside),
        }

    def _add(self, span_id: str, parent: str | None, kind: Any, name: str, **values: Any) -> str:
        full = f"{self.rank:05d}/{span_id}"
        row = r.SpanRow(
            trace_id=self.trace, span_id=full, parent_span_id=parent, rank=self.rank, kind=kind, name=name, **values
        )
        self.rows.append(row)
        return full

    def build(self) -> list[r.SpanRow]:
        """All rows, parents first."""
        step = self._add("step", None, "step", "step 0", **self._sums(None, None))
        for phase in ("forward", "backward", "optimizer"):
            top = self._add(phase, step, "phase", phase, phase=phase, **self._sums(phase, None))
            self._layers(phase, top)
        return self.rows

    def _layers(self, phase: str, top: str) -> None:
        used = {k.layer for k in self.kernels if k.phase == phase}
        for path, name in self.classes.items():
            if not any(u == path or u.startswith(f"{path}.") for u in used) or (not path and phase != "optimizer"):
                continue
            parent = path.rpartition(".")[0]
            above = f"{self.rank:05d}/{phase}/{parent}" if parent in self.classes and parent else top
            here = self._add(
                f"{phase}/{path}",
                above,
                "layer",
                path.rpartition(".")[2] or "model",
                phase=phase,
                layer=path,
                layer_class=name,
                **self._sums(phase, path),
            )
            for n, kernel in enumerate(k for k in self.kernels if (k.phase, k.layer) == (phase, path)):
                self._kernel(kernel, f"{phase}/{path}#{n}", here)

    def _kernel(self, k: Kernel, span_id: str, parent: str) -> None:
        fusible = k.kind not in ("extern", "foreach")
        self._add(
            span_id,
            parent,
            "kernel",
            k.name,
            phase=k.phase,
            layer=k.layer,
            kernel_kind=k.kind,
            fusion_status="broken" if k.kind == "eager" else "complete",
            fusion_rate=None,
            calls=1,
            ms=k.ms / self.example.speed,
            bytes_read=k.read if fusible else None,
            bytes_written=k.written if fusible else None,
            flops=k.flops or None,
            ops=k.ops,
            source=k.source,
            compile_id="" if k.kind == "eager" else "0/0",
        )


def _misses(example: Example, rank: int) -> list[r.MissRow]:
    return [
        r.MissRow(
            rank=rank,
            layer=x.layer,
            phase=x.phase,
            cause=x.cause,
            addressable=x.addressable,
            bytes=x.bytes,
            reason=x.reason,
            producer=x.producer,
            consumer=x.consumer,
            producer_source=x.source,
            consumer_source=x.source,
            compile_id="0/0",
        )
        for x in losses_of(example)
    ]


def _kernel_rows(example: Example, rank: int) -> list[r.KernelRow]:
    rows = [
        r.KernelRow(
            rank=rank,
            name=k.name,
            category=k.category,
            phase=k.phase,
            layer=k.layer,
            calls=1.0,
            ms=k.ms / example.speed,
            bytes_moved=(k.read + k.written) or None,
            flops=k.flops or None,
            stream="7",
            op=k.ops.partition(",")[0],
        )
        for k in kernels_of(example)
    ]
    for kind in sorted({c.kind for c in _collectives(example, rank)}):
        mine = [c for c in _collectives(example, rank) if c.kind == kind and c.step == 0]
        rows.append(
            r.KernelRow(
                rank=rank,
                name=f"ncclDevKernel_{kind}",
                category="communication",
                calls=len(mine),
                ms=sum(c.ms for c in mine),
                stream="20",
                op=f"c10d::{kind}",
            )
        )
    return rows


def calls_of(example: Example) -> Iterable[tuple[str, str, int, str]]:
    """(kind, layer, full bytes, phase) of each collective of a step, in order."""
    w = width_of(example)
    if example.ranks == 1:
        return
    if example.parallel == "ddp":
        yield "all_reduce", "", parameters_of(example) * w, "backward"
        return
    yield "all_gather", "", ROOT_PARAMETERS * w, "forward"
    blocks = [(f"layers.{n}", BLOCK_PARAMETERS * w) for n in range(example.layers)]
    for layer, size in blocks:
        yield "all_gather", layer, size, "forward"
    for layer, size in reversed(blocks):
        yield "all_gather", layer, size, "backward"
        yield "reduce_scatter", layer, 2 * size, "backward"
    yield "reduce_scatter", "", 2 * ROOT_PARAMETERS * w, "backward"


def _collectives(example: Example, rank: int) -> list[r.CollectiveRow]:
    """Every call takes size / 300 GB/s; every rank but the last waits for it."""
    rows: list[r.CollectiveRow] = []
    for step in range(example.profile_steps):
        at = 0.0
        for seq, (kind, layer, size, phase) in enumerate(calls_of(example)):
            shard = size if kind == "all_reduce" else size // example.ranks
            late = 0.0 if rank == example.ranks - 1 else example.straggler_ms
            ms = size / 300e6 / example.speed + late
            given, got = {"all_gather": (shard, size), "reduce_scatter": (size, shard)}.get(kind, (size, size))
            rows.append(
                r.CollectiveRow(
                    rank=rank,
                    step=step,
                    seq=seq,
                    kind=kind,
                    layer=layer,
                    phase=phase,
                    group=",".join(map(str, range(example.ranks))),
                    group_size=example.ranks,
                    dtype="bfloat16" if kind == "all_gather" and example.dtype == "bf16" else "float32",
                    bytes_in=given,
                    bytes_out=got,
                    start_us=at + (0 if late else 1e3 * example.straggler_ms),
                    ms=ms,
                    exposed_ms=0.45 * ms,
                )
            )
            at += 2000.0
    return rows


def parts_of(example: Example, rank: int, *, profiled: bool) -> dict[str, float]:
    """Parts of one step in ms; the profiler doubles what is idle and leaves device work alone."""
    kernels = kernels_of(example)
    busy = {
        "matrix math": sum(k.ms for k in kernels if k.category == "matmul") / example.speed,
        "memory-bound kernels": sum(k.ms for k in kernels if k.category == "memory") / example.speed,
        "exposed communication": sum(c.exposed_ms for c in _collectives(example, rank) if c.step == 0),
        "host-device copies": 0.05,
    }
    slower = (2.0 if profiled else 1.0) * example.idle
    # the late rank idles while its peers wait, so every rank's step is equally long
    behind = parts_late(example) if rank == example.ranks - 1 else 0.0
    idle = {
        "idle: launch": 2.4 * slower,
        "idle: sync": 0.3 * slower,
        "idle: data": 0.1 * slower,
        "idle: other": 0.2 * slower + behind,
        "framework overhead": 0.25 * slower,
    }
    return busy | idle


def parts_late(example: Example) -> float:
    """Exposed waiting of the other ranks in one step, in ms."""
    return 0.45 * example.straggler_ms * sum(1 for _ in calls_of(example))


def _part_rows(example: Example, rank: int) -> list[r.PartRow]:
    return [
        r.PartRow(rank=rank, step=step, name=name, ms=ms)
        for step in range(example.profile_steps)
        for name, ms in parts_of(example, rank, profiled=True).items()
    ]


def _steps(example: Example, rank: int) -> list[r.StepRow]:
    rng = random.Random(example.seed)  # the same on every rank: a synchronous step has one length
    plain, slow = (sum(parts_of(example, rank, profiled=p).values()) for p in (False, True))
    plan: list[tuple[Any, int, float]] = [
        ("warmup", 5, plain),
        ("timed", example.steps, plain),
        ("profiled", example.profile_steps, slow),
        ("control", 8, plain),
        ("save_sync", 8, plain + 3100 / 8),
        ("save_async", 8, plain + 18 / 8),
    ]
    rows, step, ns = [], 0, 1_796_000_000_000_000_000
    for role, count, base in plan:
        for n in range(count):
            ms = 9400.0 if role == "warmup" and n == 0 else base * (1 + rng.uniform(-0.006, 0.006))
            rows.append(
                r.StepRow(
                    rank=rank,
                    step=step,
                    role=role,
                    ms=ms,
                    host_ms=0.7 * base,
                    start_ns=ns,
                    loss=10.4 - 0.05 * step,
                )
            )
            step, ns = step + 1, ns + int(ms * 1e6)
    return rows


def _compile(example: Example, rank: int) -> list[r.CompileRow]:
    if example.compile == "none":
        return []
    row = r.CompileRow
    rows = [
        row(rank=rank, kind="graph", name="0/0", detail="forward", seconds=3.1, count=64, run="cold"),
        row(rank=rank, kind="graph", name="0/0", detail="backward", seconds=4.6, count=98, run="cold"),
        row(rank=rank, kind="break", name="1/0", detail="call to print()", source="llama.py:101", count=1, run="cold"),
        row(
            rank=rank,
            kind="recompile",
            name="0/1",
            detail="size mismatch: L['x'].size()[1] == 2048",
            run="cold",
            source="llama.py:33",
            count=1,
        ),
        row(rank=rank, kind="phase", name="total", seconds=8.4, run="cold"),
        row(rank=rank, kind="phase", name="total", seconds=1.1, run="warm"),
    ]
    for name, seconds in (("dynamo", 1.9), ("aot autograd", 1.4), ("inductor", 5.1)):
        rows.append(row(rank=rank, kind="phase", name=name, seconds=seconds, run="cold"))
    runs: dict[Any, tuple[int, int, int]] = {"cold": (0, 2, 0), "warm": (2, 0, 0)}
    for run, counts in runs.items():
        for detail, count in zip(("hit", "miss", "bypass"), counts, strict=True):
            rows.append(row(rank=rank, kind="cache", name="fxgraph", detail=detail, count=count, run=run))
    rows.append(row(rank=rank, kind="memory", name="host_peak", bytes=6_400_000_000, run="cold"))
    if example.device == "cuda":
        rows.append(row(rank=rank, kind="memory", name="device_peak", bytes=11_800_000_000, run="cold"))
    return rows


def _checkpoint(example: Example, rank: int) -> list[r.CheckpointRow]:
    size = parameters_of(example) * 12 // shards_of(example)
    row = r.CheckpointRow
    return [
        row(
            rank=rank,
            mode="sync",
            op="save",
            ok=True,
            bytes=size,
            blocked_ms=3080.0 - rank,
            total_ms=3090.0,
            stall_ms=3100.0,
            stall_low_ms=3020.0,
            stall_high_ms=3170.0,
        ),
        row(
            rank=rank,
            mode="async:pinned",
            op="save",
            ok=True,
            bytes=size,
            blocked_ms=12.0,
            total_ms=3900.0,
            stall_ms=18.0,
            stall_low_ms=9.0,
            stall_high_ms=31.0,
        ),
        row(rank=rank, mode="sync", op="load", ok=True, bytes=size, total_ms=1400.0, identical=True),
        row(
            rank=rank,
            mode="costlab:exact",
            op="save",
            ok=True,
            bytes=size,
            state_bytes=size,
            bits=32.1,
            blocked_ms=9.0,
            total_ms=2400.0,
            stall_ms=24.0,
            stall_low_ms=14.0,
            stall_high_ms=36.0,
        ),
        row(rank=rank, mode="costlab:exact", op="load", ok=True, bytes=size, total_ms=900.0, identical=True),
        row(
            rank=rank,
            mode="costlab:fp8",
            op="save",
            ok=True,
            bytes=size // 4,
            state_bytes=size,
            bits=8.2,
            blocked_ms=7.0,
            total_ms=700.0,
            stall_ms=8.0,
            stall_low_ms=2.0,
            stall_high_ms=15.0,
            lossy=True,
            update_error=0.024 + rank / 1000,
        ),
        row(rank=rank, mode="costlab:fp8", op="load", ok=True, total_ms=600.0, lossy=True, within_bound=True),
    ]


def _stages(example: Example, rank: int) -> list[r.CheckpointStageRow]:
    size = parameters_of(example) * 12 // shards_of(example)
    spans = {
        "launch": (0.0, 9.0, None, None), "stage": (0.0, 110.0, size, 54.0), "write": (30.0, 2300.0, size, None),
        "sync": (2300.0, 2360.0, None, None), "commit": (2360.0, 2400.0, None, None),
        "to disk": (30.0, 2360.0, size, 2.4),
    }  # fmt: skip
    rows = []
    for mode, part in (("costlab:exact", 1), ("costlab:fp8", 4)):
        for stage, (start, end, moved, ceiling) in spans.items():
            rows.append(
                r.CheckpointStageRow(
                    rank=rank,
                    mode=mode,
                    op="save",
                    stage=stage,
                    start_ms=start / part,
                    end_ms=end / part,
                    busy_ms=(end - start) / part + rank,
                    bytes=moved // part if moved else None,
                    ceiling_gbps=ceiling,
                    ceiling=f"the {stage} ceiling of the example" if ceiling else "",
                )
            )
    apart = r.CheckpointStageRow(
        rank=rank, mode="costlab:fp8", op="save", stage="encode", busy_ms=3.0, bytes=size, ceiling_gbps=3900.0
    )
    return [*rows, apart]


def _codecs(rank: int) -> list[r.CheckpointCodecRow]:
    table = (
        ("weight", "fp8 16x16", 8.125, 0.026, None),
        ("first moment", "fp8 16x16", 8.125, 0.026, 0.024),
        ("second moment", "log8", 8.0, 0.007, 0.006),
    )
    return [
        r.CheckpointCodecRow(
            rank=rank,
            mode="costlab:fp8",
            codec=codec,
            tensor_class=kind,
            values=1_000_000,
            bits=bits,
            ratio=32 / bits,
            rel_l2=error,
            max_abs=0.004,
            flushed=3,
            update_error=update,
            encode_gbps=900.0,
            decode_gbps=1200.0,
        )
        for kind, codec, bits, error, update in table
    ]


def _resumed(rank: int) -> list[r.ResumeRow]:
    off = {"costlab:exact": 0.0, "costlab:fp8": 0.0012}
    return [
        r.ResumeRow(rank=rank, mode=mode, after=n, loss=2.5 - n / 100 + more, exact_loss=2.5 - n / 100)
        for mode, more in off.items()
        for n in (0, 1, 5, 40)
    ]


def _memory(example: Example, rank: int) -> list[r.MemoryRow]:
    gb = 1_000_000_000
    cuda = example.device == "cuda"
    phases = (("build", 4, 5), ("compile", 11, 13), ("warm-up", 16, 19), ("measure", 17, 20), ("checkpoint", 19, 23))
    return [
        r.MemoryRow(
            rank=rank,
            phase=phase,
            allocated_peak=allocated * gb if cuda else None,
            reserved_peak=reserved * gb if cuda else None,
            allocated=4 * gb if cuda else None,
            device_total=141 * gb if cuda else None,
            host_peak=(3 + n) * gb,
        )
        for n, (phase, allocated, reserved) in enumerate(phases)
    ]


def _power(example: Example, rank: int) -> list[r.PowerRow]:
    if example.device != "cuda":
        return []
    seconds = example.steps * sum(parts_of(example, rank, profiled=False).values()) / 1e3
    return [
        r.PowerRow(
            rank=rank,
            phase="measure",
            joules=540.0 * seconds,
            seconds=seconds,
            steps=example.steps,
            source="NVML total energy counter",
        )
    ]


def _links(example: Example, rank: int) -> list[r.LinkRow]:
    """The machine as its first rank tells it, in the words of `probes.topology`."""
    if example.device != "cuda" or rank != 0:
        return []
    told = {"sm": "90", "pcie_generation_max": "5", "pcie_width_max": "16", "nvlink switch hidden": "18"}
    return [
        r.LinkRow(rank=0, device=f"gpu{n}", kind="gpu", fact=fact, value=value, source="NVML")
        for n in range(example.ranks)
        for fact, value in ({"name": example.gpu, "busid": f"0000:1{n}:00.0", "cuda_index": str(n)} | told).items()
    ]


def rows_of(example: Example, rank: int) -> dict[type[r.Row], list[Any]]:
    """All tables of one rank."""
    return {
        r.StepRow: _steps(example, rank),
        r.SpanRow: _Spans(example, rank).build(),
        r.MissRow: _misses(example, rank),
        r.KernelRow: _kernel_rows(example, rank),
        r.CollectiveRow: _collectives(example, rank),
        r.PartRow: _part_rows(example, rank),
        r.CompileRow: _compile(example, rank),
        r.CheckpointRow: _checkpoint(example, rank),
        r.CheckpointStageRow: _stages(example, rank),
        r.CheckpointCodecRow: _codecs(rank),
        r.ResumeRow: _resumed(rank),
        r.MemoryRow: _memory(example, rank),
        r.PowerRow: _power(example, rank),
        r.LinkRow: _links(example, rank),
    }


HOSTILE: dict[type[Any], tuple[str, ...]] = {
    r.SpanRow: ("layer", "layer_class", "source", "ops"),
    r.MissRow: ("layer", "reason", "producer", "consumer", "producer_source", "consumer_source"),
    r.KernelRow: ("name", "layer", "op"),
    r.CollectiveRow: ("dtype",),
    r.CheckpointRow: ("note",),
    r.CheckpointStageRow: ("ceiling",),
    r.CheckpointCodecRow: ("codec", "tensor_class"),
}


def hostile_row(row: Any) -> Any:
    """The same row with names no renderer may pass through as they are."""
    fields: tuple[str, ...] = HOSTILE.get(type(row), ())
    if isinstance(row, r.CompileRow) and row.kind in ("graph", "break", "recompile"):
        fields = ("detail", "source")
    if isinstance(row, r.SpanRow) and row.kind == "kernel":
        fields = (*fields, "name")
    return msgspec.structs.replace(row, **{f: getattr(row, f) + NASTY for f in fields if getattr(row, f)})

"""Gradient layouts measured by real ranks: one rank of the job that `probes.job` starts.

All buckets of a reduction are issued at once and then awaited, as DDP does; no compute runs beside them, so times are
those of communication that nothing hides.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from costlab.probes import failures
from costlab.probes.bucket_spec import (
    RESULT_FILE,
    BucketCase,
    BucketResult,
    BucketRow,
    BucketSpec,
    assign,
    plan,
    shapes,
)
from costlab.probes.job import run_rank
from costlab.probes.peers import Peers
from costlab.probes.session import Voice
from costlab.probes.tables import write_bytes
from costlab.probes.timing import wall

if TYPE_CHECKING:
    import torch

LEAST, MOST = 3, 100  # repetitions of a case in a round
VALUE = 1.0
TOLERANCE = 0.02  # a third in bfloat16, summed three times


@dataclass
class Sweep:
    """One rank's part."""

    spec: BucketSpec
    rank: int
    world: int
    device: torch.device
    peers: Peers
    samples: dict[BucketCase, list[list[tuple[float, float]]]] = field(default_factory=dict)  # case -> round -> times
    sizes: dict[BucketCase, tuple[int, int]] = field(default_factory=dict)  # case -> collectives, bytes


def sweep(run_dir: Path, options: bytes, rank: int, voice: Voice) -> None:
    """All cases in rounds, with progress; rank 0 writes what there is after every case."""
    import torch
    import torch.distributed as dist

    spec = msgspec.json.decode(options, type=BucketSpec)
    voice.enter("sweep", "joining the process group")
    me = _join(spec)
    cuda = me.device.type == "cuda"
    result = BucketResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        backend="nccl" if cuda else "gloo",
        device=torch.cuda.get_device_name(me.device) if cuda else "cpu",
        ranks=me.world,
        version=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        elements=spec.elements,
        tensors=len(shapes(spec.elements)),
    )
    cases = plan(spec)
    work, refused = [case for _ in range(spec.rounds) for case in cases], set[str]()
    for done, case in enumerate(work):
        if rank == 0:
            voice.progress(done, len(work), words(case), (len(work) - done) * spec.seconds / spec.rounds)
        if case.dtype not in refused and not _one(me, case, result):
            refused.add(case.dtype)
        result.rows = _rows(me)
        _save(me, run_dir, result)
    result.complete = True
    _save(me, run_dir, result)
    if rank == 0:
        voice.progress(len(work), len(work), "done")
    dist.barrier()
    dist.destroy_process_group()


def words(case: BucketCase) -> str:
    """ "25 MiB float32 view, every 1" """
    size = f"{case.bucket / (1 << 20):g} MiB" if case.bucket else "tensor by tensor"
    return f"{size} {case.dtype} {case.layout}, every {case.every}"


def _save(me: Sweep, run_dir: Path, result: BucketResult) -> None:
    if me.rank == 0:
        write_bytes(run_dir / RESULT_FILE, msgspec.json.encode(result))


def _join(spec: BucketSpec) -> Sweep:
    import torch.distributed as dist

    from costlab.probes.join import join

    device, peers = join(timedelta(seconds=180))
    return Sweep(spec, dist.get_rank(), dist.get_world_size(), device, peers)


def _one(me: Sweep, case: BucketCase, result: BucketResult) -> bool:
    """One case in one round; False when the backend does not know its dtype on any rank, which is said once."""
    problem = ""
    try:
        gradients = Gradients(me, case)
        gradients.reduce()
    except (NotImplementedError, ValueError, RuntimeError) as error:
        text = str(error).lower()
        if not (isinstance(error, NotImplementedError) or "support" in text or "invalid scalar type" in text):
            raise
        problem = failures.one_line(str(error), 160)
    if me.peers.any(bool(problem)):
        result.skipped.append(f"{case.dtype}: {problem or 'not supported on another rank'}")
        return False
    gradients.check()
    me.sizes[case] = len(gradients.buckets), gradients.bytes
    me.samples.setdefault(case, []).append(_times(me, gradients, case))
    return True


def _times(me: Sweep, gradients: Gradients, case: BucketCase) -> list[tuple[float, float]]:
    """Repetitions of (all micro-batches with their reduction, the reduction alone), each the slowest rank's seconds."""
    first = me.peers.max(_timed(me, gradients.reduce) + case.every * _timed(me, gradients.accumulate))
    count = int(min(max(me.spec.seconds / me.spec.rounds / max(first, 1e-6), LEAST), MOST))
    found = []
    for _ in range(count):
        added = sum(_timed(me, gradients.accumulate) for _ in range(case.every)) if case.every > 1 else 0.0
        reduced = _timed(me, gradients.reduce)
        found.append((me.peers.max(added + reduced), me.peers.max(reduced)))
    return found


def _timed(me: Sweep, work: Callable[[], None]) -> float:
    """Seconds of `work` on this rank, all ranks starting together."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=me.peers.group)
    if me.device.type == "cpu":
        return wall(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _rows(me: Sweep) -> list[BucketRow]:
    rows = []
    for case, rounds in me.samples.items():
        medians = [statistics.median(whole for whole, _ in one) for one in rounds]
        every = [pair for one in rounds for pair in one]
        collectives, size = me.sizes[case]
        rows.append(
            BucketRow(
                case=case, collectives=collectives, bytes=size, repeats=len(every), low=min(medians),
                high=max(medians), seconds=statistics.median(whole for whole, _ in every),
                reduce_seconds=statistics.median(reduced for _, reduced in every),
            )
        )  # fmt: skip
    return rows


class Gradients:
    """The gradients of a step in one layout: tensors, buckets, and what a reduction does to them."""

    def __init__(self, me: Sweep, case: BucketCase) -> None:
        import torch

        self.case = case
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.shapes = shapes(me.spec.elements)
        counts = [_count(shape) for shape in self.shapes]
        self.members = assign([n * dtype.itemsize for n in counts], case.bucket)
        self.buckets = [
            torch.zeros(sum(counts[i] for i in group), dtype=dtype, device=me.device) for group in self.members
        ]
        self.bytes = sum(counts) * dtype.itemsize
        self.views = self._views(counts)
        self.own = [] if case.layout == "view" else [self._own(i, me.device, dtype) for i in range(len(counts))]
        self.batch = [torch.full_like(g, VALUE) for g in self.gradients] if case.every > 1 else []
        for gradient in self.gradients:
            gradient.fill_(VALUE)

    def _views(self, counts: list[int]) -> list[torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        for group, bucket in zip(self.members, self.buckets, strict=True):
            at = 0
            for i in group:
                views[i] = bucket[at : at + counts[i]].view(self.shapes[i])
                at += counts[i]
        return [views[i] for i in range(len(counts))]

    def _own(self, index: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        import torch

        shape = self.shapes[index]
        if self.case.layout == "strided" and len(shape) == 2:
            return torch.empty(shape[::-1], dtype=dtype, device=device).t()
        return torch.empty(shape, dtype=dtype, device=device)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What backward writes: the buckets' views, or tensors of their own."""
        return self.own or self.views

    def accumulate(self) -> None:
        """What one micro-batch without a reduction does: add to the gradients."""
        import torch

        if self.batch:
            torch._foreach_add_(self.gradients, self.batch)

    def reduce(self) -> None:
        """Average over ranks: all buckets issued, then awaited, copied out where gradients are not their views."""
        import torch
        import torch.distributed as dist

        works = []
        for group, bucket in zip(self.members, self.buckets, strict=True):
            if self.own:
                torch._foreach_copy_([self.views[i] for i in group], [self.own[i] for i in group])
            bucket.mul_(1.0 / dist.get_world_size())
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        if self.own:
            torch._foreach_copy_(self.own, self.views)

    def check(self) -> None:
        """RuntimeError unless every gradient is the mean over ranks, which all put in the same value."""
        for gradient in self.gradients:
            if not bool((gradient.float() - VALUE).abs().max() < TOLERANCE):
                raise RuntimeError(f"a reduced gradient is wrong in {words(self.case)}")


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def main(argv: list[str]) -> int:
    """Entry point of one rank."""
    return run_rank(argv, sweep)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""nccl-tests' measurement through torch.distributed, any backend: one rank of the job that `probes.job` starts.

Values are whole numbers that every dtype holds exactly, so that a result is right or wrong without a tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes import failures
from costlab.probes.collective_spec import RESULT_FILE, BenchResult, BenchRow, BenchSpec, sizes
from costlab.probes.job import run_rank
from costlab.probes.peers import Peers
from costlab.probes.session import Voice
from costlab.probes.tables import write_bytes
from costlab.probes.timing import wall

if TYPE_CHECKING:
    import torch

ROOT_RANK = 0
CYCLE = 8  # values repeat with this period: small enough for sums in bfloat16 and uint8


@dataclass
class Bench:
    """One rank's part."""

    spec: BenchSpec
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    peers: Peers


@dataclass
class Case:
    """A collective on buffers of one size: `fill` puts the inputs, `run` calls, `wrong` counts the wrong elements."""

    count: int  # nccl-tests' count: elements of the smaller buffer
    moved: int  # elements of the larger buffer: what the size counts
    in_place: bool
    fill: Callable[[], None]
    run: Callable[[], None]
    wrong: Callable[[], int]


def bench(run_dir: Path, options: bytes, rank: int, voice: Voice) -> None:
    """All operations and sizes, with progress; rank 0 writes the rows as they come."""
    import torch
    import torch.distributed as dist

    spec = msgspec.json.decode(options, type=BenchSpec)
    voice.enter("bench", "joining the process group")
    me = _join(spec)
    result = BenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        backend="nccl" if me.device.type == "cuda" else "gloo",
        device=torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "cpu",
        ranks=me.world,
        version=".".join(map(str, torch.cuda.nccl.version())) if me.device.type == "cuda" else "",
    )
    work = [(op, size) for op in spec.ops for size in sizes(spec)]
    failed: set[str] = set()
    for done, (op, size) in enumerate(work):
        if rank == 0:
            voice.progress(done, len(work), f"{op} {size} B")
        if op not in failed and not _one(me, op, size, result):
            failed.add(op)
        if rank == 0:
            write_bytes(run_dir / RESULT_FILE, msgspec.json.encode(result))
    result.complete = True
    if rank == 0:
        write_bytes(run_dir / RESULT_FILE, msgspec.json.encode(result))
        voice.progress(len(work), len(work), "done")
    dist.barrier()
    dist.destroy_process_group()


def _join(spec: BenchSpec) -> Bench:
    import torch
    import torch.distributed as dist

    from costlab.probes.join import join

    device, peers = join(timedelta(seconds=180))
    return Bench(spec, dist.get_rank(), dist.get_world_size(), device, getattr(torch, spec.dtype), peers)


def _one(me: Bench, op: str, size: int, result: BenchResult) -> bool:
    """Measure one size; False when the backend does not know the operation (said once) on any rank."""
    problem, row = "", None
    try:
        row = _measure(me, op, size)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        # A backend that lacks an operation raises on all ranks alike, before anything is sent.
        if not _unsupported(error):
            raise
        problem = failures.one_line(str(error), 160)
    if me.peers.any(bool(problem)):
        result.skipped.append(f"{op}: {problem or 'not supported on another rank'}")
        return False
    if row is not None:
        result.rows.append(row)
    return True


def _unsupported(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "not support" in text or "unsupported" in text


def _measure(me: Bench, op: str, size: int) -> BenchRow | None:
    """None where the size is too small to be cut into one element a rank."""
    case = _case(me, op, size)
    if case is None:
        return None
    case.fill()
    case.run()
    _settle(me)
    wrong = int(me.peers.sum(case.wrong()))
    first = me.peers.max(_time(me, case, 1))
    iterations = max(1, min(me.spec.iterations, int(me.spec.budget_s / max(first, 1e-7))))
    _time(me, case, min(me.spec.warm_up, iterations))
    mine = _time(me, case, iterations)
    mean = me.peers.sum(mine) / me.world
    return BenchRow(
        op=op, size=case.moved * _width(me), count=case.count, dtype=me.spec.dtype,
        redop="sum" if "reduce" in op else "none",
        root=ROOT_RANK if op in ("broadcast", "reduce") else -1, in_place=case.in_place, time_us=mean * 1e6,
        slowest_us=me.peers.max(mine) * 1e6, wrong=wrong, iterations=iterations,
    )  # fmt: skip


def _time(me: Bench, case: Case, iterations: int) -> float:
    """Seconds a call, calls back to back after a barrier."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=me.peers.group)
    if me.device.type == "cpu":
        return wall(lambda: _repeat(case, iterations)) / iterations
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(iterations):
        case.run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / iterations


def _repeat(case: Case, times: int) -> None:
    for _ in range(times):
        case.run()


def _settle(me: Bench) -> None:
    import torch

    if me.device.type == "cuda":
        torch.cuda.synchronize(me.device)


def _values(me: Bench, count: int, rank: int) -> torch.Tensor:
    """What a rank puts in: (index + rank) mod CYCLE."""
    import torch

    return (torch.arange(count, device=me.device) + rank).remainder(CYCLE).to(me.dtype)


def _sums(me: Bench, count: int) -> torch.Tensor:
    """The exact sum over ranks, as the dtype holds it."""
    import torch

    base = torch.arange(count, device=me.device)
    total = torch.zeros(count, dtype=torch.int64, device=me.device)
    for rank in range(me.world):
        total += (base + rank).remainder(CYCLE)
    return total.to(me.dtype)


def _case(me: Bench, op: str, size: int) -> Case | None:
    """Buffers and calls of an operation; `size` bytes are the larger side, cut evenly where it is cut."""
    elements = size // _width(me)
    part = elements // me.world
    if (part if op in ("all_gather", "reduce_scatter", "all_to_all") else elements) < 1:
        return None
    makers: dict[str, Callable[[], Case | None]] = {
        "all_reduce": lambda: _reduced(me, elements, everywhere=True),
        "reduce": lambda: _reduced(me, elements, everywhere=False),
        "broadcast": lambda: _broadcast(me, elements),
        "all_gather": lambda: _gathered(me, part),
        "reduce_scatter": lambda: _scattered(me, part),
        "all_to_all": lambda: _exchanged(me, part),
        "send_recv": lambda: _passed_on(me, elements),
    }
    return makers[op]()


def _reduced(me: Bench, count: int, *, everywhere: bool) -> Case:
    import torch.distributed as dist

    mine = _values(me, count, me.rank)
    buffer = mine.clone()

    def run() -> None:
        if everywhere:
            dist.all_reduce(buffer)
        else:
            dist.reduce(buffer, ROOT_RANK)

    def wrong() -> int:
        return _differ(buffer, _sums(me, count)) if everywhere or me.rank == ROOT_RANK else 0

    return Case(count, count, True, lambda: _put(buffer, mine), run, wrong)


def _broadcast(me: Bench, count: int) -> Case:
    import torch.distributed as dist

    buffer = _values(me, count, me.rank)
    mine = buffer.clone()
    want = _values(me, count, ROOT_RANK)
    return Case(
        count, count, True, lambda: _put(buffer, mine), lambda: _drop(dist.broadcast(buffer, ROOT_RANK)),
        lambda: _differ(buffer, want),
    )  # fmt: skip


def _gathered(me: Bench, part: int) -> Case:
    import torch
    import torch.distributed as dist

    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    mine, out = _values(me, part, me.rank), torch.zeros(part * me.world, dtype=me.dtype, device=me.device)
    want = torch.cat([_values(me, part, r) for r in range(me.world)])
    return Case(
        part, part * me.world, False, lambda: _zero(out), lambda: _drop(call(out, mine)), lambda: _differ(out, want)
    )


def _scattered(me: Bench, part: int) -> Case:
    import torch
    import torch.distributed as dist

    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mine, out = _values(me, part * me.world, me.rank), torch.zeros(part, dtype=me.dtype, device=me.device)
    want = _sums(me, part * me.world)[me.rank * part : (me.rank + 1) * part]
    return Case(
        part, part * me.world, False, lambda: _zero(out), lambda: _drop(call(out, mine)), lambda: _differ(out, want)
    )


def _exchanged(me: Bench, part: int) -> Case:
    import torch
    import torch.distributed as dist

    mine = _values(me, part * me.world, me.rank)
    out = torch.zeros_like(mine)
    pieces = [_values(me, part * me.world, r)[me.rank * part : (me.rank + 1) * part] for r in range(me.world)]
    want = torch.cat(pieces)
    return Case(
        part,
        part * me.world,
        False,
        lambda: _zero(out),
        lambda: _drop(dist.all_to_all_single(out, mine)),
        lambda: _differ(out, want),
    )


def _passed_on(me: Bench, count: int) -> Case:
    """Every rank sends to the next and receives from the one before, as nccl-tests' sendrecv_perf."""
    import torch
    import torch.distributed as dist

    mine = _values(me, count, me.rank)
    out = torch.zeros_like(mine)
    after, before = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    want = _values(me, count, before)

    def run() -> None:
        ops = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, out, before)]
        for item in dist.batch_isend_irecv(ops):
            item.wait()

    return Case(count, count, False, lambda: _zero(out), run, lambda: _differ(out, want))


def _width(me: Bench) -> int:
    """Bytes of an element."""
    return me.dtype.itemsize


def _put(into: torch.Tensor, values: torch.Tensor) -> None:
    into.copy_(values)


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _drop(_: Any) -> None:
    """A collective's handle that is of no use when it is synchronous."""


def _differ(found: torch.Tensor, want: torch.Tensor) -> int:
    return int((found != want).sum().item())


def main(argv: list[str]) -> int:
    """Entry point of one rank."""
    return run_rank(argv, bench)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

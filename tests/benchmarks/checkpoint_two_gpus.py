"""Stall of a sharded FSDP2 save on two ranks, ours (with a peer replica) against torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --out RESULTS.json
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --tiny      # two CPU ranks

Every rank holds 4 GiB of weights and moments. As in checkpoint_bench.py, the stall is a step-time difference. Steps run
in chunks of four, each from a common start to a wait for the device and an agreement of the ranks. The pace is the
median chunk of windows without a save before and after, whose first chunks are left out. The stall is the sum of what
the chunks take beyond the pace, from the one that begins with the save, `state_dict()` included, to the one after
which every rank's save is durable; the slowest rank counts. `aa_stall_ms` is the noise: the largest such sum, up or
down, over as many chunks without a save. The first save of each way warms up: its stall counts for nothing;
the way's is the median of the others. A window without a save serves as one way's "after" and the next one's "before".

A quarter of each replica's pieces is compared with the original; both ranks' files are opened by one process and every
value compared. What does not begin within BUDGET_S is left out; the ways that no ratio needs begin only if one that
takes as long as the longest so far would also end by then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_common import sync
from common import RESULTS, result, save

from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, Replica, SaveReport, latest
from costlab.kernels.codec.files import aligned_buffer
from costlab.probes.checkpoint_modes import stager_is_reusable

COMMAND = "torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py"
SAVES = {"exact": 3, "fp8": 5}  # the first of which warms up; a save of DCP counts as exact
CHUNK = 4  # steps between two agreements
CONTROL = 7  # chunks of a window without a save; the first is left out
LIMIT_S = 25.0
BUDGET_S = 140.0
PIECE = 16 << 20
COMPARED = 4


class Pending(Protocol):
    """A save under way: ours, or a future of DCP's."""

    def done(self) -> bool:
        """Whether it is durable or failed."""
        ...

    def result(self, timeout: float | None = None) -> object:
        """Wait; raises what it failed with."""
        ...


class Nothing:
    """What a window without a save waits for."""

    def done(self) -> bool:
        """At once."""
        return True

    def result(self, timeout: float | None = None) -> object:
        """Nothing."""
        return timeout


Begin = Callable[[int], Pending]
Way = Callable[..., Any]
Facts = dict[str, Any]


class Sharded:
    """Linear layers and norms in fp32, FSDP2 over all ranks, AdamW; 4 GiB of weights and moments a rank."""

    def __init__(self, tiny: bool, device: torch.device) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        width, layers, tokens = (64, 4, 32) if tiny else (4096, 43, 8192)
        self.device = device
        with device:
            blocks = [
                torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.LayerNorm(width))
                for _ in range(layers)
            ]
        self.model = torch.nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.batch = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        for _ in range(3):
            self.step()
        sync(device)

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.batch).float().square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """The sharded state, as DTensors."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        """Bytes of this rank's weights and moments."""
        local = [p.to_local() for p in self.model.parameters()]  # type: ignore[attr-defined]
        return 3 * sum(int(p.numel()) * int(p.element_size()) for p in local)


class Ranks:
    """Agreement among the ranks on the CPU, beside the training's own groups."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()

    def all(self, *flags: bool) -> list[bool]:
        """Of each flag, whether every rank says so."""
        values = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return [bool(value) for value in values]

    def said(self, problem: str) -> str:
        """The first rank's problem, for every rank; empty if there is none."""
        texts: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, problem, group=self.group)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")

    def clear(self, shared: Path, own: Path | None = None) -> None:
        """Remove a folder of all ranks, and one of this rank, when nobody reads them any more."""
        dist.barrier(group=self.group)
        for folder in (shared if self.rank == 0 else None, own):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        dist.barrier(group=self.group)

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return float(held)


def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """The answer and no problem, or None and the error's text."""
    try:
        return work(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:200]


def window(load: Sharded, ranks: Ranks, begin: Callable[[], Pending], least: int) -> tuple[list[float], str]:
    """Seconds of each chunk of steps until all ranks are done, at least of `least`; and the first problem."""
    sync(load.device)
    dist.barrier(group=ranks.group)
    began = last = time.perf_counter()
    chunks: list[float] = []
    pending, problem = attempt(begin)
    if not ranks.all(not problem)[0]:
        return [], ranks.said(problem)
    while True:
        for _ in range(CHUNK):
            load.step()
        sync(load.device)
        done, in_time = ranks.all(pending.done(), last - began < LIMIT_S)
        now = time.perf_counter()
        chunks.append(now - last)
        last = now
        if (done and len(chunks) >= least) or not in_time:
            break
    _, problem = attempt(lambda: pending.result(LIMIT_S))
    return chunks, ranks.said(problem or ("" if done else f"not durable after {LIMIT_S:g} s"))


def excess(chunks: list[float], pace: float) -> float:
    """Seconds that chunks take beyond the pace."""
    return sum(chunks) - len(chunks) * pace


def noise(control: list[float], count: int, pace: float) -> float:
    """The largest excess, up or down, of `count` control chunks in a row; they repeat where there are fewer."""
    starts = range(len(control))
    return max(abs(excess([control[(s + i) % len(control)] for i in range(count)], pace)) for s in starts)


class Meter:
    """Stalls on the slowest rank; keeps the last window without a save."""

    def __init__(self, load: Sharded, ranks: Ranks) -> None:
        self.load, self.ranks = load, ranks
        self._before = self._control()

    def _control(self) -> list[float]:
        return window(self.load, self.ranks, Nothing, CONTROL)[0][1:]

    def measure(self, begin: Begin, count: int) -> tuple[list[float], str, Facts]:
        """Stalls of `count` saves, the first of which warms up; a problem of any rank, which ends it on all; facts."""
        saves: list[list[float]] = []
        for number in range(count):
            chunks, problem = window(self.load, self.ranks, partial(begin, number), 1)
            if problem:
                return [], problem, {}
            saves.append(chunks)
        control = self._before + (after := self._control())
        self._before = after
        pace, last, slowest = statistics.median(control), saves[-1], self.ranks.slowest
        facts = {
            "aa_stall_ms": slowest(noise(control, len(last), pace)) * 1e3,
            "pace_ms_per_chunk": slowest(pace) * 1e3,
            "steps_per_chunk": CHUNK,
            "chunks": len(last),
            "control_chunks": len(control),
            "chunks_ms": [round(c * 1e3, 1) for c in last],
        }
        return [slowest(excess(chunks, pace)) for chunks in saves], "", facts


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files have one size and the same bytes in every COMPARED-th piece and the last."""
    size = one.stat().st_size
    if size != other.stat().st_size:
        return False
    starts = range(0, size, PIECE)
    buffers = aligned_buffer(PIECE), aligned_buffer(PIECE)
    with direct_reader(one) as first, direct_reader(other) as second:
        for start in {*starts[::COMPARED], *starts[-1:]}:
            counts = [os.preadv(fd, [b.data], start) for fd, b in zip((first, second), buffers, strict=True)]
            if counts != [min(PIECE, size - start)] * 2 or not np.array_equal(
                buffers[0][: counts[0]], buffers[1][: counts[0]]
            ):
                return False
    return True


@contextmanager
def direct_reader(path: Path) -> Iterator[int]:
    """A descriptor that reads past the page cache where the filesystem lets it: what counts is what the disk has."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def replicas_equal(peer: Replica, report: SaveReport | None) -> tuple[bool, str]:
    """Whether the peer's file of the last save lies here, by `same_bytes`; what went wrong with it."""
    if report is None or report.replica is None:
        return False, f"replica: {report.replica_error if report else 'no save'}"
    return same_bytes(report.replica, report.directory / peer.source_name), ""


def ours(meter: Meter, root: Path, preset: str, replica: bool) -> tuple[list[float], str, Facts]:
    """Stalls of our saves, with a replica every file is also sent to the peer; facts of the last one."""
    load, ranks = meter.load, meter.ranks
    peer = Replica.create(root / f"replica-{ranks.rank}") if replica else None
    home = root / f"{preset}-{'replica' if replica else 'alone'}"
    # Errors are collected after the steps: one raised within a step would leave the other rank in a collective.
    with AsyncCheckpointer(
        home, preset, replica=peer, gate_every=0, commit_timeout=60, on_failure="warn"
    ) as checkpointer:
        checkpointer.attach(load.optimizer)
        checkpointer.warm_up(load.state())
        found, problem, facts = meter.measure(lambda number: checkpointer.save(number, load.state()), SAVES[preset])
        report = checkpointer.last_report
    if report is not None:
        facts |= {"launch_ms": report.launch_s * 1e3, "durable_s": report.durable_s, "file_bytes": report.file_bytes}
        facts |= {f"{stage}_s": report.seconds(stage) for stage in ("write", "sync", "replica")}
        facts |= {"device_ms": report.device_s * 1e3} if report.device_s is not None else {}
    if peer is not None:
        equal, trouble = replicas_equal(peer, report)
        problem = problem or ranks.said(trouble)
        facts |= {"replica": peer.label, "replica_equal": ranks.all(equal)[0]}
        peer.close()
    ranks.clear(home, root / f"replica-{ranks.rank}")
    return found, problem, facts


def dcp_ways(device: torch.device) -> dict[str, Way]:
    """Ways of `dcp.async_save`: the default and those that promise a shorter stall."""
    from torch.distributed.checkpoint import staging
    from torch.distributed.checkpoint.state_dict_saver import async_save

    cuda = device.type == "cuda"
    control = dist.new_group(backend="gloo")  # apart from the training's group: its messages would mix with the steps'
    pinned = staging.BlockingAsyncStager(cache_staged_state_dict=True)
    ways: dict[str, Way] = {
        "default": partial(async_save, process_group=control),
        "cached pinned stager": partial(async_save, process_group=control, async_stager=pinned),
    }
    options, default = getattr(staging, "StagingOptions", None), getattr(staging, "DefaultStager", None)
    if options is not None and default is not None:
        make = partial(default, options(cuda, False, True, cuda))
        if stager_is_reusable():
            ways["DefaultStager pinned, async"] = partial(async_save, process_group=control, async_stager=make())
        else:
            ways["DefaultStager pinned, async, made anew"] = lambda state, **more: async_save(
                state, process_group=control, async_stager=make(), **more
            )
    return ways


def dcp(meter: Meter, root: Path, name: str, way: Way) -> tuple[list[float], str, Facts]:
    """Stalls of DCP's saves; what is still being staged is waited for before the next `optimizer.step()`."""
    load, staging = meter.load, list[Any]()

    def before_step(*_: Any) -> None:
        if staging:
            wait([staging.pop()])

    hook = load.optimizer.register_step_pre_hook(before_step)
    home = root / f"dcp-{name.split(maxsplit=1)[0]}"

    def begin(number: int) -> Pending:
        answer = way(load.state(), checkpoint_id=str(home / str(number)))
        if (staged := getattr(answer, "staging_completion", None)) is not None:
            staging.append(staged)
        return cast("Pending", getattr(answer, "upload_completion", answer))

    try:
        return meter.measure(begin, SAVES["exact"])
    finally:
        hook.remove()
        meter.ranks.clear(home)


def restored_on_one(load: Sharded, ranks: Ranks, home: Path) -> bool:
    """Whether one process, reading both ranks' files, gets every value: a save made while nothing steps."""
    with AsyncCheckpointer(home, "exact", gate_every=0) as checkpointer:
        checkpointer.save(1, load.state()).result(60)
    whole = {n: p.full_tensor().cpu() for n, p in load.model.named_parameters()}  # type: ignore[attr-defined]
    equal = True
    if ranks.rank == 0:
        directory = latest(home)
        if directory is None:
            raise RuntimeError("no committed checkpoint")
        with Checkpoint.open(directory) as found:
            got = {n: torch.empty_like(t) for n, t in whole.items()}
            found.load({"model": got})
            equal = all(torch.equal(got[n], t) for n, t in whole.items())
    return ranks.all(equal)[0]


def state_seconds(load: Sharded, ranks: Ranks) -> float:
    """What the `state_dict()` calls of a save take, whoever saves; part of every stall."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        load.state()
        times.append(time.perf_counter() - start)
    return ranks.slowest(statistics.median(times))


def against_dcp(stalls: dict[str, float], noise: dict[str, float]) -> list[dict[str, Any]]:
    """Our stalls with a replica against DCP's default and, if several of its ways were measured, the best of them.

    A stall within what two windows without a save differ by is not told: its row holds that much, as a bound. A stall
    below zero shows that they differ by as much.
    """
    rows = []
    peers = {name: stall for name, stall in stalls.items() if name.startswith("dcp ")}
    best = min(peers.values()) if len(peers) > 1 else None
    for preset in ("exact", "fp8"):
        mine = stalls.get(f"{preset}+replica")
        for against, peer in (("best", best), ("default", peers.get("dcp default"))):
            if mine is None or peer is None or peer <= 0:
                continue
            floor = max(noise[f"{preset}+replica"], -mine)
            rows.append(
                result(f"two_gpu_stall_{preset}_vs_dcp_{against}", max(mine, floor), "s", peer=f"DCP {against}",
                       peer_value=peer, n=SAVES[preset] - 1, command=COMMAND, at_most=mine <= floor)
            )  # fmt: skip
    return rows


def run(tiny: bool, out: Path, root: Path) -> None:
    """Measure everything; rank 0 writes the results after each part."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if not tiny else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks, load = Ranks(), Sharded(tiny, device)
    shared = [str(root)]
    dist.broadcast_object_list(shared, 0, group=ranks.group)
    root = Path(shared[0])
    rows: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    noise: dict[str, float] = {}
    longest, began = 0.0, time.perf_counter()

    def note(key: str, label: str, work: Callable[[], tuple[list[float], str, Facts]], needed: bool) -> None:
        nonlocal longest
        start = time.perf_counter()
        late = ranks.slowest(start - began + (0.0 if needed else longest)) >= BUDGET_S
        answer, problem = (None, f"not measured: {BUDGET_S:g} s are over") if late else attempt(work)
        found, problem, facts = answer or ([], problem, {})
        if found and not problem:
            best[key], noise[key] = statistics.median(found[1:]), float(facts.get("aa_stall_ms", 0.0)) / 1e3
        facts |= {"stalls_ms": [f * 1e3 for f in found]} | ({"problem": problem} if problem else {})
        stall = statistics.median(found[1:]) * 1e3 if found else 0.0
        rows.append(result(f"{label}: stall", stall, "ms", n=len(found[1:]), command=COMMAND, **facts))  # one warms up
        if not found:
            rows[-1]["value"] = None
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {label:<36} {rows[-1]['value']} ms  {facts}", flush=True)
            save(out.stem, environment(load, dist.get_world_size()), rows, out.parent)
        longest = max(longest, time.perf_counter() - start)

    rows.append(result("state_dict() calls", state_seconds(load, ranks) * 1e3, "ms", n=5, command=COMMAND))
    meter = Meter(load, ranks)
    theirs = list(dcp_ways(device).items())

    def note_ours(replica: bool) -> None:
        for preset in ("exact", "fp8"):
            note(f"{preset}{'+replica' if replica else ''}", f"{preset}{' with replica' if replica else ''}",
                 partial(ours, meter, root, preset, replica), replica)  # fmt: skip

    def note_theirs(ways: list[tuple[str, Way]], needed: bool) -> None:
        for name, way in ways:
            note(f"dcp {name}", f"DCP {name}", partial(dcp, meter, root, name, way), needed)

    note_ours(True)
    note_theirs(theirs[:2], True)
    metric = "both ranks' files loaded by one process: equal"
    if ranks.slowest(time.perf_counter() - began) < BUDGET_S:
        equal = restored_on_one(load, ranks, root / "one")
        rows.append(result(metric, float(equal), "bool", n=1, command=COMMAND))
    note_ours(False)
    note_theirs(theirs[2:], False)
    rows += against_dcp(best, noise)
    if ranks.rank == 0:
        save(out.stem, environment(load, dist.get_world_size()), rows, out.parent)
        for row in rows:
            print(f"{row['metric']:<54} {row['value']} {row['unit']:<5} {row['ratio'] or ''}")
    dist.barrier(group=ranks.group)
    dist.destroy_process_group()


def environment(load: Sharded, world: int) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = load.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "ranks": world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "bytes_per_rank": load.nbytes(),
    }


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoint_two_gpus.json")
    parser.add_argument("--root", type=Path, default=None, help="a directory on the disk to be measured")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the script")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="checkpoint-two-", dir=options.root))
    try:
        run(options.tiny, options.out, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

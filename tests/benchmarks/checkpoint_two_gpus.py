"""Stall of a sharded FSDP2 save on two ranks, ours (with a peer replica) against torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --out RESULTS.json
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --tiny      # two CPU ranks

Every rank holds 4 GiB of weights and moments. As in checkpoint_bench.py, the stall is a step-time difference: the time
of a window of steps that begins with the save, `state_dict()` included, and ends when every rank's save is durable,
less as many steps at the pace of windows without a save right before and after. All windows run the same code: a common
start, and every fourth step a wait for the device and an agreement of the ranks. The slowest rank counts. Replicas are
compared with the originals; at the end both ranks' files are opened by one process and every value compared. What does
not begin within BUDGET_S is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_common import sync
from common import RESULTS, result, save

from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, Replica, SaveReport, latest
from costlab.probes.checkpoint_modes import stager_is_reusable

COMMAND = "torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py"
SAVES = 2
CHUNK = 4  # steps between two agreements
CONTROL = 8  # steps of a window without a save
LIMIT_S = 30.0
BUDGET_S = 85.0


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


def window(load: Sharded, ranks: Ranks, begin: Callable[[], Pending], least: int) -> tuple[float, int, str]:
    """Seconds and number of steps from a common start until all ranks are done; and the first problem."""
    sync(load.device)
    dist.barrier(group=ranks.group)
    start, steps = time.perf_counter(), 0
    pending, problem = attempt(begin)
    if not ranks.all(not problem)[0]:
        return 0.0, 0, ranks.said(problem)
    while True:
        for _ in range(CHUNK):
            load.step()
        steps += CHUNK
        sync(load.device)
        done, in_time = ranks.all(pending.done(), time.perf_counter() - start < LIMIT_S)
        if (done and steps >= least) or not in_time:
            break
    total = time.perf_counter() - start
    _, problem = attempt(lambda: pending.result(LIMIT_S))
    return total, steps, ranks.said(problem or ("" if done else f"not durable after {LIMIT_S:g} s"))


def stall(load: Sharded, ranks: Ranks, begin: Callable[[], Pending]) -> tuple[float, str]:
    """Extra seconds of a window with a save, on the slowest rank; and the first problem."""
    before, count, _ = window(load, ranks, Nothing, CONTROL)
    total, steps, problem = window(load, ranks, begin, CHUNK)
    after, more, _ = window(load, ranks, Nothing, CONTROL)
    return ranks.slowest(total - steps * (before + after) / (count + more)), problem


def measure(load: Sharded, ranks: Ranks, begin: Begin) -> tuple[list[float], str]:
    """Stalls of the saves, the first of which warms up; a problem of any rank ends it on all."""
    found: list[float] = []
    for number in range(SAVES):
        seconds, problem = stall(load, ranks, partial(begin, number))
        if problem:
            return found, problem
        found.append(seconds)
    return found, ""


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files are equal."""
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb", buffering=0) as first, other.open("rb", buffering=0) as second:
        while piece := first.read(16 << 20):
            if piece != second.read(len(piece)):
                return False
    return True


def replicas_equal(peer: Replica, report: SaveReport | None) -> tuple[bool, str]:
    """Whether the peer's file of the last save lies here byte for byte; what went wrong with it."""
    if report is None or report.replica is None:
        return False, f"replica: {report.replica_error if report else 'no save'}"
    return same_bytes(report.replica, report.directory / peer.source_name), ""


def ours(load: Sharded, ranks: Ranks, root: Path, preset: str, replica: bool) -> tuple[list[float], str, Facts]:
    """Stalls of our saves, with a replica every file is also sent to the peer; facts of the last one."""
    peer = Replica.create(root / f"replica-{ranks.rank}") if replica else None
    home = root / f"{preset}-{'replica' if replica else 'alone'}"
    facts: Facts = {}
    # Errors are collected after the steps: one raised within a step would leave the other rank in a collective.
    with AsyncCheckpointer(
        home, preset, replica=peer, gate_every=0, commit_timeout=60, on_failure="warn"
    ) as checkpointer:
        checkpointer.attach(load.optimizer)
        checkpointer.warm_up(load.state())
        found, problem = measure(load, ranks, lambda number: checkpointer.save(number, load.state()))
        report = checkpointer.last_report
    if report is not None:
        facts = {"launch_ms": report.launch_s * 1e3, "durable_s": report.durable_s, "file_bytes": report.file_bytes}
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


def dcp(load: Sharded, ranks: Ranks, root: Path, name: str, way: Way) -> tuple[list[float], str]:
    """Stalls of DCP's saves; what is still being staged is waited for before the next `optimizer.step()`."""
    staging: list[Any] = []

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
        return measure(load, ranks, begin)
    finally:
        hook.remove()
        ranks.clear(home)


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
    began = time.perf_counter()

    def note(key: str, label: str, work: Callable[[], tuple[list[float], str, Facts]]) -> None:
        late = ranks.slowest(time.perf_counter() - began) >= BUDGET_S
        answer, problem = (None, f"not measured: {BUDGET_S:g} s are over") if late else attempt(work)
        found, problem, facts = answer or ([], problem, {})
        if found and not problem:
            best[key] = found[-1]
        facts |= {"stalls_ms": [f * 1e3 for f in found]} | ({"problem": problem} if problem else {})
        last = found[-1] * 1e3 if found else 0.0
        rows.append(result(f"{label}: stall", last, "ms", n=len(found), command=COMMAND, **facts))
        if not found:
            rows[-1]["value"] = None
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {label:<36} {rows[-1]['value']} ms  {facts}", flush=True)
            save(out.stem, environment(load, dist.get_world_size()), rows, out.parent)

    rows.append(result("state_dict() calls", state_seconds(load, ranks) * 1e3, "ms", n=5, command=COMMAND))
    for preset in ("exact", "fp8"):
        for replica in (False, True):
            note(f"{preset}{'+replica' if replica else ''}", f"{preset}{' with replica' if replica else ''}",
                 partial(ours, load, ranks, root, preset, replica))  # fmt: skip
    for name, way in dcp_ways(device).items():
        note(f"dcp {name}", f"DCP {name}", lambda n=name, w=way: (*dcp(load, ranks, root, n, w), {}))  # type: ignore[misc]
    peers = {k: v for k, v in best.items() if k.startswith("dcp ")}
    for preset in ("exact", "fp8"):
        for against, peer in (("best", min(peers.values(), default=0.0)), ("default", best.get("dcp default", 0.0))):
            mine = best.get(f"{preset}+replica")
            if mine is not None and peer > 0:
                rows.append(
                    result(f"two_gpu_stall_{preset}_vs_dcp_{against}", mine, "s", peer=f"DCP {against}",
                           peer_value=peer, n=SAVES - 1, command=COMMAND)
                )  # fmt: skip
    equal = restored_on_one(load, ranks, root / "one")
    rows.append(result("both ranks' files loaded by one process: equal", float(equal), "bool", n=1, command=COMMAND))
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

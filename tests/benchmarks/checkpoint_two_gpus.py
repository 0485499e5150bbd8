"""Stall of a sharded FSDP2 save on two ranks, ours (with a peer replica) against torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --out RESULTS.json
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py --tiny      # two CPU ranks

Every rank holds 4 GiB of weights and moments. The stall is the extra time of the steps from a save until every rank
says that it is durable; the pace without a save is measured before and after. The slowest rank counts. At the end both
ranks' files are opened by one process and every value compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_common import sync
from common import RESULTS, result, save

from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, Replica, latest

Begin = Callable[[int], Callable[[], bool]]
COMMAND = "torchrun --standalone --nproc-per-node 2 tests/benchmarks/checkpoint_two_gpus.py"
SAVES = 2
LIMIT_S = 30.0


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

    def pace(self, steps: int) -> float:
        """Seconds a step without a save."""
        sync(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        sync(self.device)
        return (time.perf_counter() - start) / steps


class Ranks:
    """Agreement among the ranks on the CPU, beside the training's own groups."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()

    def all(self, flag: bool) -> bool:
        """Whether every rank says so."""
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.group)
        return bool(value)

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return float(held)


def stall(load: Sharded, ranks: Ranks, begin: Callable[[], Callable[[], bool]]) -> float:
    """Extra seconds of the steps from a save until all ranks have committed; asked every fourth step."""
    before = load.pace(8)
    dist.barrier(group=ranks.group)
    start, steps = time.perf_counter(), 0
    done = begin()
    while True:
        for _ in range(4):
            load.step()
        steps += 4
        sync(load.device)
        late = time.perf_counter() - start > LIMIT_S
        if ranks.all(done()) or not ranks.all(not late):
            break
    total = time.perf_counter() - start
    extra = total - steps * (before + load.pace(8)) / 2
    if not ranks.all(done()):
        raise RuntimeError(f"not durable after {LIMIT_S:g} s")
    return ranks.slowest(extra)


def measure(load: Sharded, ranks: Ranks, begin: Begin, saves: int = SAVES) -> tuple[list[float], str]:
    """Stalls of `saves` saves, the first of which warms up; an error of any rank ends it on all."""
    found: list[float] = []
    problem = ""
    for number in range(saves):
        try:
            found.append(stall(load, ranks, lambda n=number: begin(n)))  # type: ignore[misc]
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:200]
        if not ranks.all(not problem):
            return found, problem or "another rank failed"
    return found, ""


def ours(load: Sharded, ranks: Ranks, root: Path, preset: str, replica: bool) -> tuple[list[float], str, Path]:
    """Stalls of our saves; with a replica every file is also sent to the peer."""
    backend = "nccl" if load.device.type == "cuda" else "gloo"
    peer = Replica(dist.new_group(backend=backend), root / f"replica-{ranks.rank}") if replica else None
    home = root / f"{preset}-{'replica' if replica else 'alone'}"
    with AsyncCheckpointer(home, preset, replica=peer, gate_every=0, commit_timeout=60) as checkpointer:
        checkpointer.attach(load.optimizer)
        checkpointer.warm_up(load.state())

        def begin(number: int) -> Callable[[], bool]:
            return checkpointer.save(number, load.state()).done

        found, problem = measure(load, ranks, begin)
        report = checkpointer.last_report
    if report is not None and report.replica_error:
        problem = problem or f"replica: {report.replica_error}"
    if peer is not None:
        peer.close()
    return found, problem, home


def dcp_ways(device: torch.device) -> dict[str, Callable[[dict[str, Any], Path], Any]]:
    """Ways of `dcp.async_save`: the default and those that promise a shorter stall."""
    from torch.distributed.checkpoint import staging
    from torch.distributed.checkpoint.state_dict_saver import async_save

    cuda = device.type == "cuda"
    control = dist.new_group(backend="gloo")  # apart from the training's group: its messages would mix with the steps'
    kept: dict[str, Any] = {}

    def cached(key: str, make: Callable[[], Any]) -> Any:
        if key not in kept:
            kept[key] = make()
        return kept[key]

    ways: dict[str, Callable[[dict[str, Any], Path], Any]] = {
        "default": lambda state, path: async_save(state, checkpoint_id=str(path), process_group=control),
        "cached pinned stager": lambda state, path: async_save(
            state,
            checkpoint_id=str(path),
            process_group=control,
            async_stager=cached("b", lambda: staging.BlockingAsyncStager(cache_staged_state_dict=True)),
        ),
    }
    options, default = getattr(staging, "StagingOptions", None), getattr(staging, "DefaultStager", None)
    if options is not None and default is not None:
        # A stager empties its own table after one use (KeyError on 2.11): each save gets a fresh one.
        ways["DefaultStager pinned, async"] = lambda state, path: async_save(
            state,
            checkpoint_id=str(path),
            process_group=control,
            async_stager=default(options(cuda, False, True, cuda)),
        )
    return ways


def dcp(load: Sharded, ranks: Ranks, root: Path, name: str, way: Callable[..., Any]) -> tuple[list[float], str]:
    """Stalls of DCP's saves; what is still being staged is waited for before the next `optimizer.step()`."""
    staging: list[Any] = []
    hook = load.optimizer.register_step_pre_hook(lambda *_: staging.pop().result() if staging else None)
    home = root / f"dcp-{name.split(maxsplit=1)[0]}"

    def begin(number: int) -> Callable[[], bool]:
        answer = way(load.state(), home / str(number))
        staged = getattr(answer, "staging_completion", None)
        if staged is not None:
            staging.append(staged)
        future = getattr(answer, "upload_completion", answer)
        return lambda: bool(future.done())

    try:
        return measure(load, ranks, begin, 2)
    finally:
        hook.remove()
        dist.barrier(group=ranks.group)
        if ranks.rank == 0:
            shutil.rmtree(home, ignore_errors=True)


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
    return ranks.all(equal)


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

    def note(key: str, label: str, found: list[float], problem: str) -> None:
        if found and not problem:
            best[key] = found[-1]
        value = found[-1] * 1e3 if found else float("nan")
        rows.append(result(label, value, "ms", n=len(found), command=COMMAND, stalls_ms=[f * 1e3 for f in found]))
        if problem:
            rows[-1]["problem"] = problem
        if ranks.rank == 0:
            print(f"{label:<46} {value:10.1f} ms  {problem}", flush=True)
            save(out.stem, environment(load, dist.get_world_size()), rows, out.parent)

    for preset in ("exact", "fp8"):
        for replica in (False, True):
            found, problem, home = ours(load, ranks, root, preset, replica)
            note(f"{preset}{'+replica' if replica else ''}", f"{preset}{' with replica' if replica else ''}: stall",
                 found, problem)  # fmt: skip
            dist.barrier(group=ranks.group)
            if ranks.rank == 0:
                shutil.rmtree(home, ignore_errors=True)
    for name, way in dcp_ways(device).items():
        found, problem = dcp(load, ranks, root, name, way)
        note(f"dcp {name}", f"DCP {name}: stall", found, problem)
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
            print(f"{row['metric']:<46} {row['value']:12.4g} {row['unit']:<5} {row['ratio'] or ''}")
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

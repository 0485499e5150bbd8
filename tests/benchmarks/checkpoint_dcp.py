"""The peer of the checkpoint benchmark: torch.distributed.checkpoint in every configuration that promises a
short stall.

What is still being staged when `async_save` returns is waited for before the next `optimizer.step()`, the latest moment
at which it is safe: the same rule as for our own saves.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_common import Bench, Workload, stall_of

Save = Callable[[dict[str, Any], Path], Any]
LIMIT_S = 270.0


def _dcp_saves(bench: Bench) -> dict[str, Save]:
    """Ways of `dcp.async_save`: its default, and every one that promises a shorter stall."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import staging, state_dict_saver

    options = getattr(staging, "StagingOptions", None)
    default = getattr(staging, "DefaultStager", None)
    blocking = getattr(staging, "BlockingAsyncStager", None)
    kind = getattr(state_dict_saver, "AsyncCheckpointerType", None)
    kept: dict[str, Any] = {}

    def with_stager(make: Callable[[], Any], key: str, **more: Any) -> Save:
        def save(state: dict[str, Any], path: Path) -> Any:
            if key not in kept:
                kept[key] = make()
            return dcp.async_save(state, checkpoint_id=str(path), async_stager=kept[key], **more)

        return save

    # What may be the best comes first: time may run out.
    ways: dict[str, Save] = {"default": lambda state, path: dcp.async_save(state, checkpoint_id=str(path))}
    if blocking is not None:
        ways["cached pinned stager, thread"] = with_stager(lambda: blocking(cache_staged_state_dict=True), "b")
    cuda = bench.device.type == "cuda"
    if options is not None and default is not None:
        ways["DefaultStager pinned, async"] = with_stager(lambda: default(options(cuda, False, True, cuda)), "d")
        ways["DefaultStager pinned+shared, async"] = with_stager(lambda: default(options(cuda, True, True, cuda)), "s")
        ways["DefaultStager pinned, blocking"] = with_stager(lambda: default(options(cuda, False, False, False)), "p")
    if kind is not None:
        process = {"async_checkpointer_type": kind.PROCESS}
        ways["process"] = lambda state, path: dcp.async_save(state, checkpoint_id=str(path), **process)
        if options is not None and default is not None:
            ways["process, DefaultStager pinned+shared"] = with_stager(
                lambda: default(options(cuda, True, True, cuda)), "ps", **process
            )
    return ways


def section_dcp(bench: Bench) -> None:
    """The same stall for DCP: default and, of what works, the best. The first save of each way warms it up."""
    import torch.distributed as dist

    load = Workload(bench)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if bench.device.type == "cuda" else "gloo"
        store = dist.FileStore(str(bench.root / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    found: dict[str, float] = {}
    began = time.perf_counter()
    for name, way in _dcp_saves(bench).items():
        if time.perf_counter() - began > LIMIT_S:
            bench.add(f"DCP {name}: stall", "not measured (out of time)", "ms")
            continue
        try:
            stalls = [_dcp_stall(bench, load, way, name, attempt) for attempt in range(2)]
        except Exception as error:
            bench.add(f"DCP {name}: stall", f"{type(error).__name__}: {error}"[:200], "ms")
            continue
        found[name] = stalls[-1]
        bench.add(f"DCP {name}: stall, first / second save", stalls[-1] * 1e3, "ms", "first", stalls[0] * 1e3, n=2)
    _compare_stalls(bench, found)


def _dcp_stall(bench: Bench, load: Workload, way: Save, name: str, attempt: int) -> float:
    path = bench.root / f"dcp-{abs(hash(name))}-{attempt}"
    futures: list[Any] = []
    staging: list[Any] = []

    def save() -> Callable[[], bool]:
        answer = way(load.state(), path)
        staged = getattr(answer, "staging_completion", None)
        if staged is not None:
            staging.append(staged)
        futures.append(getattr(answer, "upload_completion", answer))
        return lambda: bool(futures[0].done())

    hook = load.optimizer.register_step_pre_hook(lambda *_: staging.pop().result() if staging else None)
    try:
        stall = stall_of(load, save, bench)
        futures[0].result(60)
    finally:
        hook.remove()
        shutil.rmtree(path, ignore_errors=True)
    return stall


def _compare_stalls(bench: Bench, found: dict[str, float]) -> None:
    if not found:
        return
    best = min(found, key=lambda n: found[n])
    bench.add("best DCP configuration", best, "")
    _compare(bench, "dcp_default", found.get("default"), {"exact": 1 / 30, "fp8": 1 / 100})
    _compare(bench, "dcp_best", found[best], {"exact": 1 / 3, "fp8": 1 / 5})


def _compare(bench: Bench, against: str, peer: float | None, targets: dict[str, float]) -> None:
    for name, target in targets.items():
        ours = bench.facts.get(f"stall_{name}")
        if ours is None or peer is None or peer <= 0:
            bench.add(f"stall_{name}_vs_{against}", None, "not measured")
        else:
            bench.add(f"stall_{name}_vs_{against}", ours / peer, "ratio", "target", target, ours / peer / target)

"""What the ranks of a lab do: calibrate its links, run plans, time them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.plan import Layout, Plan
from costlab.kernels.schedule.program import Kind, Op, Program, Step

_made: dict[Layout, Communicator] = {}


def communicator(layout: Layout) -> Communicator:
    if layout not in _made:
        _made[layout] = Communicator(None, layout)
    return _made[layout]


def timed_plan(rank: int, layout: Layout, plan: Plan, nbytes: int, repeats: int) -> list[float]:
    """Seconds of each repeat on this rank, all ranks starting together; results are checked."""
    comm = communicator(layout)
    every = torch.stack([contribution(r, nbytes // 4) for r in range(comm.world_size)])
    expected, source = every.sum(0), every[rank]
    seconds = []
    for turn in range(repeats + 1):
        tensor = source.clone()
        dist.barrier()
        start = time.perf_counter()
        comm.all_reduce(tensor, plan)
        took = time.perf_counter() - start
        if not torch.equal(tensor, expected):
            raise AssertionError(f"{plan} gave a wrong sum")
        if turn:
            seconds.append(took)
    return seconds


def contribution(rank: int, numel: int) -> torch.Tensor:
    """Small integers, so that the sum is exact in any order."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(rank)).float()


def exchange(rank: int, layout: Layout, rings: list[list[int]], nbytes: int, turns: int) -> float:
    """Seconds a step of rings that all run at once: every rank sends to the next and receives from the one before."""
    ring = next((r for r in rings if rank in r), None)
    numel = nbytes // 4
    flat = torch.zeros(2 * numel)
    program: Program = {}
    if ring is not None and len(ring) > 1:
        at = ring.index(rank)
        ops = (
            Op(Kind.SEND, ring[(at + 1) % len(ring)], 0, numel),
            Op(Kind.RECV, ring[(at - 1) % len(ring)], numel, 2 * numel),
        )
        program = {"exchange": [Step(ops)] * turns}
    return _timed(layout, program, flat) / turns


def tiny_chunks(rank: int, layout: Layout, chunks: int) -> float:
    """Seconds of a chain all-reduce whose chunks hold next to nothing."""
    comm = communicator(layout)
    tensor = torch.zeros(chunks * 64)
    seconds = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        comm.all_reduce(tensor, Plan("chain", chunks=chunks))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _timed(layout: Layout, program: Program, flat: torch.Tensor) -> float:
    comm = communicator(layout)
    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        comm.run(program, flat, "calibration")
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def facts(_rank: int) -> dict[str, Any]:
    """Versions behind a measurement."""
    return {"torch": torch.__version__, "backend": "gloo"}

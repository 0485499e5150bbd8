"""What the ranks do in the failure tests: late, dead and aborting peers, and calls that are refused."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from rank_pool import worlds

from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused
from costlab.kernels.schedule.plan import Plan

PAIRS = ((0, 1), (2, 3))
PATIENCE = 8.0  # seconds


def late_peer(
    rank: int, world: int, plan: Plan, late: int, seconds: float, asynchronous: bool
) -> tuple[str, str, float]:
    """One rank does not take part; the others must give up in time. Returns (error, error of a later call, seconds)."""
    layout = PAIRS if world == 4 else None
    comm = Communicator(worlds[world], layout, timeout=timedelta(seconds=seconds))
    if rank == late:
        time.sleep(seconds + 1.0)
        return "", "", 0.0
    start = time.perf_counter()
    first = _attempt(comm, plan, asynchronous)
    took = time.perf_counter() - start
    return first, _attempt(comm, plan, asynchronous), took


def _attempt(comm: Communicator, plan: Plan, asynchronous: bool) -> str:
    tensor = torch.ones(4096)
    try:
        handle = comm.all_reduce(tensor, plan, async_op=asynchronous)
        if handle is not None:
            handle.wait()
    except ScheduleError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dead_peer(rank: int, world: int, plan: Plan) -> tuple[str, float]:
    """The last rank has been killed before; how and when do the others notice?"""
    comm = Communicator(worlds[world], timeout=timedelta(seconds=PATIENCE))
    start = time.perf_counter()
    return _attempt(comm, plan, False), time.perf_counter() - start


def abort(rank: int, world: int) -> tuple[str, str, float]:
    """Rank 0 aborts while the others wait for it. Returns (error, error of a later call, seconds)."""
    comm = Communicator(worlds[world], timeout=timedelta(seconds=PATIENCE))
    start = time.perf_counter()
    if rank == 0:
        time.sleep(1.0)
        comm.abort()
        first = _attempt(comm, Plan("ring"), False)
    else:
        first = _attempt(comm, Plan("hybrid", chunks=3), rank == 1)
    return first, _attempt(comm, Plan("backend"), False), time.perf_counter() - start


def refusals(rank: int) -> dict[str, str]:
    """Calls that do not fit; the communicator works afterwards."""
    comm = Communicator(worlds[4], PAIRS)
    calls = {
        "bool": lambda: comm.all_reduce(torch.ones(4, dtype=torch.bool), Plan("ring")),
        "integer average": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32), Plan("ring"), "avg"),
        "operator": lambda: comm.all_reduce(torch.ones(4), Plan("ring"), "max"),  # type: ignore[arg-type]
        "order": lambda: comm.all_reduce(torch.ones(4), Plan("hybrid", order=(0, 0))),
        "sparse": lambda: comm.all_reduce(torch.ones(4).to_sparse(), Plan("ring")),
        "int16": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int16), Plan("backend")),
        "symmetric": lambda: comm.all_reduce(torch.ones(4), Plan("two-shot")),
        "stream": lambda: comm.issue(torch.ones(4), Plan("ring")),
        "uneven": lambda: Communicator(worlds[4], ((0,), (1, 2, 3))).all_reduce(
            torch.ones(4), Plan("two-level", inside="backend")
        ),
        "layout": lambda: Communicator(worlds[4], ((0, 1), (2,))),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
            texts[name] = "no error"
        except ScheduleRefused as error:
            texts[name] = str(error)
    tensor = torch.ones(4)
    comm.all_reduce(tensor, Plan("ring"))
    texts["afterwards"] = str(tensor.tolist())
    return texts

"""Times plans on the ranks that will run them, as they will be called: the source of the planner's measured curves.

Calls go through the communicator's public entry. On a GPU several follow each other between two events, as in a
training step whose host is ahead of its device; on a CPU the wall clock counts. All calls of a size are timed in turn,
round by round, so that a machine that changes its pace changes it for all of them. The slowest rank's time counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleRefused
from costlab.kernels.schedule.plan import Plan

HOPELESS = 4.0  # times the fastest: larger sizes of such a plan are not measured, but for the library's
WARM_UP = 2  # rounds that do not count, and two calls or more each on a GPU: recordings are made in the third call
_ROW = 960 << 20  # bytes reduced by the calls of one sample; 3 ms at the bandwidth of NVLink
_MOST, _LEAST = 20, 2  # calls of one sample
_SIDE = 2048  # of the matrices multiplied beside an all-reduce: more blocks than any GPU runs at once

Call = Callable[[], object]


class Measured(NamedTuple):
    """What was measured.

    Attributes:
        curves: (bytes, seconds) by plan, ascending; one far slower than another ends early.
        beside: the same of a call and matrix products beside it, until both are done; empty if not asked for.
        noise: by size, the relative standard error of the medians that decide.
        refused: why plans cannot run here.
    """

    curves: dict[Plan, list[tuple[int, float]]]
    beside: dict[Plan, list[tuple[int, float]]]
    noise: dict[int, float]
    refused: dict[Plan, str]


def calls_in_a_row(nbytes: int, device: torch.device) -> int:
    """Calls of one sample for a message of so many bytes."""
    return max(_LEAST, min(_MOST, _ROW // max(1, nbytes))) if device.type == "cuda" else 1


def meet(group: ProcessGroup | None, device: torch.device) -> None:
    """All ranks, with their devices idle."""
    dist.barrier(group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_a_row(call: Call, times: int, device: torch.device) -> float:
    """Seconds of one of `times` calls in a row, on the current stream of a GPU or by the wall clock of a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def in_turn(
    calls: Sequence[Call], rounds: int, times: int, device: torch.device, group: ProcessGroup | None = None
) -> list[list[float]]:
    """Seconds of each call in every round, the slowest rank's; each round starts with the next call. Collective."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(WARM_UP + rounds):
        for place in range(len(calls)):
            which = (number + place) % len(calls)
            meet(group, device)
            taken[which].append(in_a_row(calls[which], times, device))
    slowest = torch.tensor([row[WARM_UP:] for row in taken], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    rows: list[list[float]] = slowest.tolist()
    return rows


def error_of_median(samples: Sequence[float]) -> float:
    """Standard error of the median as a share of it, from the median absolute deviation; as if normally spread."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median([abs(s - middle) for s in samples])
    return 1.2533 * spread / len(samples) ** 0.5 / middle if middle > 0 else 0.0


def deciding_noise(plans: Sequence[Plan], samples: Sequence[Sequence[float]]) -> float:
    """The larger error of the fastest plan's median and of the library's; `samples` by plan."""
    order = sorted(range(len(plans)), key=lambda i: statistics.median(samples[i]))
    deciding = {order[0], *(i for i in order if plans[i].schedule == "backend")}
    return max(error_of_median(samples[i]) for i in deciding)


def curves(
    communicator: Communicator,
    plans: Sequence[Plan],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    *,
    beside: bool = False,
) -> Measured:
    """Times `plans` at `sizes` (bytes, ascending). Collective; all ranks get the same times.

    Args:
        rounds: samples of each plan and size.
        beside: time them also as DDP's hook calls them: asynchronously, beside matrix products that alone take about
            as long as the library's all-reduce. On a GPU only.

    Raises:
        ScheduleError: a transfer failed.
    """
    found = Measured({}, {}, {}, {})
    alive = list(plans)
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // torch.empty(0, dtype=dtype).element_size(), dtype=dtype, device=device)
        alive = [plan for plan in alive if _runs(communicator, plan, tensor, found)]
        if not alive:
            break
        samples = _alone(communicator, alive, tensor, rounds)
        times = _keep(found.curves, alive, nbytes, samples)
        found.noise[nbytes] = deciding_noise(alive, samples)
        alive = _hopeful(alive, times)
        if beside and communicator.issues(device) and Plan("backend") in alive:
            _keep(found.beside, alive, nbytes, _beside(communicator, alive, tensor, rounds))
    return found


def _hopeful(plans: Sequence[Plan], times: Sequence[float]) -> list[Plan]:
    """Plans near the fastest, and the library's all-reduce, to which all are compared."""
    limit = HOPELESS * min(times)
    rows = zip(plans, times, strict=True)
    return [plan for plan, seconds in rows if seconds <= limit or plan.schedule == "backend"]


def _keep(
    curves: dict[Plan, list[tuple[int, float]]], plans: Sequence[Plan], nbytes: int, samples: Sequence[Sequence[float]]
) -> list[float]:
    """Add a point to each plan's curve; returns the times."""
    times = [statistics.median(row) for row in samples]
    for plan, seconds in zip(plans, times, strict=True):
        curves.setdefault(plan, []).append((nbytes, seconds))
    return times


def _runs(communicator: Communicator, plan: Plan, tensor: Tensor, found: Measured) -> bool:
    """Whether the plan is not refused, which depends on device, dtype and layout and so is alike on all ranks."""
    try:
        communicator.all_reduce(tensor, plan)
    except ScheduleRefused as error:
        found.refused[plan] = str(error)
        return False
    return True


def _alone(communicator: Communicator, plans: Sequence[Plan], tensor: Tensor, rounds: int) -> list[list[float]]:
    calls = [partial(communicator.all_reduce, tensor, plan) for plan in plans]
    times = calls_in_a_row(tensor.numel() * tensor.element_size(), tensor.device)
    return in_turn(calls, rounds, times, tensor.device, communicator.parent)


def _beside(communicator: Communicator, plans: Sequence[Plan], tensor: Tensor, rounds: int) -> list[list[float]]:
    times = calls_in_a_row(tensor.numel() * tensor.element_size(), tensor.device)
    work = _products(communicator, tensor, times)

    def both(plan: Plan) -> None:
        stream = communicator.issue(tensor, plan, "avg")
        work()
        torch.cuda.current_stream(tensor.device).wait_stream(stream)

    return in_turn([partial(both, plan) for plan in plans], rounds, times, tensor.device, communicator.parent)


def _products(communicator: Communicator, tensor: Tensor, times: int) -> Call:
    """Matrix products that together take about as long as the library's all-reduce of `tensor`."""
    left, right = (torch.randn(_SIDE, _SIDE, device=tensor.device).to(tensor.dtype) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, right, out=out)

    library = partial(communicator.all_reduce, tensor, Plan("backend"))
    rows = in_turn([library, product], 3, times, tensor.device, communicator.parent)
    count = max(1, round(statistics.median(rows[0]) / statistics.median(rows[1])))

    def work() -> None:
        for _ in range(count):
            product()

    return work

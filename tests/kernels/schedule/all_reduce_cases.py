"""What the ranks do in the all-reduce tests: run many cases, compare with exact sums, return how many they ran."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_pool import worlds
from torch import Tensor

from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.plan import Layout, Plan

_communicators: dict[tuple[Any, Layout], Communicator] = {}


def communicator(layout: Layout) -> Communicator:
    """One for each layout, kept for later cases."""
    group = worlds[sum(map(len, layout))]
    if (group, layout) not in _communicators:
        _communicators[group, layout] = Communicator(group, layout)
    return _communicators[group, layout]


def values(rank: int, numel: int, dtype: torch.dtype, exact: bool) -> Tensor:
    """Rank-dependent input; small integers sum without rounding in every dtype."""
    generator = torch.Generator().manual_seed(7919 * rank + numel)
    if exact or not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -8
        return torch.randint(low, 9, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def total(world: int, numel: int, dtype: torch.dtype, exact: bool) -> Tensor:
    return torch.stack([values(r, numel, dtype, exact).double() for r in range(world)]).sum(0)


def exact_cases(rank: int, layout: Layout, plans: list[Plan], sizes: list[int], dtypes: list[torch.dtype]) -> int:
    """Every plan, size and dtype with inputs whose sum is exact: the result must be the sum, bit for bit."""
    comm = communicator(layout)
    world, count = comm.world_size, 0
    for numel in sizes:
        for dtype in dtypes:
            expected = total(world, numel, dtype, True).to(dtype)
            for plan in plans:
                if plan.schedule == "backend" and dtype == torch.int16:
                    continue  # no backend reduces it
                tensor = values(rank, numel, dtype, True)
                comm.all_reduce(tensor, plan)
                assert torch.equal(tensor, expected), f"{plan} {layout} {numel} {dtype}"
                count += 1
    return count


def rounded_cases(rank: int, layout: Layout, plans: list[Plan], numel: int, dtype: torch.dtype, op: str) -> int:
    """Real values: within the bound of any summation order, and the same bits on all ranks.

    n-1 additions in any order and one scaling are off by at most n * u * sum|x| (Higham, Accuracy and Stability,
    section 4.2, to first order), u the unit roundoff.
    """
    comm = communicator(layout)
    world, unit = comm.world_size, torch.finfo(dtype).eps / 2
    inputs = torch.stack([values(r, numel, dtype, False).double() for r in range(world)])
    exact = inputs.sum(0) / (world if op == "avg" else 1)
    bound = 1.1 * (world + 1) * unit * inputs.abs().sum(0) / (world if op == "avg" else 1)
    tiny = torch.finfo(dtype).tiny * world
    for plan in plans:
        tensor = values(rank, numel, dtype, False)
        comm.all_reduce(tensor, plan, op)  # type: ignore[arg-type]
        assert ((tensor.double() - exact).abs() <= bound + tiny).all(), f"{plan} {layout} {dtype} {op}"
        assert same_bits(tensor, world), f"{plan} {layout} {dtype} {op}: ranks differ"
    return len(plans)


def same_bits(tensor: Tensor, world: int) -> bool:
    raw = tensor.contiguous().view(torch.uint8)
    low, high = raw.clone(), raw.clone()
    group = worlds[world]
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return torch.equal(low, high)


def shapes(rank: int, layout: Layout) -> int:
    """Strides, scalars and empty tensors; the result lands in the caller's own tensor, neighbours stay untouched."""
    comm, count = communicator(layout), 0
    for plan in (Plan("ring", chunks=2, channels=2), Plan("hybrid", chunks=3), Plan("backend")):
        base = torch.arange(24 * 10, dtype=torch.float32).reshape(24, 10) + rank
        views = [base.t(), base[3:11, ::2], base[:, 4], base[5, 5], base[:0], base]
        for view in views:
            work = base.clone()
            target = work.as_strided(view.size(), view.stride(), view.storage_offset())
            expected = work.clone()
            place = expected.as_strided(view.size(), view.stride(), view.storage_offset())
            place.mul_(comm.world_size).add_(sum(range(comm.world_size)) - rank * comm.world_size)
            comm.all_reduce(target, plan)
            assert torch.equal(work, expected), f"{plan} {tuple(view.shape)} {view.stride()}"
            count += 1
    return count


def overlapped(rank: int, layout: Layout) -> list[Any]:
    """Several asynchronous calls, then a blocking one: all right, whatever order they are waited for in."""
    comm = communicator(layout)
    plans = [Plan("ring"), Plan("hybrid", chunks=4), Plan("two-level", chunks=2), Plan("chain", chunks=3)]
    tensors = [values(rank, 5000 + i, torch.float32, True) for i in range(len(plans))]
    handles = [comm.all_reduce(t, p, async_op=True) for t, p in zip(tensors, plans, strict=True)]
    last = values(rank, 77, torch.float32, True)
    comm.all_reduce(last, Plan("two-level"))
    for handle in reversed(handles):
        assert handle is not None
        handle.wait()
        assert handle.is_completed()
    right = [torch.equal(t, total(comm.world_size, t.numel(), t.dtype, True).float()) for t in [*tensors, last]]
    empty = comm.all_reduce(torch.empty(0), Plan("ring"), async_op=True)
    assert empty is not None
    empty.wait()
    return right


def scratch(rank: int, layout: Layout, numel: int) -> dict[str, int]:
    """Bytes of scratch that each plan holds after a call."""
    held = {}
    for plan in (Plan("ring"), Plan("ring", chunks=8), Plan("chain", chunks=8), Plan("hybrid", chunks=8)):
        comm = Communicator(worlds[sum(map(len, layout))], layout)
        comm.all_reduce(torch.zeros(numel), plan)
        held[f"{plan.schedule} {plan.chunks}"] = comm.scratch.nbytes()
        comm.close()
    return held


def tagged(rank: int, layout: Layout) -> list[str]:
    """Names of the profiler's annotations around each schedule, but for the number of the call."""
    comm = communicator(layout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for plan in (Plan("backend"), Plan("ring"), Plan("hybrid", chunks=2)):
            comm.all_reduce(torch.zeros(64), plan)
    names = {event.key.partition(" call=")[0] for event in profile.key_averages()}
    return sorted(name for name in names if name.startswith("costlab::comm::"))


def on_one_gpu(rank: int) -> int:
    """Every own schedule on CUDA tensors of several dtypes and strides, blocking and not."""
    comm, count = communicator(((0,), (1,))), 0
    own = [Plan("ring", chunks=2, channels=2), Plan("chain", chunks=3), Plan("two-level"), Plan("hybrid", chunks=4)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        expected = total(2, 5000, dtype, True).to(dtype)
        for plan in own:
            tensor = values(rank, 5000, dtype, True).cuda()
            handle = comm.all_reduce(tensor, plan, async_op=dtype == torch.bfloat16)
            if handle is not None:
                handle.wait()
            assert torch.equal(tensor.cpu(), expected), f"{plan} {dtype}"
            count += 1
    for plan in own:
        for view in ("transposed", "strided"):
            base = torch.ones(8, 6, device="cuda") * (rank + 1)
            target = base.t() if view == "transposed" else base[::2, 1]
            comm.all_reduce(target, plan)
            assert (target == 3).all()
            assert view == "transposed" or (base[1::2] == rank + 1).all()
            count += 1
    return count

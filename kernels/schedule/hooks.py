"""Puts a planned all-reduce into training: DDP's communication hook and FSDP2's swap points.

FSDP2 has no custom all-reduce. Its supported way is a one-dimensional `fully_shard` over the ranks of a segment plus an
all-reduce hook on every module, which gets the flat reduce-scatter output and reduces it over the replicas, in place.
Parameters must then start equal on all replicas, which a two-dimensional mesh would have ensured: `broadcast_module`.


This module's annotations are evaluated: DDP compares them with its own types when a hook is registered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future

from costlab.kernels.schedule import compat
from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.program import Slice, ring_gather, ring_scatter

PlanFor = Callable[[int], Plan]  # bytes of a message -> plan


def ddp_hook(communicator: Communicator, plan_for: PlanFor) -> Callable[[object, GradBucket], Future[Tensor]]:
    """A DDP communication hook, for `model.register_comm_hook(None, ddp_hook(...))`.

    Averages each gradient bucket over the communicator's ranks, asynchronously and in bucket order. A failed transfer
    fails the bucket's future, so backward raises.

    Args:
        communicator: over the same ranks as the DDP model's process group.
        plan_for: the plan for a bucket of so many bytes; must answer alike on all ranks.
    """

    def planned_all_reduce(_state: object, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        plan = plan_for(flat.numel() * flat.element_size())
        if communicator.issues(flat.device):
            return _promised(flat, communicator.issue(flat, plan, "avg"))
        handle = communicator.all_reduce(flat, plan, "avg", async_op=True)
        if handle is None:
            raise ScheduleError("an asynchronous all-reduce returned no handle")
        if flat.is_cuda:  # staged through the host
            handle.wait()
            return _promised(flat, torch.cuda.current_stream(flat.device))
        future: Future[Tensor] = Future()
        handle.then(lambda error: _settle(future, flat, error))
        return future

    return planned_all_reduce


def _promised(flat: Tensor, stream: torch.cuda.Stream) -> Future[Tensor]:
    """A future whose readers' streams wait for what `stream` holds now."""
    future: Future[Tensor] = Future(devices=[flat.device])
    with torch.cuda.stream(stream):
        future.set_result(flat)
    return future


def _settle(future: Future[Tensor], flat: Tensor, error: BaseException | None) -> None:
    if error is None:
        future.set_result(flat)
    else:
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it with the value's type


def fsdp_all_reduce(
    model: nn.Module, communicator: Communicator, plan_for: PlanFor, stream: torch.cuda.Stream | None = None
) -> int:
    """Average FSDP2 gradients over replicas with a planned all-reduce; returns the number of modules hooked.

    Args:
        model: `fully_shard` was applied with a one-dimensional mesh over the ranks of one replica.
        communicator: over the ranks that hold the same shard, one of each replica.
        plan_for: the plan for a gradient shard of so many bytes.
        stream: where the hook runs; the current CUDA stream if None.

    Raises:
        ScheduleRefused: the mesh already has a replicate dimension (gradients would be reduced twice), or this torch
            has no such hook.
    """
    modules = compat.fsdp_modules(model)

    def reduce_over_replicas(flat: Tensor) -> None:
        plan = plan_for(flat.numel() * flat.element_size())
        communicator.all_reduce(flat, plan, "avg")

    for module in modules:
        _check(module)
        module.set_all_reduce_hook(reduce_over_replicas, stream=stream or _current_stream(module))
    return len(modules)


def _check(module: Any) -> None:
    if not compat.supports_all_reduce_hook(module):
        raise ScheduleRefused(f"torch {torch.__version__} has no all-reduce hook on FSDP2 modules")
    if compat.is_hybrid_sharded(module):
        raise ScheduleRefused(
            "the mesh has a replicate dimension, so FSDP2 reduces over it itself; shard over 1-D mesh"
        )


def _current_stream(module: nn.Module) -> torch.cuda.Stream | None:
    parameter = next(module.parameters(), None)
    return torch.cuda.current_stream(parameter.device) if parameter is not None and parameter.is_cuda else None


def broadcast_module(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Make parameters and buffers equal to those of the group's first rank. Call before `fully_shard`."""
    source = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=source, group=group)


def fsdp_collectives(model: nn.Module, communicator: Communicator) -> int:
    """Replace FSDP2's reduce-scatter and all-gather by rings of our own; returns the number of modules changed.

    FSDP2 is told to use plain sums (`set_force_sum_reduction_for_comms`), because a pre-multiplied sum's factor cannot
    be read back from the operator.
    """
    gather, scatter = _comm_classes()
    modules = compat.fsdp_modules(model)
    for module in modules:
        _check(module)
        module.set_custom_reduce_scatter(scatter(communicator))
        module.set_custom_all_gather(gather(communicator))
        module.set_force_sum_reduction_for_comms(True)
    return len(modules)


def _comm_classes() -> tuple[Any, Any]:
    """Subclasses of FSDP2's abstract collectives, built where torch has them."""
    gather_base, scatter_base = compat.fsdp_comm_bases()

    class RingAllGather(gather_base):  # type: ignore[misc, valid-type]
        """All-gather by a ring of point-to-point transfers."""

        def __init__(self, communicator: Communicator) -> None:
            self.communicator = communicator

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: ProcessGroup,
            async_op: bool = False,  # noqa: ARG002 - runs on the current stream, so there is no work to return
        ) -> None:
            comm, flat = self.communicator, output_tensor.view(-1)
            _same_ranks(comm, group)
            slices = _equal(flat.numel(), comm.world_size)
            mine = flat[slice(*slices[comm.rank])]
            if mine.data_ptr() != input_tensor.data_ptr():
                mine.copy_(input_tensor.view(-1))
            comm.run({"gather": ring_gather(range(comm.world_size), comm.rank, slices)}, flat, "all-gather")

    class RingReduceScatter(scatter_base):  # type: ignore[misc, valid-type]
        """Reduce-scatter by a ring of point-to-point transfers; overwrites its input, as FSDP2 allows."""

        def __init__(self, communicator: Communicator) -> None:
            self.communicator = communicator

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: ProcessGroup,
            op: Any,
            async_op: bool = False,  # noqa: ARG002 - runs on the current stream, so there is no work to return
        ) -> None:
            comm, flat = self.communicator, input_tensor.view(-1)
            _same_ranks(comm, group)
            name = compat.reduce_op_name(op)
            if name not in ("SUM", "AVG"):
                raise ScheduleRefused(f"reduce-scatter by {name}; call set_force_sum_reduction_for_comms(True)")
            slices = _equal(flat.numel(), comm.world_size)
            comm.run({"scatter": ring_scatter(range(comm.world_size), comm.rank, slices)}, flat, "reduce-scatter")
            output_tensor.view(-1).copy_(flat[slice(*slices[comm.rank])])
            if name == "AVG":
                output_tensor.div_(comm.world_size)

    return RingAllGather, RingReduceScatter


def _equal(numel: int, parts: int) -> list[Slice]:
    width = numel // parts
    return [(i * width, (i + 1) * width) for i in range(parts)]


def _same_ranks(communicator: Communicator, group: ProcessGroup) -> None:
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks != communicator.peers:
        raise ScheduleRefused(f"FSDP2 shards over ranks {ranks}, the communicator has {communicator.peers}")

"""The torch names that moved, were renamed or are private, in one place. Tried on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler as _profiler
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused

_NEVER_SENT = 7099  # a tag that nobody sends on
_CLOSE_ATTEMPTS = 5


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The backend that serves `device` in this group, in lower case ("nccl", "gloo").

    A group may serve the CPU by one backend and the GPU by another, so the group's own name does not tell.
    """
    try:
        return _name(group._get_backend(device))
    except RuntimeError as error:
        raise ScheduleError(f"the process group has no backend for {device.type} tensors") from error


def _name(backend: Any) -> str:
    call = getattr(backend, "name", None) or backend._get_backend_name
    return str(call()).lower()


def serves_cpu_by_gloo(group: ProcessGroup) -> bool:
    """Whether host tensors of this group go through gloo."""
    try:
        return backend_name(group, torch.device("cpu")) == "gloo"
    except ScheduleError:
        return False


def reduce_scatter_flat(output: Tensor, source: Tensor, group: ProcessGroup) -> Any:
    """Sum-reduce-scatter of a flat tensor, asynchronous; named reduce_scatter_single from torch 2.13 on."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output, source, group=group, async_op=True)


def all_gather_flat(output: Tensor, source: Tensor, group: ProcessGroup) -> Any:
    """All-gather into a flat tensor, asynchronous; named all_gather_single from torch 2.13 on."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, source, group=group, async_op=True)


def averages(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend averages by itself, dividing each contribution as it reads it (NCCL does, gloo does not)."""
    return backend_name(group, device) == "nccl"


def all_reduce_call(group: ProcessGroup, op: str = "sum") -> Callable[[Tensor], None]:
    """The group's own reduction on the current stream, without the argument checks of `dist.all_reduce`."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM)
    if hasattr(options, "asyncOp"):  # a call that its stream waits for needs no stream of its own
        options.asyncOp = False

    def call(flat: Tensor) -> None:
        work = group.allreduce([flat], options)
        if work is not None:
            work.wait()

    return call


def profiling() -> bool:
    """Whether a profiler records, so that annotations are worth their time; True where torch does not tell."""
    return bool(getattr(_profiler, "_is_profiler_enabled", True))


def one_queue() -> bool:
    """Whether the GPU gets this process's work through one hardware queue, as some trainings ask to order kernels."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that goes before compute where both wait for the GPU, as FSDP2's copies do.

    A schedule is a row of short kernels: at equal priority each of them would wait for a whole kernel of backward.
    """
    return torch.cuda.Stream(device, priority=-1)


def storage_reference(tensor: Tensor) -> Any:
    """A weak reference to the memory a tensor lies in; `expired()` tells whether it has been freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def new_groups(
    parent: ProcessGroup, members: list[list[int]], timeout: timedelta | None, device: torch.device, name: str
) -> ProcessGroup | None:
    """Groups with communicators of their own for disjoint lists of global ranks; returns the caller's, if any.

    Collective over `parent`, whose ranks `members` are. Below the default group torch derives a group's name from how
    many groups a process has made, so that number must agree over the parent.

    Raises:
        ScheduleRefused: it does not agree; torch would wait for ever.
    """
    own = dist.get_rank()
    options: dict[str, Any] = {"timeout": timeout, "backend": backend_name(parent, device), "group_desc": name}
    if parent is dist.group.WORLD:
        made = [dist.new_group(ranks, **options) for ranks in members]
        return next((g for g, ranks in zip(made, members, strict=True) if own in ranks), None)
    counts: list[int | None] = [None] * parent.size()
    dist.all_gather_object(counts, len(c10d._world.pg_names), group=parent)
    if len(set(counts)) > 1:
        raise ScheduleRefused(
            f"the ranks have made different numbers of process groups ({counts}); "
            "use the default group, or make the communicator before groups that only some ranks belong to"
        )
    mine = next((ranks for ranks in members if own in ranks), None)
    return dist.new_group(mine, use_local_synchronization=True, **options) if mine else None


def abort_group(group: ProcessGroup) -> None:
    """End the group's pending transfers, here and on the peers.

    NCCL aborts its communicator. gloo's own abort does nothing; but a receive that times out closes the connection to
    its peer, whose transfers then fail at once, so that is what is done with each of them. (gloo forgets a send whose
    connection breaks while it is being written; that one ends with its own time-out.)
    """
    for device in (torch.device("cuda"), torch.device("cpu")):
        try:
            backend: Any = group._get_backend(device)
        except RuntimeError:  # a group need not serve both devices
            continue
        if _name(backend) == "gloo":
            _close_connections(group)
        elif hasattr(backend, "abort"):
            backend.abort()


def _close_connections(group: ProcessGroup) -> None:
    own = dist.get_rank()
    for peer in dist.get_process_group_ranks(group):
        if peer != own:
            # a time-out skips a connection that another thread holds just then; once closed, the error is another one
            any(_is_closed(group, peer) for _ in range(_CLOSE_ATTEMPTS))


def _is_closed(group: ProcessGroup, peer: int) -> bool:
    """Let a receive from the peer time out, which closes the connection; True once it was closed before."""
    try:
        work = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
        if work is not None:
            work.wait(timedelta(milliseconds=2))
    except RuntimeError as error:
        return "timed out" not in str(error).lower()
    return False


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to, root first."""
    from torch.distributed.fsdp import FSDPModule

    found = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not found:
        raise ScheduleError("fully_shard was not applied to this model")
    return found


def fsdp_comm_bases() -> tuple[type, type]:
    """The abstract AllGather and ReduceScatter of FSDP2; still private in torch 2.14."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return AllGather, ReduceScatter


def supports_all_reduce_hook(module: Any) -> bool:
    """Whether this FSDP2 has the swap points that costlab uses (torch 2.9 and newer)."""
    return all(
        hasattr(module, n) for n in ("set_all_reduce_hook", "set_custom_reduce_scatter", "set_custom_all_gather")
    )


def is_hybrid_sharded(module: Any) -> bool:
    """Whether FSDP2 reduces this module's gradients over a replicate dimension by itself.

    Raises:
        ScheduleRefused: this torch keeps its parameter groups elsewhere, so the question cannot be answered.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # a single group up to torch 2.12
        if not hasattr(state, "_fsdp_param_group"):
            raise ScheduleRefused(f"torch {torch.__version__} does not show the mesh of an FSDP2 module")
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return any(getattr(g.mesh_info, "replicate_mesh_size", 1) > 1 for g in groups)


def reduce_op_name(op: Any) -> str:
    """SUM, AVG, PREMUL_SUM ... of a ReduceOp or its enum, which compare but do not print alike across versions."""
    for name in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX"):
        kind = getattr(dist.ReduceOp, name, None)
        if kind is not None and op == kind:
            return name
    return str(op)

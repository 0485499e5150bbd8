"""What the ranks do in the training tests: DDP and FSDP2 with stock and planned collectives on the same data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_pool import worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from costlab.kernels.schedule import hooks
from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused
from costlab.kernels.schedule.plan import Layout, Plan

Gradients = list[Tensor]
_made: dict[Any, Communicator] = {}
_meshes: dict[Any, Any] = {}


def build(rank: int = 0) -> nn.Module:
    """A small model; a non-zero rank gives other parameters."""
    torch.manual_seed(11 + rank)
    return nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 17))


def gradients(model: nn.Module, rank: int) -> Gradients:
    generator = torch.Generator().manual_seed(100 + rank)
    x, y = torch.randn(8, 33, generator=generator), torch.randn(8, 17, generator=generator)
    (model(x) - y).square().mean().backward()
    return [getattr(p.grad, "to_local", lambda g=p.grad: g)().clone() for p in model.parameters()]


def differ(ours: Gradients, stock: Gradients, world: int) -> float:
    """Largest difference in units of the reduction-order bound 2 (n+1) u max|g|; below 1 is within it."""
    unit = torch.finfo(torch.float32).eps / 2
    return max(
        ((a - b).abs().max() / (2 * (world + 1) * unit * b.abs().max().clamp_min(1e-6))).item()
        for a, b in zip(ours, stock, strict=True)
        if b.numel()
    )


def same_on_all(gradients: Gradients, group: Any) -> bool:
    raw = torch.cat([g.reshape(-1) for g in gradients]).view(torch.int32)
    low, high = raw.clone(), raw.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return torch.equal(low, high)


def communicator(group: Any, layout: Layout | None = None) -> Communicator:
    if (group, layout) not in _made:
        _made[group, layout] = Communicator(group, layout)
    return _made[group, layout]


def ddp(rank: int, world: int, layout: Layout, plan: Plan) -> tuple[float, bool, int]:
    """Difference to stock DDP, equality over ranks, buckets reduced."""
    from torch.nn.parallel import DistributedDataParallel

    group = worlds[world]
    stock = gradients(DistributedDataParallel(build(), process_group=group, bucket_cap_mb=0.01), rank)
    model = DistributedDataParallel(build(), process_group=group, bucket_cap_mb=0.01)
    sizes: list[int] = []

    def plan_for(nbytes: int) -> Plan:
        sizes.append(nbytes)
        return plan

    model.register_comm_hook(None, hooks.ddp_hook(communicator(group, layout), plan_for))
    ours = gradients(model, rank)
    return differ(ours, stock, world), same_on_all(ours, group), len(sizes)


def ddp_failure(rank: int, world: int) -> str:
    """The error that backward raises when the hook's all-reduce cannot run."""
    from torch.nn.parallel import DistributedDataParallel

    group = worlds[world]
    model = DistributedDataParallel(build(), process_group=group)
    lost = Communicator(group)
    model.register_comm_hook(None, hooks.ddp_hook(lost, lambda _: Plan("ring")))
    lost._broken = ScheduleError("a transfer failed before")
    try:
        gradients(model, rank)
    except RuntimeError as error:
        return str(error)
    return ""


def mesh_of_eight() -> Any:
    """Two replicas of four shards; made once, by all ranks."""
    if "mesh" not in _meshes:
        _meshes["mesh"] = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return _meshes["mesh"]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp(rank: int, plan: Plan, own_collectives: bool) -> tuple[float, bool, int]:
    """FSDP2 on a 1-D mesh with our hook against native HSDP: difference, equality over replicas, modules hooked."""
    mesh = mesh_of_eight()
    stock = gradients(shard(build(), mesh), rank)
    replicas = mesh["replicate"].get_group()
    model = build(rank)
    hooks.broadcast_module(model)
    shard(model, mesh["shard"])
    comm = communicator(replicas, ((0,), (1,)))
    hooked = hooks.fsdp_all_reduce(model, comm, lambda _: plan)
    if own_collectives:
        hooks.fsdp_collectives(model, communicator(mesh["shard"].get_group()))
    ours = gradients(model, rank)
    return differ(ours, stock, 8), same_on_all(ours, replicas), hooked


def fsdp_refusals(rank: int) -> list[str]:
    """What is refused: a mesh that already reduces over replicas, a model without FSDP2, other ranks' communicator."""
    mesh = mesh_of_eight()
    comm = communicator(mesh["replicate"].get_group(), ((0,), (1,)))
    texts = []
    for model in (shard(build(), mesh), build()):
        try:
            hooks.fsdp_all_reduce(model, comm, lambda _: Plan("chain"))
        except ScheduleError as error:
            texts.append(str(error))
    model = shard(build(), mesh["shard"])
    hooks.fsdp_collectives(model, comm)
    try:
        gradients(model, rank)
    except ScheduleRefused as error:
        texts.append(str(error))
    return texts

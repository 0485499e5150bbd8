"""Fused kernels under FSDP2, DDP and per-block compilation, in a process group of one."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from costlab.kernels.fused import registry
from costlab.kernels.fused.launch import INTERPRETED
from costlab.probes.workloads import llama
from costlab.probes.workloads.base import WorkloadContext

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def losses(device: torch.device, fused: bool, way: str) -> list[float]:
    """Losses of four steps of a tiny llama in bf16 mixed precision, each block compiled, sharded or in DDP."""
    context = WorkloadContext(
        device=device, dtype=torch.bfloat16, size="tiny", batch=2, seq=32, seed=0, rank=0, world_size=1
    )
    made = llama.make(context)
    model: nn.Module = made.model
    loss, backend = made.loss, "inductor" if device.type == "cuda" else "aot_eager"
    if fused:
        assert registry.apply(model)
        loss = registry.fused_loss(model, made.loss, made.batch(0)) or pytest.fail("the loss was refused")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(device.type, (1,))
    for name in made.blocks:
        block = model.get_submodule(name)
        block.compile(fullgraph=True, backend=backend)
        if way == "fsdp":
            fully_shard(block, mp_policy=policy, mesh=mesh)
    if way == "fsdp":
        fully_shard(model, mp_policy=policy, mesh=mesh)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index or 0] if device.type == "cuda" else None)
    if fused and way == "fsdp":
        findings: list[str] = []
        assert registry.apply(model, findings=findings) == [] and "already sharded" in findings[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for step in range(4):
        with torch.autocast(device.type, torch.bfloat16, enabled=way == "ddp"):
            value = loss(model, made.batch(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
    return seen


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_losses_stay_the_same(device: torch.device, group: None, way: str) -> None:
    plain = losses(device, False, way)
    assert losses(device, True, way) == pytest.approx(plain, rel=5e-3)
    assert plain[0] != pytest.approx(plain[-1], rel=5e-3)


class Held(nn.Module):
    """A wrapper of nobody's library that calls what it holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the model gives."""
        out: torch.Tensor = self.module(x)
        return out


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda m: m,
    "copy": copy.deepcopy,
    "held": Held,
    "held twice": lambda m: Held(Held(m)),
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "held and compiled": lambda m: torch.compile(Held(m), backend="eager"),
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_the_loss_finds_its_linear_in_any_wrapper(device: torch.device, wrapper: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)).to(device)
    batch = (torch.randint(0, 32, (4, 8), device=device), torch.randint(0, 32, (4, 8), device=device))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    expected = loss(model, batch).item()
    fused = registry.fused_loss(model, loss, batch)
    assert fused is not None
    value = fused(WRAPPERS[wrapper](model), batch)
    assert value.dim() == 0
    assert value.item() == pytest.approx(expected, rel=1e-3)


def test_a_model_without_that_linear_is_told(device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)).to(device)
    batch = (torch.zeros(2, 4, dtype=torch.long, device=device), torch.zeros(2, 4, dtype=torch.long, device=device))
    fused = registry.fused_loss(
        model, lambda m, b: nn.functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), batch
    )
    assert fused is not None
    with pytest.raises(AttributeError, match="1"):
        fused(Held(nn.Linear(4, 4)), batch)

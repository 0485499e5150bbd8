"""Fused kernels under FSDP2 and per-block compilation, in a process group of one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def losses(device: torch.device, fused: bool) -> list[float]:
    """Losses of four steps of a tiny llama in bf16 mixed precision, each block compiled and sharded."""
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
        fully_shard(block, mp_policy=policy, mesh=mesh)
    fully_shard(model, mp_policy=policy, mesh=mesh)
    if fused:
        findings: list[str] = []
        assert registry.apply(model, findings=findings) == [] and "already sharded" in findings[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for step in range(4):
        value = loss(model, made.batch(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
    return seen


def test_losses_stay_the_same(device: torch.device, group: None) -> None:
    plain = losses(device, False)
    assert losses(device, True) == pytest.approx(plain, rel=5e-3)
    assert plain[0] != pytest.approx(plain[-1], rel=5e-3)

"""The ops under FakeTensor, AOT tracing and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from costlab.kernels.fused import (
    batch_norm_relu,
    ffn_layer_norm,
    gated,
    layer_norm,
    linear_cross_entropy,
    registry,
    rms_norm,
    rope,
)
from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.op import FusedOp
from costlab.probes.workloads import llama, resnet
from costlab.probes.workloads.base import WorkloadContext

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")
Draw = Callable[..., Tensor]


def arguments(draw: Draw, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Each op and arguments for it."""
    x, w, b = draw(6, 16), draw(16), draw(16)
    heads = [draw(2, h, 5, 8) for h in (4, 2)]
    table = [draw(5, 4).detach(), draw(5, 4).detach()]
    image, branch = (
        draw(2, 16, 3, 3).detach().contiguous(memory_format=torch.channels_last).requires_grad_() for _ in range(2)
    )
    targets = torch.randint(0, 40, (6,), device=x.device)
    cases: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rms_norm": (rms_norm._rms_norm, (x, w, 1e-5)),
        "add_rms_norm": (rms_norm._add_rms_norm, (x, draw(6, 16), w, 1e-5)),
        "layer_norm": (layer_norm._layer_norm, (x, w, b, 1e-5)),
        "add_layer_norm": (layer_norm._add_layer_norm, (x, draw(6, 16), w, b, 1e-5)),
        "gated": (gated._gated, (x, draw(6, 16), 1)),
        "gated_linear": (gated._gated_linear, (x, draw(6, 16), draw(12, 16), 0)),
        "rope": (rope._rope, (*heads, *table, 1.0)),
        "norm_rope": (rope._norm_rope, (*heads, draw(8), draw(8), *table, 1e-5)),
        "batch_norm_relu": (batch_norm_relu._batch_norm_relu, (image, w, b, None, 1e-5)),
        "batch_norm_add_relu": (batch_norm_relu._batch_norm_relu, (image, w, b, branch, 1e-5)),
        "ffn_layer_norm": (
            ffn_layer_norm._ffn_layer_norm,
            (x, draw(24, 16), draw(24), draw(16, 24), b, w, draw(16), 1e-5, 2),
        ),
        "linear_cross_entropy": (
            linear_cross_entropy._linear_cross_entropy,
            (x, draw(40, 16), targets, -100, 1e-3, True, True, True, 128),
        ),
    }
    return cases[name]


NAMES = [
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "gated", "gated_linear", "rope", "norm_rope",
    "batch_norm_relu", "batch_norm_add_relu", "ffn_layer_norm", "linear_cross_entropy",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_op_is_well_registered(draw: Draw, name: str) -> None:
    op, args = arguments(draw, name)
    op = op.op if isinstance(op, FusedOp) else op
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_a_whole_model_is_one_graph(device: torch.device) -> None:
    context = WorkloadContext(
        device=device, dtype=torch.float32, size="tiny", batch=2, seq=16, seed=0, rank=0, world_size=1
    )
    workload = llama.make(context)
    batch = workload.batch(0)
    expected = torch.autograd.grad(workload.loss(workload.model, batch), list(workload.model.parameters()))
    registry.apply(workload.model)
    assert registry.fused_loss(workload.model, workload.loss, batch) is not None
    compiled = torch.compile(workload.model, backend="aot_eager", fullgraph=True)
    gradients = torch.autograd.grad(workload.loss(compiled, batch), list(workload.model.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


def test_a_residual_block_is_one_graph(device: torch.device) -> None:
    context = WorkloadContext(
        device=device, dtype=torch.float32, size="tiny", batch=2, seq=0, seed=0, rank=0, world_size=1
    )
    block = resnet.make(context).model.stages[0].to(device, memory_format=torch.channels_last)
    image = torch.randn(2, 8, 9, 9, device=device).contiguous(memory_format=torch.channels_last)
    expected = torch.autograd.grad(block(image).square().sum(), list(block.parameters()))
    assert any("batch_norm_relu" in done for done in registry.apply(block))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    gradients = torch.autograd.grad(compiled(image).square().sum(), list(block.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-6


def test_loss_op_compiles(draw: Draw, device: torch.device) -> None:
    x, w = draw(6, 16), draw(40, 16)
    targets = torch.randint(0, 40, (6,), device=device)
    plain = torch.autograd.grad(linear_cross_entropy.linear_cross_entropy(x, w, targets) * 3, (x, w))
    compiled = torch.compile(linear_cross_entropy.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w, targets) * 3, (x, w)), plain)

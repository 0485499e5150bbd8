"""The Triton kernels on a GPU: real sizes, odd sizes, Inductor, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from costlab.kernels.fused import registry
from costlab.kernels.fused.batch_norm_relu import batch_norm_relu, batch_norm_relu_reference
from costlab.kernels.fused.ffn_layer_norm import ffn_layer_norm, ffn_layer_norm_reference
from costlab.kernels.fused.gated import gated, gated_linear, gated_reference
from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.layer_norm import add_layer_norm, add_layer_norm_reference
from costlab.kernels.fused.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from costlab.kernels.fused.rms_norm import add_rms_norm, add_rms_norm_reference
from costlab.kernels.fused.rope import rope, rotate_reference
from costlab.probes.workloads import llama
from costlab.probes.workloads.base import Workload, WorkloadContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU"),
]
Draw = Callable[..., Tensor]
Agree = Callable[..., None]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (4096, 4096, BF16),
        (1001, 5000, BF16),
        (333, 16384, BF16),
        (333, 16384, FP32),
        (777, 1023, FP16),
        (5000, 96, FP32),
    ],
)
def test_norms(draw: Draw, agree: Agree, rows: int, cols: int, dtype: torch.dtype) -> None:
    limit = {BF16: 5e-3, FP16: 1e-3, FP32: 2e-6}[dtype]
    x, r, w, b = (
        draw(rows, cols, dtype=dtype),
        draw(rows, cols, dtype=dtype),
        draw(cols, dtype=dtype),
        draw(cols, dtype=dtype),
    )
    agree(lambda *a: add_rms_norm(*a, 1e-5), lambda *a: add_rms_norm_reference(*a, 1e-5), [x, r, w], tolerance=limit)
    agree(
        lambda *a: add_layer_norm(*a, 1e-5),
        lambda *a: add_layer_norm_reference(*a, 1e-5),
        [x, r, w, b],
        tolerance=limit,
    )


@pytest.mark.parametrize(("shape", "dtype"), [((8, 512, 5632), BF16), ((3, 333, 1001), FP32)])
def test_gates(draw: Draw, agree: Agree, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    limit = {BF16: 5e-3, FP32: 2e-6}[dtype]
    inputs = [draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)]
    for act in ("silu", "gelu", "gelu_tanh"):
        agree(
            lambda a, b, act=act: gated(a, b, act),
            lambda a, b, act=act: gated_reference(a, b, act),
            inputs,
            tolerance=limit,
        )
    inputs.append(draw(64, shape[-1], dtype=dtype, scale=0.05))
    agree(gated_linear, lambda a, b, w: gated_reference(a, b) @ w.t(), inputs, tolerance=2 * limit)


@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (80, FP16), (64, FP32)])
def test_rope(draw: Draw, agree: Agree, dim: int, dtype: torch.dtype) -> None:
    q, k = draw(2, 500, 8, dim, dtype=dtype), draw(2, 500, 2, dim, dtype=dtype)
    agree(
        lambda q, k, c, s: rope(q.transpose(1, 2), k.transpose(1, 2), c, s),
        lambda q, k, c, s: (rotate_reference(q.transpose(1, 2), c, s), rotate_reference(k.transpose(1, 2), c, s)),
        [q, k],
        (draw(500, dim // 2).detach(), draw(500, dim // 2).detach()),
        {BF16: 5e-3, FP16: 1e-3, FP32: 2e-6}[dtype],
    )


@pytest.mark.parametrize(
    ("shape", "dtype"), [((32, 64, 56, 56), BF16), ((7, 2048, 7, 7), BF16), ((16, 100, 9, 9), FP32)]
)
def test_batch_norm_relu(draw: Draw, agree: Agree, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype, shift=1.0).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    agree(
        lambda *a: batch_norm_relu(*a, 1e-5)[0],
        lambda *a: batch_norm_relu_reference(*a, 1e-5)[0],
        [x, draw(shape[1], shift=1.0), draw(shape[1])],
        tolerance={BF16: 5e-3, FP32: 1e-5}[dtype],
    )
    shortcut = draw(*shape, dtype=dtype).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    agree(
        lambda x, w, b, s: batch_norm_relu(x, w, b, 1e-5, s)[0],
        lambda x, w, b, s: batch_norm_relu_reference(x, w, b, 1e-5, s)[0],
        [x, draw(shape[1], shift=1.0), draw(shape[1]), shortcut],
        tolerance={BF16: 5e-3, FP32: 1e-5}[dtype],
    )


@pytest.mark.parametrize(("tokens", "vocab", "dtype"), [(3000, 50257, BF16), (1500, 32000, FP16), (300, 1003, FP32)])
def test_linear_cross_entropy(draw: Draw, agree: Agree, tokens: int, vocab: int, dtype: torch.dtype) -> None:
    targets = torch.randint(0, vocab, (tokens,), device="cuda").masked_fill(
        torch.rand(tokens, device="cuda") < 0.2, -100
    )
    agree(
        lambda x, w, t: linear_cross_entropy(x, w, t, z_weight=1e-4),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t, z_weight=1e-4),
        [draw(tokens, 512, dtype=dtype), draw(vocab, 512, dtype=dtype, scale=0.05)],
        (targets,),
        {BF16: 1e-2, FP16: 3e-3, FP32: 1e-5}[dtype],
    )


def test_ffn_layer_norm(draw: Draw, agree: Agree) -> None:
    shapes = [(2, 1000, 768), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    tensors = [draw(*s, dtype=BF16, scale=1.0 if i == 0 else 0.05) for i, s in enumerate(shapes)]
    agree(
        lambda *a: ffn_layer_norm(*a, 1e-5, "tanh"), lambda *a: ffn_layer_norm_reference(*a, 1e-5, "tanh"), tensors,
        tolerance=2e-2,
    )  # fmt: skip


def test_graph_capture_of_the_loss(draw: Draw) -> None:
    """Nothing in it waits for the device."""
    x, w = draw(512, 256, dtype=BF16), draw(4000, 256, dtype=BF16)
    targets = torch.randint(0, 4000, (512,), device="cuda")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(x, w, targets, rows=128), (x, w))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [g.clone() for g in step()]
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(list(captured), expected, rtol=2e-2, atol=1e-5)


def workload() -> Workload:
    context = WorkloadContext(
        device=torch.device("cuda"), dtype=BF16, size="tiny", batch=4, seq=128, seed=0, rank=0, world_size=1
    )
    return llama.make(context)


def close(ours: list[Tensor], theirs: list[Tensor], limit: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= limit * b.float().norm() + 1e-6


@pytest.mark.parametrize("cast", ["fp32", "bf16", "autocast"])
def test_compiled_llama(cast: str) -> None:
    """Inductor around the fused ops gives the unfused model's gradients, in one graph and for two batch sizes."""
    made = workload()
    model = made.model.to(BF16) if cast == "bf16" else made.model
    tokens, targets = made.batch(0)
    twin = workload().model.to(next(model.parameters()).dtype)
    assert registry.apply(model)
    loss = registry.fused_loss(model, made.loss, (tokens, targets))
    assert loss is not None
    compiled = torch.compile(model, fullgraph=False)
    for batch in ((tokens, targets), (tokens[:3], targets[:3])):
        with torch.autocast("cuda", BF16, enabled=cast == "autocast"):
            ours, theirs = loss(model, batch), made.loss(twin, batch)
            inside = made.loss(compiled, batch)
        expected = list(torch.autograd.grad(theirs, list(twin.parameters())))
        limit = 1e-3 if cast == "fp32" else 5e-2
        close(list(torch.autograd.grad(ours, list(model.parameters()))), expected, limit)
        close(list(torch.autograd.grad(inside, list(model.parameters()))), expected, limit)

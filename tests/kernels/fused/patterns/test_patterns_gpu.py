"""The rewrites on a GPU: Triton kernels through Inductor's hook, equal gradients, known and symbolic shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from costlab import kernels
from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.plan import Plan, Rewrite
from tests.kernels.fused.patterns import user_models as models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU"),
]
BF16 = torch.bfloat16
EVERYWHERE = Plan(
    rewrites=tuple(
        Rewrite(kernel=kernel, how="pattern", where=where)
        for kernel in ("add_rms_norm", "gated", "rope", "linear_cross_entropy", "rms_norm")
        for where in ("", "blocks.*")
    )
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def close(ours: list[Tensor], theirs: list[Tensor], limit: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= limit * b.float().norm() + 1e-6


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (BF16, 5e-2)])
@pytest.mark.parametrize("by", ["model", "block"])
def test_inductor_runs_the_kernels_and_gradients_stay(dtype: torch.dtype, limit: float, by: str) -> None:
    model = models.Functional(width=256, heads=4, vocab=1000).to("cuda", dtype)
    tokens = torch.randint(0, 1000, (8, 16), device="cuda")
    expected = gradients(model, tokens)
    applied = kernels.apply(model, EVERYWHERE)
    assert not applied.findings
    try:
        for module in model.blocks if by == "block" else [model]:
            module.compile()
        close(gradients(model, tokens), expected, limit)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            gradients(model, tokens)
    finally:
        applied.undo()
    done = {s.kernel for s in applied.record.sites if s.path == "specialised"}
    wanted = {"add_rms_norm", "gated", "rope"} | ({"linear_cross_entropy"} if by == "model" else set())
    assert done == wanted, applied.record.sites
    assert not applied.record.findings
    names = " ".join(event.key for event in seen.key_averages())
    assert "_gated_forward_kernel" in names and "_gated_backward_kernel" in names, names


def test_symbolic_rows_take_the_kernel_too() -> None:
    model = models.Functional(width=256, heads=4, vocab=1000).to("cuda", BF16)
    applied = kernels.apply(model, EVERYWHERE)
    try:
        run = torch.compile(model, dynamic=True)
        for batch in (4, 7):
            tokens = torch.randint(0, 1000, (batch, 16), device="cuda")
            torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-2, atol=2e-2)
    finally:
        applied.undo()
    assert "dynamic" in {s.path for s in applied.record.sites}, applied.record.sites


def test_a_rewrite_that_cannot_be_compiled_leaves_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from costlab.kernels.fused.patterns import gates

    def fails(*_args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gates, "gated", fails)
    model = models.Functional(width=256, heads=4, vocab=1000).to("cuda")
    tokens = torch.randint(0, 1000, (8, 16), device="cuda")
    expected = gradients(model, tokens)
    applied = kernels.apply(model, EVERYWHERE)
    try:
        model.compile()
        close(gradients(model, tokens), expected, 1e-3)
    finally:
        applied.undo()
    assert any("no such kernel" in f for f in applied.record.findings)
    assert "gated" not in {s.kernel for s in applied.record.sites if s.path != "eager"}

"""The rules on models that nobody tuned for: right rewrites, equal gradients, look-alikes left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.patterns.capture import rewriting
from costlab.kernels.fused.patterns.engine import Record
from costlab.kernels.fused.patterns.guards import Limits
from tests.kernels.fused.patterns import user_models as models

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def rewritten(model: nn.Module, inputs: tuple[Tensor, ...], limit: float = 1e-5) -> Record:
    """Run the model rewritten and as it is; outputs and gradients of everything must agree."""
    record = Record()
    compiled = torch.compile(model, backend=rewriting(lambda _m, _s: Limits(reference=True), record), fullgraph=True)
    wanted = [p for p in (*model.parameters(), *inputs) if p.requires_grad]
    results = []
    for run in (model, compiled):
        torch.manual_seed(3)
        out = run(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        loss = sum((o.float() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outs)
        results.append((outs, torch.autograd.grad(loss, wanted, allow_unused=True)))
    (values, gradients), (own_values, own_gradients) = results
    for a, b in zip((*own_values, *own_gradients), (*values, *gradients), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a.double() - b.double()).norm() <= limit * b.double().norm() + 1e-7
    return record


def done(record: Record) -> Counter[str]:
    return Counter(s.kernel for s in record.sites if s.path != "eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functional_transformer(dtype: torch.dtype) -> None:
    model = models.Functional().to(dtype)
    limit = 1e-5 if dtype is torch.float32 else 5e-2
    record = rewritten(model, (torch.randint(0, 50, (2, 16)),), limit)
    assert done(record) == {"linear_cross_entropy": 1, "add_rms_norm": 5, "gated": 2, "rope": 2}, record.sites
    assert not record.findings
    assert {s.owner for s in record.sites if s.kernel == "gated"} == {"blocks.0", "blocks.1"}
    assert all(s.source.startswith("user_models.py:") for s in record.sites)


def test_post_norm_model_with_dropout_before_the_sum() -> None:
    record = rewritten(models.PostNorm(), (torch.randn(3, 5, 24, requires_grad=True),))
    assert done(record) == {"add_layer_norm": 2, "add_rms_norm": 1, "gated": 2}, record.sites


def test_every_spelling_of_rms_norm() -> None:
    inputs = (torch.randn(2, 3, 20, requires_grad=True), torch.randn(2, 3, 20, requires_grad=True))
    record = rewritten(models.Spellings(), inputs)
    assert sum(done(record).values()) == 7, record.sites
    assert not record.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_of_q_and_k_with_casts(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, heads, 6, 8, dtype=dtype, requires_grad=True) for heads in (4, 2))
    tables = torch.randn(6, 4), torch.randn(6, 4)
    record = rewritten(models.Rotations(), (q, k, *tables), 1e-5 if dtype is torch.float32 else 3e-2)
    # With bf16 operands the whole-head form promotes to fp32, which the kernel does not.
    assert done(record) == {"rope": 2 if dtype is torch.float32 else 1}, record.sites
    assert any(s.reason == "no second rotation by the same tables" for s in record.sites)
    assert not record.findings


def test_look_alikes_are_left_alone() -> None:
    inputs = (torch.randn(2, 16, 16, requires_grad=True), torch.randn(2, 16, 16, requires_grad=True))
    record = rewritten(models.NearMisses().train(), inputs)
    # What is right all the same: silu(x) * sigmoid(r) is a gate, and the norms behind dropout and behind alpha have a
    # sum that no kernel makes; the norm alone is one.
    assert done(record) == {"gated": 1, "rms_norm": 2}, [s for s in record.sites if s.path != "eager"]
    reasons = " | ".join(s.reason for s in record.sites if s.path == "eager")
    for part in ("last dimension", "no epsilon", "in place", "rounds to torch.float16", "used elsewhere"):
        assert part in reasons, reasons
    assert not record.findings


def test_a_rule_that_fails_is_a_finding_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from costlab.kernels.fused.patterns import engine

    def broken(graph: Any) -> Iterator[Any]:
        yield from engine.norms.norms(graph)
        raise IndexError("no such node")

    def unfit(self: Any, target: Any, *args: Any) -> Any:
        raise RuntimeError("cannot be put in")

    monkeypatch.setitem(engine.RULES, "norms", broken)
    record = rewritten(models.PostNorm(), (torch.randn(3, 5, 24, requires_grad=True),))
    assert any("IndexError: no such node" in f for f in record.findings)
    assert done(record)["add_layer_norm"] == 2
    torch._dynamo.reset()
    monkeypatch.setattr(engine.Emitter, "function", unfit)
    record = rewritten(models.PostNorm(), (torch.randn(3, 5, 24, requires_grad=True),))
    assert not done(record) and any("cannot be put in" in f for f in record.findings)


def test_a_kernel_of_another_shape_is_found_out_before_it_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from costlab.kernels.fused.patterns import gates

    monkeypatch.setattr(gates, "gated", lambda gate, up, _act: (gate * up)[..., :1])
    record = rewritten(models.PostNorm(), (torch.randn(3, 5, 24, requires_grad=True),))
    assert "gated" not in done(record) and any("NotEqual" in f for f in record.findings)

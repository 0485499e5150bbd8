"""Gated activations and the projection behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from costlab.kernels.fused.gated import ACTIVATIONS, activation, gated, gated_linear, gated_reference

Draw = Callable[..., Tensor]
Agree = Callable[..., None]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 35), (1, 1), (5, 256)])
def test_gated(draw: Draw, agree: Agree, act: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [draw(*shape, dtype=dtype, scale=2.0), draw(*shape, dtype=dtype)]
    agree(lambda a, b: gated(a, b, act), lambda a, b: gated_reference(a, b, act), inputs)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linear(draw: Draw, agree: Agree, act: str, dtype: torch.dtype) -> None:
    inputs = [draw(2, 5, 48, dtype=dtype), draw(2, 5, 48, dtype=dtype), draw(20, 48, dtype=dtype, scale=0.2)]
    agree(lambda a, b, w: gated_linear(a, b, w, act), lambda a, b, w: gated_reference(a, b, act) @ w.t(), inputs)


def test_halves_of_one_projection(draw: Draw, agree: Agree) -> None:
    agree(lambda x: gated(*x.chunk(2, -1)), lambda x: gated_reference(*x.chunk(2, -1)), [draw(3, 4, 70)])


def test_strided_columns(draw: Draw, agree: Agree) -> None:
    agree(lambda a, b: gated(a.t(), b.t()), lambda a, b: gated_reference(a.t(), b.t()), [draw(9, 6), draw(9, 6)])


def test_saves_its_inputs_only(draw: Draw) -> None:
    kept: list[Tensor] = []
    gate, up, weight = draw(8, 32), draw(8, 32), draw(16, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear(gate, up, weight)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate, up, weight)}


def test_large_values_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[-200.0, -90.0, 90.0, 200.0, -1e30, 1e30]], device=device, requires_grad=True)
    for act in ACTIVATIONS:
        y = gated(x, torch.ones_like(x), act)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y, activation(act, x.double()).float(), rtol=1e-5, atol=1e-6)
        if act != "gelu_tanh":
            assert torch.isfinite(gradient[0, :4]).all()


def test_empty(draw: Draw) -> None:
    gate, up, weight = draw(0, 8), draw(0, 8), draw(4, 8)
    gated_linear(gate, up, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_autocast(draw: Draw) -> None:
    gate, up, weight = draw(4, 16), draw(4, 16), draw(8, 16)
    with torch.autocast(gate.device.type, torch.bfloat16):
        out = gated_linear(gate, up, weight)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), (F.silu(gate) * up) @ weight.t(), rtol=0.05, atol=0.05)


def test_refusals(draw: Draw) -> None:
    with pytest.raises(ValueError, match="no activation"):
        gated(draw(2, 4), draw(2, 4), "relu")
    with pytest.raises(ValueError, match="differ"):
        gated(draw(2, 4), draw(1, 4))

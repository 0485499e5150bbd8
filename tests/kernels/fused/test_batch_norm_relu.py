"""Training-mode batch norm and ReLU in one op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from costlab.kernels.fused.batch_norm_relu import batch_norm_relu, batch_norm_relu_reference

EPS = 1e-5
Draw = Callable[..., Tensor]
Agree = Callable[..., None]
Shape = tuple[int, int, int, int]


def last(x: Tensor) -> Tensor:
    return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 20, 7, 5), (2, 1, 3, 3), (1, 64, 4, 4), (4, 130, 2, 2)])
def test_channels_last(draw: Draw, agree: Agree, shape: Shape, dtype: torch.dtype) -> None:
    x = last(draw(*shape, dtype=dtype, scale=2.0, shift=1.0))
    inputs = [x, draw(shape[1], shift=1.0), draw(shape[1])]
    assert batch_norm_relu(*inputs, EPS)[0].is_contiguous(memory_format=torch.channels_last)
    agree(
        lambda *a: batch_norm_relu(*a, EPS)[0],
        lambda *a: batch_norm_relu_reference(*a, EPS)[0],
        inputs,
        tolerance=1e-5 if dtype == torch.float32 else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 20, 7, 5), (2, 1, 3, 3), (4, 130, 2, 2)])
def test_with_a_shortcut(draw: Draw, agree: Agree, shape: Shape, dtype: torch.dtype) -> None:
    x, shortcut = (last(draw(*shape, dtype=dtype, scale=2.0, shift=1.0)) for _ in range(2))
    inputs = [x, draw(shape[1], shift=1.0), draw(shape[1]), shortcut]
    agree(
        lambda x, w, b, s: batch_norm_relu(x, w, b, EPS, s)[0],
        lambda x, w, b, s: batch_norm_relu_reference(x, w, b, EPS, s)[0],
        inputs,
        tolerance=1e-5 if dtype == torch.float32 else None,
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_shortcut_is_torchs(draw: Draw, layout: torch.memory_format) -> None:
    x, shortcut = (
        draw(4, 12, 6, 6, shift=s).detach().contiguous(memory_format=layout).requires_grad_() for s in (3.0, 0.0)
    )
    weight, bias = draw(12), draw(12)
    expected = F.relu(F.batch_norm(x, None, None, weight, bias, True, 1.0, EPS) + shortcut)
    y = batch_norm_relu(x, weight, bias, EPS, shortcut)[0]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    inputs = (x, weight, bias, shortcut)
    ours, theirs = (torch.autograd.grad(o.square().sum(), inputs) for o in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_shortcut_of_another_dtype_has_its_own_gradient(draw: Draw) -> None:
    x, shortcut = last(draw(2, 8, 3, 3)), last(draw(2, 8, 3, 3, dtype=torch.bfloat16))
    y = batch_norm_relu(x, draw(8), draw(8), EPS, shortcut)[0]
    gradient = torch.autograd.grad(y.sum(), shortcut)[0]
    assert y.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), (y > 0).float())
    with pytest.raises(ValueError, match="shortcut is"):
        batch_norm_relu(x, draw(8), draw(8), EPS, draw(8))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_is_torchs(draw: Draw, layout: torch.memory_format) -> None:
    x = draw(4, 12, 6, 6, shift=3.0).detach().contiguous(memory_format=layout).requires_grad_()
    weight, bias = draw(12), draw(12)
    mean, var = torch.zeros(12, device=x.device), torch.zeros(12, device=x.device)
    expected = F.relu(F.batch_norm(x, mean, var, weight, bias, True, 1.0, EPS))
    y, batch_mean, batch_var = batch_norm_relu(x, weight, bias, EPS)
    torch.testing.assert_close((y, batch_mean, batch_var), (expected, mean, var), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(o.square().sum(), (x, weight, bias)) for o in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_large_mean_does_not_cancel(draw: Draw) -> None:
    x = last(draw(8, 6, 5, 5, shift=3000.0))
    ones, zeros = torch.ones(6, device=x.device), torch.zeros(6, device=x.device)
    _, mean, var = batch_norm_relu(x, ones, zeros, EPS)
    over = (0, 2, 3)
    torch.testing.assert_close(mean.double(), x.double().mean(over), rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), x.double().var(over), rtol=1e-3, atol=0)


def test_gradient_layout_does_not_matter(draw: Draw) -> None:
    x, weight, bias = last(draw(2, 8, 3, 3)), draw(8), draw(8)
    y = batch_norm_relu(x, weight, bias, EPS)[0]
    seed = draw(2, 8, 3, 3).detach()
    a = torch.autograd.grad(y, x, seed, retain_graph=True)[0]
    b = torch.autograd.grad(y, x, seed.contiguous(memory_format=torch.channels_last))[0]
    torch.testing.assert_close(a, b)


def test_nan_is_not_hidden(draw: Draw) -> None:
    x = draw(2, 3, 4, 4).detach().contiguous(memory_format=torch.channels_last)
    x[0, 1, 0, 0] = float("nan")
    y = batch_norm_relu(x, torch.ones(3, device=x.device), torch.zeros(3, device=x.device), EPS)[0]
    assert y[:, 1].isnan().all() and not y[:, [0, 2]].isnan().any()

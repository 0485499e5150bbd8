"""RMSNorm and LayerNorm, alone and after a residual addition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from costlab.kernels.fused.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from costlab.kernels.fused.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-5
SHAPES = [(2, 3, 37), (1, 1), (9, 128), (70, 5), (1, 300)]
HALVES = [torch.float32, torch.bfloat16, torch.float16]
Draw = Callable[..., Tensor]
Agree = Callable[..., None]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_add_rms_norm(draw: Draw, agree: Agree, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [draw(*shape, dtype=dtype), draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, shift=1.0)]
    agree(lambda *a: add_rms_norm(*a, EPS), lambda *a: add_rms_norm_reference(*a, EPS), inputs)


# The gradient of one column is eps / x^2, all cancellation.
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] > 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm(draw: Draw, agree: Agree, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, shift=1.0)]
    agree(lambda *a: rms_norm(*a, EPS), lambda *a: rms_norm_reference(*a, EPS), inputs)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] > 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_add_layer_norm(draw: Draw, agree: Agree, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [draw(*shape, dtype=dtype, shift=2.0), draw(*shape, dtype=dtype)]
    inputs += [draw(shape[-1], dtype=dtype, shift=1.0), draw(shape[-1], dtype=dtype)]
    agree(lambda *a: add_layer_norm(*a, EPS), lambda *a: add_layer_norm_reference(*a, EPS), inputs)


@pytest.mark.parametrize("dtype", HALVES)
def test_layer_norm(draw: Draw, agree: Agree, dtype: torch.dtype) -> None:
    inputs = [draw(6, 50, dtype=dtype), draw(50, dtype=dtype, shift=1.0), draw(50, dtype=dtype)]
    agree(lambda *a: layer_norm(*a, EPS), lambda *a: layer_norm_reference(*a, EPS), inputs)


def test_references_are_torchs(draw: Draw) -> None:
    x, w, b = draw(4, 40), draw(40), draw(40)
    torch.testing.assert_close(layer_norm_reference(x, w, b, EPS), F.layer_norm(x, (40,), w, b, EPS))
    torch.testing.assert_close(rms_norm_reference(x, w, EPS), F.rms_norm(x, (40,), w, EPS))


def test_strided_input(draw: Draw, agree: Agree) -> None:
    x, r, w = draw(8, 6, 33), draw(8, 33, 6), draw(33)
    agree(
        lambda x, r, w: add_rms_norm(x[::2], r.transpose(1, 2)[::2], w, EPS),
        lambda x, r, w: add_rms_norm_reference(x[::2], r.transpose(1, 2)[::2], w, EPS),
        [x, r, w],
    )


def test_mixed_dtypes(draw: Draw, agree: Agree) -> None:
    """A fp32 residual stream with a bf16 branch, as autocast makes it."""
    inputs = [draw(5, 64), draw(5, 64, dtype=torch.bfloat16), draw(64)]
    y, h = add_rms_norm(*inputs, EPS)
    assert y.dtype == h.dtype == torch.float32
    agree(lambda *a: add_rms_norm(*a, EPS), lambda *a: add_rms_norm_reference(*a, EPS), inputs, tolerance=1e-2)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(draw: Draw, agree: Agree, used: int) -> None:
    inputs = [draw(7, 48), draw(7, 48), draw(48), draw(48)]
    agree(lambda *a: add_layer_norm(*a, EPS)[used], _allow_unused(used), inputs)


def _allow_unused(used: int) -> Callable[..., Tensor]:
    def reference(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = add_layer_norm_reference(x, r, w, b, EPS)
        return out[used] + 0.0 * (w.sum() + b.sum())

    return reference


def test_empty_batch(draw: Draw) -> None:
    x, r, w, b = draw(0, 3, 16), draw(0, 3, 16), draw(16), draw(16)
    for outputs in (add_rms_norm(x, r, w, EPS), add_layer_norm(x, r, w, b, EPS)):
        assert all(o.shape == x.shape for o in outputs)
        sum(o.sum() for o in outputs).backward()
    assert torch.equal(w.grad, torch.zeros_like(w)) and x.grad.shape == x.shape


def test_nan_stays_nan(draw: Draw) -> None:
    x = draw(3, 20).detach()
    x[1, 4] = float("nan")
    y, h = add_rms_norm(x, torch.zeros_like(x), torch.ones(20, device=x.device), EPS)
    assert y[1].isnan().all() and h[1].isnan().sum() == 1 and not y[[0, 2]].isnan().any()


def test_shapes_must_match(draw: Draw) -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        add_rms_norm(draw(3, 8), draw(1, 8), draw(8), EPS)


def test_repeatable(draw: Draw) -> None:
    inputs = [draw(200, 24), draw(200, 24), draw(24)]
    runs = [torch.autograd.grad(add_rms_norm(*inputs, EPS)[0].sum(), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

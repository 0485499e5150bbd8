"""Feed-forward block with residual and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from costlab.kernels.fused.ffn_layer_norm import ffn_layer_norm, ffn_layer_norm_reference

Draw = Callable[..., Tensor]
Agree = Callable[..., None]
SHAPES = ((3, 7, 20), (50, 20), (50,), (20, 50), (20,), (20,), (20,))


def parameters(draw: Draw, dtype: torch.dtype, batch: int = 3) -> list[Tensor]:
    return [draw(batch, *SHAPES[0][1:], dtype=dtype), *(draw(*s, dtype=dtype, scale=0.4) for s in SHAPES[1:])]


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_eager_block(draw: Draw, agree: Agree, dtype: torch.dtype, form: str) -> None:
    agree(
        lambda *a: ffn_layer_norm(*a, 1e-5, form),
        lambda *a: ffn_layer_norm_reference(*a, 1e-5, form),
        parameters(draw, dtype),
        tolerance={torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype],
    )


def test_reference_is_torchs(draw: Draw) -> None:
    x, w1, b1, w2, b2, w, b = parameters(draw, torch.float32)
    expected = F.layer_norm(x + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2), (20,), w, b, 1e-5)
    torch.testing.assert_close(ffn_layer_norm_reference(x, w1, b1, w2, b2, w, b, 1e-5, "none"), expected)


def test_empty(draw: Draw) -> None:
    tensors = parameters(draw, torch.float32, batch=0)
    ffn_layer_norm(*tensors, 1e-5).sum().backward()
    assert all(not t.grad.any() for t in tensors)


def test_autocast(draw: Draw) -> None:
    tensors = parameters(draw, torch.float32)
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        y = ffn_layer_norm(*tensors, 1e-5)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and all(t.grad.dtype == torch.float32 for t in tensors)


def test_refusals(draw: Draw) -> None:
    tensors = parameters(draw, torch.float32)
    with pytest.raises(ValueError, match="no GELU form"):
        ffn_layer_norm(*tensors, 1e-5, "sigmoid")
    with pytest.raises(ValueError, match="dtypes differ"):
        ffn_layer_norm(tensors[0].half(), *tensors[1:], 1e-5)

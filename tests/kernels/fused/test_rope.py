"""Rotary embedding of q and k in one launch, with and without QK-norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from costlab.kernels.fused.rope import norm_rotate_reference, rope, rotate_reference

Draw = Callable[..., Tensor]
Agree = Callable[..., None]


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)


def table(seq: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inverse = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), inverse).to(device)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv", "seq", "dim"), [(4, 2, 7, 12), (1, 1, 1, 2), (3, 3, 5, 64)])
def test_rope(draw: Draw, agree: Agree, heads: int, kv: int, seq: int, dim: int, dtype: torch.dtype) -> None:
    q, k = draw(2, heads, seq, dim, dtype=dtype), draw(2, kv, seq, dim, dtype=dtype)
    agree(rope, plain, [q, k], table(seq + 3, dim, q.device))


def test_transposed_projection_is_not_copied(draw: Draw, agree: Agree) -> None:
    q, k = draw(2, 6, 4, 16), draw(2, 6, 2, 16)
    cos, sin = table(6, 16, q.device)
    agree(
        lambda q, k, cos, sin: rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        lambda q, k, cos, sin: plain(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        [q, k],
        (cos, sin),
    )
    out, _ = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_norm(draw: Draw, agree: Agree, dtype: torch.dtype) -> None:
    q, k = draw(2, 4, 6, 24, dtype=dtype, scale=3.0), draw(2, 2, 6, 24, dtype=dtype)
    weights = [draw(24, dtype=dtype, shift=1.0), draw(24, dtype=dtype, shift=1.0)]
    agree(
        lambda q, k, a, b, cos, sin: rope(q, k, cos, sin, (a, b), 1e-5),
        lambda q, k, a, b, cos, sin: (
            norm_rotate_reference(q, a, cos, sin, 1e-5),
            norm_rotate_reference(k, b, cos, sin, 1e-5),
        ),
        [q, k, *weights],
        table(6, 24, q.device),
    )


def test_norms_are_kept(draw: Draw) -> None:
    q, k = draw(1, 2, 9, 32), draw(1, 1, 9, 32)
    rotated, _ = rope(q, k, *table(9, 32, q.device))
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


def test_only_one_used(draw: Draw) -> None:
    q, k = draw(1, 2, 5, 8), draw(1, 1, 5, 8)
    rope(q, k, *table(5, 8, q.device))[0].sum().backward()
    assert q.grad is not None and (k.grad is None or not k.grad.any())


def test_empty(draw: Draw) -> None:
    q, k = draw(0, 2, 5, 8), draw(0, 1, 5, 8)
    out = rope(q, k, *table(5, 8, q.device))
    (out[0].sum() + out[1].sum()).backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    ("q", "k"), [((1, 2, 5, 8), (1, 2, 4, 8)), ((1, 2, 5, 7), (1, 2, 5, 7)), ((2, 5, 8), (2, 5, 8))]
)
def test_refuses_what_does_not_fit(draw: Draw, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    x = draw(*q)
    with pytest.raises(ValueError, match="not"):
        rope(x, draw(*k), *table(5, 8, x.device))

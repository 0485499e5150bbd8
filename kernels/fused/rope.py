"""Rotary embedding of queries and keys in one launch, with optional RMS normalisation of both (QK-norm) in front.

    [optional]  x = x * rsqrt(mean(x^2) + eps) * weight     over head_dim
    out = (x1 cos - x2 sin, x2 cos + x1 sin)     x1, x2 the halves of head_dim; cos, sin of the position

(Su et al. 2021, arXiv 2104.09864, halves convention; QK-norm after Dehghani et al. 2023, arXiv 2302.05442, with
RMSNorm.)

Shapes: q [batch, heads, seq, head_dim], k [batch, kv_heads, seq, head_dim], cos and sin [>= seq, head_dim / 2], weights
[head_dim], head_dim even and <= 1024. Dtypes: fp32, bf16, fp16; q and k share one, cos and sin one, the weights one.
Numerics: fp32, one rounding per output. Any strides with dense head_dim are read as they are (a transposed projection
is not copied) and results keep the layout [batch, seq, heads, head_dim] in memory. Backward rotates by the negative
angle; with QK-norm it recomputes the statistics and reduces the weight gradients in two fixed-order stages. cos and sin
get no gradient. CPU tensors (outside Triton's interpreter) and other dtypes take the eager reference.

Traffic: forward and backward each read and write q and k once; the backward of QK-norm reads q and k again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from costlab.kernels.fused.column_sum import column_sum
from costlab.kernels.fused.launch import Tile, cdiv, jit, power_of_2, programs, tl, usable, wrap_triton

MAX_HEAD_DIM = 1024
TILES = {"rotate": Tile(elements=2048, warps=4), "norm_backward": Tile(elements=4096, warps=8, per_sm=2)}


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Eager rotation of x [batch, heads, seq, head_dim] in fp32 (fp64 for fp64 inputs), returned in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    a, b = wide.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def norm_rotate_reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Eager RMS normalisation over head_dim, then the rotation, rounded once at the end."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return rotate_reference(normed, cos, sin).to(x.dtype)


@jit
def _halves(base, offset, half, HALF: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    col = tl.arange(0, HALF)[None, :]
    first = tl.load(base + offset + col, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + offset + half + col, mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def _rotate_rows(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, tile, batch, heads, seq, half, eps, sb, sh, st, sign,
    R: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tile * R + tl.arange(0, R)
    col = tl.arange(0, HALF)[None, :]
    head = (row % heads).to(tl.int64)
    position = (row // heads) % seq
    item = (row // heads // seq).to(tl.int64)
    mask = (row < batch * heads * seq)[:, None] & (col < half)
    a, b = _halves(x_ptr, (item * sb + head * sh + position * st)[:, None], half, HALF, mask)
    if NORM:
        rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
        a *= rstd * tl.load(weight_ptr + col, mask=col < half, other=0.0).to(tl.float32)
        b *= rstd * tl.load(weight_ptr + half + col, mask=col < half, other=0.0).to(tl.float32)
    angle = position[:, None] * half + col
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32) * sign
    out = out_ptr + row.to(tl.int64)[:, None] * (2 * half) + col
    tl.store(out, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    batch, q_heads, k_heads, seq, half, eps, qb, qh, qt, kb, kh, kt, sign,
    R: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    q_tiles = tl.cdiv(batch * q_heads * seq, R)
    tile = tl.program_id(0)
    if tile < q_tiles:
        _rotate_rows(
            q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, tile, batch, q_heads, seq, half, eps, qb, qh, qt, sign,
            R, HALF, NORM,
        )  # fmt: skip
    else:
        _rotate_rows(
            k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, tile - q_tiles, batch, k_heads, seq, half, eps,
            kb, kh, kt, sign, R, HALF, NORM,
        )  # fmt: skip


@jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, partial_ptr,
    batch, heads, seq, half, eps, yb, yh, yt, xb, xh, xt,
    R: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, HALF)[None, :]
    inside = col < half
    w1 = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight_ptr + half + col, mask=inside, other=0.0).to(tl.float32)
    dw1 = tl.zeros([R, HALF], tl.float32)
    dw2 = tl.zeros([R, HALF], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(batch * heads * seq, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        head = (row % heads).to(tl.int64)
        position = (row // heads) % seq
        item = (row // heads // seq).to(tl.int64)
        mask = (row < batch * heads * seq)[:, None] & inside
        y1, y2 = _halves(dy_ptr, (item * yb + head * yh + position * yt)[:, None], half, HALF, mask)
        a, b = _halves(x_ptr, (item * xb + head * xh + position * xt)[:, None], half, HALF, mask)
        angle = position[:, None] * half + col
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        g1 = y1 * cos + y2 * sin
        g2 = y2 * cos - y1 * sin
        rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
        a *= rstd
        b *= rstd
        dw1 += g1 * a
        dw2 += g2 * b
        g1 *= w1
        g2 *= w2
        along = ((tl.sum(g1 * a, axis=1) + tl.sum(g2 * b, axis=1)) / (2 * half))[:, None]
        out = dx_ptr + row.to(tl.int64)[:, None] * (2 * half) + col
        tl.store(out, ((g1 - a * along) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(out + half, ((g2 - b * along) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
    partial = partial_ptr + tl.program_id(0) * 2 * half + tl.arange(0, HALF)
    tl.store(partial, tl.sum(dw1, axis=0), mask=tl.arange(0, HALF) < half)
    tl.store(partial + half, tl.sum(dw2, axis=0), mask=tl.arange(0, HALF) < half)


def _empty(x: Tensor) -> Tensor:
    """Like x [batch, heads, seq, head_dim], dense in memory as [batch, seq, heads, head_dim]."""
    b, h, t, d = x.shape
    return torch.empty((b, t, h, d), dtype=x.dtype, device=x.device).transpose(1, 2)


def _fits(q: Tensor, *others: Tensor) -> bool:
    return usable(q, *others) and q.numel() > 0 and others[0].numel() > 0 and q.shape[3] <= MAX_HEAD_DIM


def _rows(q: Tensor, tile: Tile) -> tuple[int, int]:
    half = power_of_2(q.shape[3] // 2)
    return tile.rows(2 * half), half


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, sign: float
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _empty(q), _empty(k)
    batch, q_heads, seq, dim = q.shape
    r, half = _rows(q, TILES["rotate"])
    grid = (cdiv(batch * q_heads * seq, r) + cdiv(batch * k.shape[1] * seq, r),)
    wrap_triton(_rotate_kernel)[grid](
        q, k, q_out, k_out, cos if weights is None else weights[0], cos if weights is None else weights[1], cos, sin,
        batch, q_heads, k.shape[1], seq, dim // 2, eps, *q.stride()[:3], *k.stride()[:3], sign,
        R=r, HALF=half, NORM=weights is not None, num_warps=TILES["rotate"].warps,
    )  # fmt: skip
    return q_out, k_out


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dx = _empty(x)
    batch, heads, seq, dim = x.shape
    tile = TILES["norm_backward"]
    r, half = _rows(x, tile)
    count = programs(x.device, tile.per_sm, cdiv(batch * heads * seq, r))
    partial = torch.empty((count, dim), dtype=torch.float32, device=x.device)
    wrap_triton(_norm_backward_kernel)[(count,)](
        dy, x, dx, weight, cos, sin, partial, batch, heads, seq, dim // 2, eps, *dy.stride()[:3], *x.stride()[:3],
        R=r, HALF=half, num_warps=tile.warps,
    )  # fmt: skip
    return dx, column_sum(partial, weight.dtype)


def _norm_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    g = rotate_reference(dy.to(wide), cos, -sin)
    rstd = torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + eps)
    xhat = x.to(wide) * rstd
    dweight = (g * xhat).sum((0, 1, 2))
    g = g * weight
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd
    return _like(dx.to(x.dtype)), dweight.to(weight.dtype)


def _like(x: Tensor) -> Tensor:
    """x in the layout of `_empty`, as traced code is promised it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@triton_op("costlab::rope", mutates_args=())
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    if not _fits(q, k, cos, sin):
        return _like(rotate_reference(q, cos, sign * sin)), _like(rotate_reference(k, cos, sign * sin))
    return _rotate(q, k, cos, sin, None, 0.0, sign)


@triton_op("costlab::norm_rope", mutates_args=())
def _norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(q, k, q_weight, k_weight, cos, sin):
        return (
            _like(norm_rotate_reference(q, q_weight, cos, sin, eps)),
            _like(norm_rotate_reference(k, k_weight, cos, sin, eps)),
        )
    return _rotate(q, k, cos, sin, (q_weight, k_weight), eps, 1.0)


@triton_op("costlab::norm_rope_backward", mutates_args=())
def _norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _fits(q, k, dq, dk, q_weight, k_weight, cos, sin):
        q_gradient, q_weight_gradient = _norm_backward_reference(dq, q, q_weight, cos, sin, eps)
        k_gradient, k_weight_gradient = _norm_backward_reference(dk, k, k_weight, cos, sin, eps)
    else:
        q_gradient, q_weight_gradient = _norm_backward(dq, q, q_weight, cos, sin, eps)
        k_gradient, k_weight_gradient = _norm_backward(dk, k, k_weight, cos, sin, eps)
    return q_gradient, k_gradient, q_weight_gradient, k_weight_gradient


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    *_, cos, sin, ctx.sign = inputs
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk = _rope(_dense(dq), _dense(dk), *ctx.saved_tensors, -ctx.sign)
    return dq, dk, None, None, None


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *_norm_rope_backward(_dense(dq), _dense(dk), *ctx.saved_tensors, ctx.eps), None, None, None


_rope.register_autograd(_rope_backward, setup_context=_save)
_norm_rope.register_autograd(_norm_gradient, setup_context=_norm_save)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Rotated q and k, first RMS-normalised with `weights` (of q and of k) if given; see the module for shapes.

    Raises ValueError for shapes that do not belong together. q, k and the weights are differentiable.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[3] % 2:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} are not [batch, heads, seq, even head_dim] of one kind"
        )
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] < q.shape[2] or cos.shape[1] * 2 != q.shape[3]:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit q {tuple(q.shape)}")
    q, k, cos, sin = _dense(q), _dense(k), cos.contiguous(), sin.contiguous()
    pair: tuple[Tensor, Tensor]
    if weights is None:
        pair = _rope(q, k, cos, sin, 1.0)
    else:
        pair = _norm_rope(q, k, weights[0].contiguous(), weights[1].contiguous(), cos, sin, eps)
    return pair

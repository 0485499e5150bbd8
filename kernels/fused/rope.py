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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused.column_sum import column_sum
from costlab.kernels.fused.launch import Tile, cdiv, jit, power_of_2, programs, tl, usable, wrap_triton
from costlab.kernels.fused.op import fused_op

MAX_HEAD_DIM = 1024
TILES = {
    "rotate": Tile(elements=2048, warps=2),
    "norm_backward": Tile(elements=4096, warps=4, per_sm=2, stages=3),
}


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
def _halves(base, at, half, mask):  # type: ignore[no-untyped-def]
    first = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + at + half, mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def _place(  # type: ignore[no-untyped-def]
    tile, heads, seq, half, sb, sh, st, P: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr
):
    """Offsets [P, H, HALF] of a tile of positions and heads in a strided tensor and in the dense result, and masks."""
    across = tl.cdiv(heads, H)
    along = tl.cdiv(seq, P)
    head = (tile % across) * H + tl.arange(0, H)
    position = (tile // across) % along * P + tl.arange(0, P)
    item = (tile // across // along).to(tl.int64)
    col = tl.arange(0, HALF)[None, None, :]
    strided = item * sb + position.to(tl.int64)[:, None, None] * st + head[None, :, None] * sh + col
    dense = ((item * seq + position)[:, None, None] * heads + head[None, :, None]) * (2 * half) + col
    mask = (position < seq)[:, None, None] & (head < heads)[None, :, None] & (col < half)
    return position, strided, dense, mask


@jit
def _angles(cos_ptr, sin_ptr, position, seq, half, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """cos and sin [P, 1, HALF], read once for all heads."""
    col = tl.arange(0, HALF)[None, :]
    at = position[:, None] * half + col
    mask = (position < seq)[:, None] & (col < half)
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return cos[:, None, :], sin[:, None, :]


@jit
def _weights(weight_ptr, half, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    col = tl.arange(0, HALF)
    first = tl.load(weight_ptr + col, mask=col < half, other=0.0).to(tl.float32)
    second = tl.load(weight_ptr + half + col, mask=col < half, other=0.0).to(tl.float32)
    return first[None, None, :], second[None, None, :]


@jit
def _rotate_tile(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, tile, heads, seq, half, eps, sb, sh, st, sign,
    P: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    position, strided, dense, mask = _place(tile, heads, seq, half, sb, sh, st, P, H, HALF)
    a, b = _halves(x_ptr, strided, half, mask)
    if NORM:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=2) / (2 * half) + eps)[:, :, None]
        w1, w2 = _weights(weight_ptr, half, HALF)
        a *= rstd * w1
        b *= rstd * w2
    cos, sin = _angles(cos_ptr, sin_ptr, position, seq, half, HALF)
    sin *= sign
    tl.store(out_ptr + dense, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + dense + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_tiles, q_heads, k_heads, seq, half, eps, qb, qh, qt, kb, kh, kt, sign,
    QP: tl.constexpr, QH: tl.constexpr, KP: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < q_tiles:
        _rotate_tile(
            q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, tile, q_heads, seq, half, eps, qb, qh, qt, sign,
            QP, QH, HALF, NORM,
        )  # fmt: skip
    else:
        _rotate_tile(
            k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, tile - q_tiles, k_heads, seq, half, eps, kb, kh, kt,
            sign, KP, KH, HALF, NORM,
        )  # fmt: skip


@jit
def _norm_backward_tiles(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, partial_ptr, first, tiles, step,
    heads, seq, half, eps, yb, yh, yt, xb, xh, xt,
    P: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    w1, w2 = _weights(weight_ptr, half, HALF)
    dw1 = tl.zeros([P, H, HALF], tl.float32)
    dw2 = tl.zeros([P, H, HALF], tl.float32)
    for tile in tl.range(first, tiles, step, num_stages=STAGES):
        position, y_at, dense, mask = _place(tile, heads, seq, half, yb, yh, yt, P, H, HALF)
        _, x_at, _, _ = _place(tile, heads, seq, half, xb, xh, xt, P, H, HALF)
        y1, y2 = _halves(dy_ptr, y_at, half, mask)
        a, b = _halves(x_ptr, x_at, half, mask)
        cos, sin = _angles(cos_ptr, sin_ptr, position, seq, half, HALF)
        g1 = y1 * cos + y2 * sin
        g2 = y2 * cos - y1 * sin
        rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=2) / (2 * half) + eps)[:, :, None]
        a *= rstd
        b *= rstd
        dw1 += g1 * a
        dw2 += g2 * b
        g1 *= w1
        g2 *= w2
        along = (tl.sum(g1 * a + g2 * b, axis=2) / (2 * half))[:, :, None]
        tl.store(dx_ptr + dense, ((g1 - a * along) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + dense + half, ((g2 - b * along) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
    col = tl.arange(0, HALF)
    tl.store(partial_ptr + col, tl.sum(tl.sum(dw1, axis=0), axis=0), mask=col < half)
    tl.store(partial_ptr + half + col, tl.sum(tl.sum(dw2, axis=0), axis=0), mask=col < half)


@jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    dq_ptr, dk_ptr, q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, partial_ptr,
    q_tiles, k_tiles, q_heads, k_heads, seq, half, eps,
    dqb, dqh, dqt, dkb, dkh, dkt, qb, qh, qt, kb, kh, kt,
    QP: tl.constexpr, QH: tl.constexpr, KP: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    partial = partial_ptr + tl.program_id(0) * 4 * half
    step = tl.num_programs(0)
    _norm_backward_tiles(
        dq_ptr, q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, partial, tl.program_id(0), q_tiles, step,
        q_heads, seq, half, eps, dqb, dqh, dqt, qb, qh, qt, QP, QH, HALF, STAGES,
    )  # fmt: skip
    # From the other end: the programs that had one tile of q more get one tile of k less.
    _norm_backward_tiles(
        dk_ptr, k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, partial + 2 * half, step - 1 - tl.program_id(0),
        k_tiles, step, k_heads, seq, half, eps, dkb, dkh, dkt, kb, kh, kt, KP, KH, HALF, STAGES,
    )  # fmt: skip


def _empty(x: Tensor) -> Tensor:
    """Like x [batch, heads, seq, head_dim], dense in memory as [batch, seq, heads, head_dim]."""
    b, h, t, d = x.shape
    return torch.empty((b, t, h, d), dtype=x.dtype, device=x.device).transpose(1, 2)


def _fits(q: Tensor, *others: Tensor) -> bool:
    return usable(q, *others) and q.numel() > 0 and others[0].numel() > 0 and q.shape[3] <= MAX_HEAD_DIM


@dataclass(frozen=True)
class _Shape:
    """How one of q and k is cut: positions and heads a tile (powers of two), and the number of tiles."""

    positions: int
    heads: int
    tiles: int

    @staticmethod
    def of(x: Tensor, tile: Tile) -> _Shape:
        batch, heads, seq, dim = x.shape
        rows = tile.rows(power_of_2(dim))
        h = min(power_of_2(heads), rows)
        p = min(rows // h, power_of_2(seq))
        return _Shape(p, h, batch * cdiv(seq, p) * cdiv(heads, h))


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, sign: float
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _empty(q), _empty(k)
    tile = TILES["rotate"]
    of_q, of_k = _Shape.of(q, tile), _Shape.of(k, tile)
    half = q.shape[3] // 2
    wrap_triton(_rotate_kernel)[(of_q.tiles + of_k.tiles,)](
        q, k, q_out, k_out, cos if weights is None else weights[0], cos if weights is None else weights[1], cos, sin,
        of_q.tiles, q.shape[1], k.shape[1], q.shape[2], half, eps, *q.stride()[:3], *k.stride()[:3], sign,
        QP=of_q.positions, QH=of_q.heads, KP=of_k.positions, KH=of_k.heads,
        HALF=power_of_2(half), NORM=weights is not None, num_warps=tile.warps,
    )  # fmt: skip
    return q_out, k_out


def _norm_backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_out, k_out = _empty(q), _empty(k)
    dim, half = q.shape[3], q.shape[3] // 2
    tile = TILES["norm_backward"]
    of_q, of_k = _Shape.of(q, tile), _Shape.of(k, tile)
    count = programs(q.device, tile.per_sm, of_q.tiles + of_k.tiles)
    partial = torch.empty((count, 2 * dim), dtype=torch.float32, device=q.device)
    wrap_triton(_norm_backward_kernel)[(count,)](
        dq, dk, q, k, q_out, k_out, *weights, cos, sin, partial,
        of_q.tiles, of_k.tiles, q.shape[1], k.shape[1], q.shape[2], half, eps,
        *dq.stride()[:3], *dk.stride()[:3], *q.stride()[:3], *k.stride()[:3],
        QP=of_q.positions, QH=of_q.heads, KP=of_k.positions, KH=of_k.heads,
        HALF=power_of_2(half), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return q_out, k_out, column_sum(partial, weights[0].dtype).view(2, dim)


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


@fused_op("costlab::rope")
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    if not _fits(q, k, cos, sin):
        return _like(rotate_reference(q, cos, sign * sin)), _like(rotate_reference(k, cos, sign * sin))
    return _rotate(q, k, cos, sin, None, 0.0, sign)


@fused_op("costlab::norm_rope")
def _norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(q, k, q_weight, k_weight, cos, sin):
        return (
            _like(norm_rotate_reference(q, q_weight, cos, sin, eps)),
            _like(norm_rotate_reference(k, k_weight, cos, sin, eps)),
        )
    return _rotate(q, k, cos, sin, (q_weight, k_weight), eps, 1.0)


@fused_op("costlab::norm_rope_backward")
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and k, and [2, head_dim]: those of their weights."""
    if not _fits(q, k, dq, dk, q_weight, k_weight, cos, sin):
        q_gradient, q_weight_gradient = _norm_backward_reference(dq, q, q_weight, cos, sin, eps)
        k_gradient, k_weight_gradient = _norm_backward_reference(dk, k, k_weight, cos, sin, eps)
        return q_gradient, k_gradient, torch.stack((q_weight_gradient, k_weight_gradient))
    return _norm_backward(dq, dk, q, k, (q_weight, k_weight), cos, sin, eps)


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
    dq, dk, sums = _norm_rope_backward(_dense(dq), _dense(dk), *ctx.saved_tensors, ctx.eps)
    return dq, dk, sums[0], sums[1], None, None, None


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

"""Linear layer and cross-entropy in one op that never holds all logits, with z-loss and ignored targets.

    logits = x @ weight.T,   lse_t = log sum_v exp(logits_tv)
    loss = sum_t (lse_t - logits_t,target + z_weight lse_t^2) over t with target != ignore_index; mean: / their number
    dlogits_tv = softmax_tv (1 + 2 z_weight lse_t) - [v = target]

Source: the chunked scheme of the fused linear cross-entropy in Liger (Hsu et al. 2024, arXiv 2410.10989); z-loss of
PaLM (arXiv 2204.02311). Tokens are taken in chunks; a chunk's logits are replaced in place by their gradient, one row a
program, and the products with weight and x follow at once, so that the gradients of x and weight are ready when the
loss is. Backward only multiplies them by the incoming gradient, in place, and skips even that (on the device, without a
synchronisation) when the factor is 1. A second backward through a retained graph is therefore refused by autograd's
version check.

Shapes: x [..., n], weight [vocab, n], targets [...] int64, loss fp32 []. Dtypes: fp32, bf16, fp16; x and weight share
one (under autocast both are taken in its dtype). Numerics: logits and their gradient are rounded to x's dtype, softmax
in fp32; the weight gradient is added over chunks in the weight's dtype (one rounding a chunk). For fp16 the 1/number
factor is applied after the products and the weight gradient is added in fp32, because fp16 would flush the small
gradients to zero. A target outside the vocabulary that is not `ignore_index` gives a NaN loss; no valid target gives
NaN for "mean", as in eager, with zero gradients.

Extra memory at the peak: the weight's gradient, and a first chunk's logits of at most 118 MiB or 1024 rows; later
chunks are shorter by what the gradient of x takes meanwhile, so that it adds nothing. A custom op, not a
traced one: functionalising the in-place accumulation would make a copy of the weight gradient for every chunk. CPU
tensors (outside Triton's interpreter) and fp64 run the same scheme with the softmax computed eagerly.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from costlab.kernels.fused.launch import (
    Tile,
    autocast,
    cdiv,
    direct_launch,
    jit,
    power_of_2,
    programs,
    tl,
    usable,
    wrap_triton,
)

BUFFER_BYTES = 118 << 20
MIN_CHUNK = 1024
TILES = {
    "softmax": Tile(elements=8192, warps=8),
    "scale": Tile(8192, 4, per_sm=4),
}
_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, z_weight: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """The eager loss with all logits in memory, softmax in fp32 (fp64 for fp64 inputs)."""
    logits = x @ weight.t()
    logits = (logits if logits.dtype == torch.float64 else logits.float()).reshape(-1, weight.shape[0])
    targets = targets.reshape(-1)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    if z_weight:
        valid = targets != ignore_index
        squares = torch.where(valid, logits.logsumexp(-1).square(), 0.0).sum()
        loss = loss + z_weight * (squares / valid.sum() if reduction == "mean" else squares)
    return loss


@jit
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, losses_ptr, scale_ptr, cols, ignore_index, z_weight, B: tl.constexpr, GRAD: tl.constexpr,
    STAGES: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    # From the last row back: the product before and the ones after go forward, so more of the rows are in the L2 cache.
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * cols
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRAD:
            for first in range(0, cols, B):
                col = first + tl.arange(0, B)
                tl.store(base + col, tl.zeros([B], logits_ptr.dtype.element_ty), mask=col < cols)
    else:
        known = (target >= 0) & (target < cols)
        chosen = tl.load(base + target, mask=known, other=float("nan")).to(tl.float32)
        top = -3.0e38
        total = 0.0
        whole = tl.arange(0, B)
        if ONE:  # the row is in registers: it is read once
            row_logits = tl.load(base + whole, mask=whole < cols, other=float("-inf"))
            scaled = row_logits.to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, tl.max(scaled, axis=0))
            total = tl.sum(tl.exp2(scaled - top), axis=0)
        else:
            for first in tl.range(0, cols, B, num_stages=STAGES):
                col = first + whole
                logits = tl.load(base + col, mask=col < cols, other=float("-inf")).to(tl.float32) * 1.4426950408889634
                higher = tl.maximum(top, tl.max(logits, axis=0))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher), axis=0)
                top = higher
        lse = top * 0.6931471805599453 + tl.log(total)
        tl.store(losses_ptr + row, lse - chosen + z_weight * lse * lse)
        if GRAD:
            scale = tl.load(scale_ptr)
            factor = (1.0 + 2.0 * z_weight * lse) * scale / total
            tl.debug_barrier()  # every warp has read the target's logit before one of them overwrites it
            if ONE:
                gradient = tl.exp2(row_logits.to(tl.float32) * 1.4426950408889634 - top) * factor
                gradient = tl.where(whole == target, gradient - scale, gradient)
                tl.store(base + whole, gradient.to(logits_ptr.dtype.element_ty), mask=whole < cols)
            else:
                for first in tl.range(0, cols, B, num_stages=STAGES):
                    col = first + whole
                    logits = tl.load(base + col, mask=col < cols, other=0.0).to(tl.float32)
                    gradient = tl.exp2(logits * 1.4426950408889634 - top) * factor
                    gradient = tl.where(col == target, gradient - scale, gradient)
                    tl.store(base + col, gradient.to(logits_ptr.dtype.element_ty), mask=col < cols)


@jit
def _scale_kernel(x_ptr, factor_ptr, size, B: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for tile in range(tl.program_id(0), tl.cdiv(size, B), tl.num_programs(0)):
            at = tile * tl.full([1], B, tl.int64) + tl.arange(0, B)
            value = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32) * factor
            tl.store(x_ptr + at, value.to(x_ptr.dtype.element_ty), mask=at < size)


def _softmax_step(
    logits: Tensor, targets: Tensor, losses: Tensor, scale: Tensor, ignore_index: int, z_weight: float, grad: bool
) -> None:
    """Write each row's loss to `losses` and, with `grad`, replace the logits by scale * dlogits."""
    if not usable(logits):
        return _softmax_step_eager(logits, targets, losses, scale, ignore_index, z_weight, grad)
    rows, cols = logits.shape
    tile = TILES["softmax"]
    block = min(power_of_2(cols), tile.elements)
    with direct_launch():
        wrap_triton(_softmax_kernel)[(rows,)](
            logits, targets, losses, scale, cols, ignore_index, z_weight,
            B=block, GRAD=grad, STAGES=tile.stages, ONE=block >= cols, num_warps=tile.warps,
        )  # fmt: skip
    return None


def _softmax_step_eager(
    logits: Tensor, targets: Tensor, losses: Tensor, scale: Tensor, ignore_index: int, z_weight: float, grad: bool
) -> None:
    valid = targets != ignore_index
    known = valid & (targets >= 0) & (targets < logits.shape[1])
    at = torch.where(known, targets, 0)[:, None]
    wide = logits.to(losses.dtype)
    lse = wide.logsumexp(-1)
    chosen = torch.where(known, wide.gather(1, at)[:, 0], float("nan"))
    losses.copy_(torch.where(valid, lse - chosen + z_weight * lse.square(), 0.0))
    if grad:
        p = (wide - lse[:, None]).exp() * (1 + 2 * z_weight * lse)[:, None]
        p.scatter_add_(1, at, -known.to(p.dtype)[:, None])
        logits.copy_(torch.where(valid[:, None], p * scale, 0.0))


def chunk_rows(tokens: int, vocab: int, itemsize: int) -> int:
    """Tokens of the first chunk: a multiple of 128 whose logits and gradient of x fit `BUFFER_BYTES`, at least 1024."""
    most = max(MIN_CHUNK, BUFFER_BYTES // (vocab * itemsize) // 128 * 128)
    return min(most, cdiv(max(tokens, 1), 128) * 128)


@lru_cache(maxsize=256)
def chunks(tokens: int, vocab: int, width: int, first: int) -> tuple[int, ...]:
    """Tokens of each chunk: at most `first`, then fewer, as the gradient of x grows into what the first one took.

    The products are quicker the taller the chunk: the weight's gradient is read and written once a chunk, and the
    gradient of x has few tiles. So chunks are as few as `first` allows, and then as even as that number allows.
    """
    sizes = _chunks(tokens, vocab, width, first, 128)
    for less in range(first - 32, MIN_CHUNK - 1, -32):
        even = _chunks(tokens, vocab, width, less, 32)
        if len(even) > len(sizes):
            break
        sizes = even
    return tuple(sizes)


def _chunks(tokens: int, vocab: int, width: int, first: int, multiple: int) -> list[int]:
    """Chunks of which none but the last is shorter than `MIN_CHUNK` (or `first`)."""
    least = min(MIN_CHUNK, first)
    sizes: list[int] = []
    done = 0
    while done < tokens:
        fits = (first * (vocab + width) - done * width) // (vocab + width) // multiple * multiple
        sizes.append(min(tokens - done, first, max(least, fits)))
        done += sizes[-1]
    return sizes


@torch.library.custom_op("costlab::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_weight: float,
    mean: bool,
    need_dx: bool,
    need_dweight: bool,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, dx, dweight, and the factor that still has to be applied to both gradients."""
    tokens, vocab = x.shape[0], weight.shape[0]
    loss_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    deferred = x.dtype == torch.float16
    one = torch.ones((), dtype=loss_dtype, device=x.device)
    share = one / (targets != ignore_index).sum() if mean else one
    scale = one if deferred else share
    losses = torch.empty(tokens, dtype=loss_dtype, device=x.device)
    accumulated = torch.float32 if deferred else weight.dtype
    dweight = torch.zeros(weight.shape if need_dweight and tokens == 0 else (0,), dtype=accumulated, device=x.device)
    if need_dweight and tokens:
        dweight = torch.empty(weight.shape, dtype=accumulated, device=x.device)
    sizes = list(chunks(tokens, vocab, x.shape[1], rows))
    parts: list[Tensor] = []
    with torch.autocast(x.device.type, enabled=False):
        cut = (t.split(sizes) if sizes else () for t in (x, targets, losses))
        for i, (part, target, loss) in enumerate(zip(*cut, strict=True)):
            logits = part @ weight.t()
            _softmax_step(logits, target, loss, scale, ignore_index, z_weight, need_dx or need_dweight)
            if need_dx:
                parts.append(logits @ weight)
            if need_dweight:
                _accumulate(dweight, logits, part, first=i == 0)
            del logits
    dx = torch.cat(parts) if parts else torch.empty_like(x) if need_dx else x.new_empty(0)
    return losses.sum() * share, dx, dweight, share.clone() if deferred else one.clone()


def _accumulate(dweight: Tensor, dlogits: Tensor, part: Tensor, first: bool) -> None:
    if dweight.dtype == part.dtype:
        if first:
            torch.mm(dlogits.t(), part, out=dweight)
        else:
            dweight.addmm_(dlogits.t(), part)
    elif first:
        dweight.copy_(dlogits.t() @ part)
    else:
        dweight.add_(dlogits.t() @ part)


@_linear_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, _t: Tensor, _i: int, _z: float, _m: bool, need_dx: bool, need_dweight: bool, _r: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    accumulated = torch.float32 if x.dtype == torch.float16 else weight.dtype
    dweight = torch.empty(weight.shape if need_dweight else (0,), dtype=accumulated, device=x.device)
    return loss, dx, dweight, torch.empty_like(loss)


@torch.library.custom_op("costlab::scale_gradient_", mutates_args=("gradient",))
def _scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    if gradient.numel() == 0:
        return
    if not usable(gradient):
        gradient.mul_(factor)
        return
    tile = TILES["scale"]
    count = programs(gradient.device, tile.per_sm, cdiv(gradient.numel(), tile.elements))
    with direct_launch():
        wrap_triton(_scale_kernel)[(count,)](
            gradient, factor, gradient.numel(), B=tile.elements, num_warps=tile.warps
        )  # fmt: skip


@_scale_gradient.register_fake
def _(_gradient: Tensor, _factor: Tensor) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.need_dx, ctx.need_dweight, ctx.dtype = inputs[6], inputs[7], inputs[1].dtype
    ctx.save_for_backward(*output[1:])
    # Materialised gradients of the two saved gradients would be zeros of their size.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dloss: Tensor, *_others: None) -> tuple[Tensor | None, ...]:
    dx, dweight, factor = ctx.saved_tensors
    factor = factor * dloss
    _scale_gradient(dx, factor)
    _scale_gradient(dweight, factor)
    return dx if ctx.need_dx else None, dweight.to(ctx.dtype) if ctx.need_dweight else None, *[None] * 7


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    z_weight: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
) -> Tensor:
    """Cross-entropy of `x @ weight.T` against `targets`; see the module for formula, shapes and memory. Differentiable.

    `rows` overrides the tokens a chunk. Raises ValueError for a reduction but "mean" and "sum", for unlike dtypes of
    x and weight outside autocast, and for targets whose shape is not x's without the last dimension.
    """
    x, weight = autocast(x, weight)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"no reduction '{reduction}'; there are: {', '.join(_REDUCTIONS)}")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit x {tuple(x.shape)}")
    grad = torch.is_grad_enabled()
    flat = x.reshape(-1, x.shape[-1])
    if rows is None:
        rows = chunk_rows(flat.shape[0], weight.shape[0], x.element_size())
    loss: Tensor = _linear_cross_entropy(
        flat, weight, targets.reshape(-1).contiguous(), ignore_index, float(z_weight), reduction == "mean",
        grad and x.requires_grad, grad and weight.requires_grad, rows,
    )[0]  # fmt: skip
    return loss

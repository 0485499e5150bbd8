"""Feed-forward block with residual and LayerNorm behind it (post-norm), as one op.

    u = x @ w1.T,   h = gelu(u + b1),   s = x + h @ w2.T + b2,   y = LayerNorm(s)

(Vaswani et al. 2017, arXiv 1706.03762, with GELU, arXiv 1606.08415.) The products are the library's, without its
epilogues for the biases: b1 is added in GELU's pass and b2 in LayerNorm's, b1's gradient is summed in the pass that
differentiates GELU and b2's in LayerNorm's backward, and the residual's gradient is added in the epilogue of the
product for dx. GELU's passes go from the last row back, since the product before them ended there and left those rows
in the L2 cache.

Shapes: x [..., n], w1 [m, n], b1 [m], w2 [n, m], b2, weight, bias [n], y as x; n <= 16384. Dtypes: fp32, bf16, fp16,
one for all (under autocast all are taken in its dtype). Numerics: GELU (erf or tanh form), LayerNorm and all sums in
fp32; u, h, h @ w2.T and s are rounded to x's dtype. x, u, h and s are kept for the backward. CPU tensors (outside
Triton's interpreter) and other dtypes take eager passes around the same products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused import layer_norm as ln
from costlab.kernels.fused.column_sum import column_sum
from costlab.kernels.fused.gated import activate, activation
from costlab.kernels.fused.launch import (
    Tile,
    as_rows,
    autocast,
    cdiv,
    jit,
    power_of_2,
    programs,
    tl,
    usable,
    wrap_triton,
)
from costlab.kernels.fused.norm_kernels import launch_backward, launch_forward
from costlab.kernels.fused.op import fused_op

TILES = {"gelu": Tile(elements=4096, warps=4), "gelu_backward": Tile(elements=4096, warps=4, per_sm=4)}
_FORMS = {"none": 1, "tanh": 2}
_NAMES = {1: "gelu", 2: "gelu_tanh"}


def ffn_layer_norm_reference(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, weight: Tensor, bias: Tensor, eps: float, form: str
) -> Tensor:
    """The eager block; `form` is GELU's `approximate` argument."""
    h = activation(_NAMES[_FORMS[form]], x @ w1.t() + b1)
    return ln.layer_norm_reference(x + (h @ w2.t() + b2), weight, bias, eps)


@jit
def _place(tile, lane, cols, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tile * R + tl.arange(0, R)
    col = lane * B + tl.arange(0, B)
    return row, col, row.to(tl.int64)[:, None] * cols + col[None, :]


@jit
def _gelu_kernel(u_ptr, bias_ptr, h_ptr, rows, cols, R: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    across = tl.cdiv(cols, B)
    back = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col, at = _place(back // across, back % across, cols, R, B)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(u + tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :], ACT)
    tl.store(h_ptr + at, value.to(h_ptr.dtype.element_ty), mask=mask)


@jit
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]
    dh_ptr, u_ptr, bias_ptr, du_ptr, partial_ptr, rows, cols,
    R: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of one column block share its rows, and each stores one row of partial sums of du."""
    across = tl.cdiv(cols, B)
    lanes = tl.num_programs(0) // across
    tiles = tl.cdiv(rows, R)
    bias_col = (tl.program_id(0) % across) * B + tl.arange(0, B)
    bias = tl.load(bias_ptr + bias_col, mask=bias_col < cols, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([R, B], tl.float32)
    for tile in tl.range(tl.program_id(0) // across, tiles, lanes, num_stages=STAGES):
        row, col, at = _place(tiles - 1 - tile, tl.program_id(0) % across, cols, R, B)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        _, slope = activate(tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias, ACT)
        du = dh * slope
        tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=mask)
        total += du
    out = partial_ptr + (tl.program_id(0) // across) * cols + bias_col
    tl.store(out, tl.sum(total, axis=0), mask=bias_col < cols)


def _blocks(tile: Tile, rows: int, cols: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, column blocks, row tiles."""
    block = min(power_of_2(cols), 512)
    r = tile.rows(block)
    return r, block, cdiv(cols, block), cdiv(rows, r)


def _gelu(u: Tensor, bias: Tensor, act: int) -> Tensor:
    """gelu(u + bias)."""
    if not usable(u, bias) or u.numel() == 0:
        return activation(_NAMES[act], u + bias)
    tile = TILES["gelu"]
    r, block, across, tiles = _blocks(tile, *u.shape)
    h = torch.empty_like(u)
    wrap_triton(_gelu_kernel)[(across * tiles,)](u, bias, h, *u.shape, R=r, B=block, ACT=act, num_warps=tile.warps)
    return h


def _gelu_backward(dh: Tensor, u: Tensor, bias: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """du and the gradient of the bias."""
    if not usable(u, dh, bias) or u.numel() == 0:
        du = torch.ops.aten.gelu_backward(dh, u + bias, approximate="tanh" if act == 2 else "none")
        return du, du.to(torch.promote_types(du.dtype, torch.float32)).sum(0).to(bias.dtype)
    tile = TILES["gelu_backward"]
    r, block, across, tiles = _blocks(tile, *u.shape)
    lanes = max(1, programs(u.device, tile.per_sm, across * tiles) // across)
    partial = torch.empty((lanes, u.shape[1]), dtype=torch.float32, device=u.device)
    du = torch.empty_like(u)
    wrap_triton(_gelu_backward_kernel)[(lanes * across,)](
        dh, u, bias, du, partial, *u.shape, R=r, B=block, ACT=act, STAGES=tile.stages, num_warps=tile.warps
    )  # fmt: skip
    return du, column_sum(partial, bias.dtype)


@fused_op("costlab::ffn_layer_norm")
def _ffn_layer_norm(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, weight: Tensor, bias: Tensor, eps: float, act: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, u, h, s, mean, rstd."""
    with torch.autocast(x.device.type, enabled=False):
        u = x @ w1.t()
        h = _gelu(u, b1, act)
        f = h @ w2.t()
    if not ln.fits(f, x, b2, weight, bias):
        y, s = ln.add_layer_norm_reference(f + b2, x, weight, bias, eps)
        mean, rstd = ln.reference_statistics(s, eps)
    else:
        y, s, mean, rstd = launch_forward(f, x, weight, bias, eps, center=True, offset=b2)
    return y, u, h, s, mean, rstd


@fused_op("costlab::ffn_layer_norm_backward")
def _ffn_layer_norm_backward(
    dy: Tensor, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, weight: Tensor, u: Tensor, h: Tensor, s: Tensor,
    mean: Tensor, rstd: Tensor, act: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw1, db1, dw2, and [3, n]: the gradients of weight, bias and b2."""
    if ln.fits(s, dy, weight):
        ds, sums = launch_backward(dy, None, s, weight, mean, rstd, bias=True, center=True, sum_dh=True)
    else:
        ds, sums = ln.reference_backward(dy, None, s, weight, mean, rstd)
        sums = torch.cat((sums, ds.to(mean.dtype).sum(0, keepdim=True).to(sums.dtype)))
    with torch.autocast(x.device.type, enabled=False):
        du, db1 = _gelu_backward(ds @ w2, u, b1, act)
        dx = torch.addmm(ds, du, w1)
        return dx, du.t() @ x, db1, ds.t() @ h, sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w1, b1, w2, _, weight, _, _, ctx.act = inputs
    ctx.save_for_backward(x, w1, b1, w2, weight, *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dy: Tensor, *_others: None) -> tuple[Tensor | None, ...]:
    dx, dw1, db1, dw2, sums = _ffn_layer_norm_backward(dy.contiguous(), *ctx.saved_tensors, ctx.act)
    return dx, dw1, db1, dw2, sums[2], sums[0], sums[1], None, None


_ffn_layer_norm.register_autograd(_backward, setup_context=_save)


def ffn_layer_norm(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    form: str = "none",
) -> Tensor:
    """LayerNorm(x + gelu(x @ w1.T + b1) @ w2.T + b2); `form` is GELU's `approximate` argument. Differentiable.

    Raises ValueError for another form and for dtypes that differ outside autocast.
    """
    if form not in _FORMS:
        raise ValueError(f"no GELU form '{form}'; there are: {', '.join(_FORMS)}")
    tensors = autocast(x, w1, b1, w2, b2, weight, bias)
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"dtypes differ: {', '.join(str(t.dtype) for t in tensors)}")
    rows = as_rows(tensors[0])
    y: Tensor = _ffn_layer_norm(rows, *tensors[1:], eps, _FORMS[form])[0]
    return y.view(x.shape)

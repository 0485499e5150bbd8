"""AdamW over many tensors in one launch, which also writes the bf16 (or fp16) copy that the next forward reads.

    p -= lr weight_decay p,   m += (1 - b1)(g - m),   v += (1 - b2)(g^2 - v)
    p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps),   copy = p rounded

(Loshchilov & Hutter 2019, arXiv 1711.05101, in the order of `torch.optim.AdamW`.)

Shapes: any, one list entry a tensor; all dense in memory. Dtypes: p, m, v fp32; g fp32, bf16 or fp16, one for all; copy
bf16 or fp16, one for all. Numerics: fp32, copy rounded to nearest. A table on the device holds the addresses and the
chunks, built once and again only when an address changes. CPU tensors (outside Triton's interpreter) take the eager
reference. Traffic a value: 30 bytes with fp32 gradients and a 16-bit copy; torch's fused AdamW and a cast move 34.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from costlab.kernels.fused.launch import direct_launch, jit, tl, usable, wrap_triton

CHUNK = 4096
WARPS = 4


@dataclass(frozen=True)
class AdamWOptions:
    """Hyperparameters of one update, as of `torch.optim.AdamW`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


def adamw_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] | None,
    step: int,
    o: AdamWOptions,
) -> None:
    """The eager update, in place; `step` counts from 1."""
    root = (1 - o.beta2**step) ** 0.5
    for i, (p, g, m, v) in enumerate(zip(params, grads, means, squares, strict=True)):
        wide = g.to(p.dtype)
        p.mul_(1 - o.lr * o.weight_decay)
        m.lerp_(wide, 1 - o.beta1)
        v.mul_(o.beta2).addcmul_(wide, wide, value=1 - o.beta2)
        p.addcdiv_(m, (v.sqrt() / root).add_(o.eps), value=-o.lr / (1 - o.beta1**step))
        if copies is not None:
            copies[i].copy_(p)


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    table_ptr, like_g_ptr, like_copy_ptr, decay, step_size, beta1, beta2, root, eps,
    B: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    row = table_ptr + tl.program_id(0) * 6
    at = tl.arange(0, B)
    inside = at < tl.load(row + 5)
    p_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + at
    g_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(like_g_ptr.dtype.element_ty)), 16) + at
    m_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + at
    v_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + at
    g = tl.load(g_ptr, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr, mask=inside, other=0.0)
    v = tl.load(v_ptr, mask=inside, other=0.0)
    p = tl.load(p_ptr, mask=inside, other=0.0) * decay
    m += (1.0 - beta1) * (g - m)
    v = v * beta2 + (1.0 - beta2) * g * g
    p -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(m_ptr, m, mask=inside)
    tl.store(v_ptr, v, mask=inside)
    tl.store(p_ptr, p, mask=inside)
    if COPY:
        copy_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(like_copy_ptr.dtype.element_ty)), 16) + at
        tl.store(copy_ptr, p.to(like_copy_ptr.dtype.element_ty), mask=inside)


class MultiTensorAdamW:
    """The update of one list of tensors; keeps the table between steps.

    Raises ValueError for tensors that are not dense, not aligned to 16 bytes, or of unlike sizes or dtypes.
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[int, int], ...] = ()
        self._table: Tensor | None = None

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        copies: Sequence[Tensor] | None,
        step: int,
        options: AdamWOptions,
    ) -> None:
        """Update all in place; `step` counts from 1, `copies` (None: none) receive the new parameters rounded."""
        lists = [params, grads, means, squares, copies if copies is not None else params]
        _check(lists)
        if not params:
            return
        if not usable(params[0], *grads, *lists[4]):
            adamw_reference(params, grads, means, squares, copies, step, options)
            return
        table = self._table_of(lists)
        with direct_launch():
            wrap_triton(_adamw_kernel)[(table.shape[0],)](
                table, grads[0], lists[4][0], 1 - options.lr * options.weight_decay,
                options.lr / (1 - options.beta1**step), options.beta1, options.beta2,
                (1 - options.beta2**step) ** 0.5, options.eps, B=CHUNK, COPY=copies is not None, num_warps=WARPS,
            )  # fmt: skip

    def _table_of(self, lists: list[Sequence[Tensor]]) -> Tensor:
        known = tuple((t.data_ptr(), t.numel()) for tensors in lists for t in tensors)
        if self._table is None or known != self._known:
            rows = []
            for five in zip(*lists, strict=True):
                addresses, size = [(t.data_ptr(), t.element_size()) for t in five], five[0].numel()
                for first in range(0, size, CHUNK):
                    rows.append([a + first * width for a, width in addresses] + [min(CHUNK, size - first)])
            self._table = torch.tensor(rows, dtype=torch.int64).to(lists[0][0].device)
            self._known = known
        return self._table


def _check(lists: list[Sequence[Tensor]]) -> None:
    if len({len(tensors) for tensors in lists}) > 1:
        raise ValueError(f"lists of unlike length: {[len(tensors) for tensors in lists]}")
    for name, tensors in zip(("params", "grads", "means", "squares", "copies"), lists, strict=True):
        for i, (t, p) in enumerate(zip(tensors, lists[0], strict=True)):
            wide = name in ("params", "means", "squares")
            if t.shape != p.shape or t.dtype != (torch.float32 if wide else tensors[0].dtype):
                raise ValueError(f"{name}[{i}] is {t.dtype} {tuple(t.shape)}; its parameter is {tuple(p.shape)}")
            if not t.is_contiguous() or t.data_ptr() % 16:
                raise ValueError(f"{name}[{i}] is not dense or not aligned to 16 bytes")

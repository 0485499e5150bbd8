"""Second stage of a weight gradient: fp32 partial sums [programs, columns] -> their sum over programs, [columns].

The first stage is a persistent kernel whose programs each add up the rows they meet in registers and store one row of
partial sums. Both stages add in a fixed order, so gradients are the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from costlab.kernels.fused.launch import INTERPRETED, cdiv, jit, tl, wrap_triton

_COLUMNS = 16
_ROWS = 128


@jit
def _column_sum_kernel(partial_ptr, out_ptr, rows, cols, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    col = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros([R, B], tl.float32)
    for first in range(0, rows, R):
        row = first + tl.arange(0, R)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        total += tl.load(partial_ptr + row[:, None] * cols + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < cols)


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of contiguous fp32 [rows, columns] over rows, in `dtype`. Called inside an op that runs its Triton path."""
    rows, cols = partial.shape
    out = partial.new_empty(cols, dtype=dtype)
    r = 16 if INTERPRETED else _ROWS
    wrap_triton(_column_sum_kernel)[(cdiv(cols, _COLUMNS),)](partial, out, rows, cols, R=r, B=_COLUMNS, num_warps=4)
    return out

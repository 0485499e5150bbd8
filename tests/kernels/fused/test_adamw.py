"""Multi-tensor AdamW with the 16-bit copy, against `torch.optim.AdamW`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from costlab.kernels.fused.adamw import CHUNK, AdamWOptions, MultiTensorAdamW
from costlab.kernels.fused.launch import INTERPRETED

Draw = Callable[..., Tensor]
OPTIONS = AdamWOptions(lr=1e-2, beta1=0.8, beta2=0.95, weight_decay=0.1)


def state(draw: Draw, shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    params = [draw(*s).detach() for s in shapes]
    return [params, [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_are_those_of_torch(draw: Draw, dtype: torch.dtype) -> None:
    params, means, squares = state(draw, [(3, 5), (CHUNK + 7,), (1,), (2 * CHUNK,)])
    twins = [p.clone().requires_grad_() for p in params]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
    theirs = torch.optim.AdamW(twins, lr=1e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    ours = MultiTensorAdamW()
    for step in range(1, 4):
        grads = [draw(*p.shape, scale=step).detach().to(dtype) for p in params]
        ours.step(params, grads, means, squares, copies, step, OPTIONS)
        for twin, g in zip(twins, grads, strict=True):
            twin.grad = g.float()
        theirs.step()
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p, twin.detach(), rtol=1e-5, atol=1e-6)
    for copy, p in zip(copies, params, strict=True):
        # The interpreter truncates where the hardware rounds.
        torch.testing.assert_close(copy.float(), p, rtol=1e-2 if INTERPRETED else 4e-3, atol=1e-6)


def test_without_copies_and_with_moved_tensors(draw: Draw) -> None:
    params, means, squares = state(draw, [(40,), (7, 3)])
    expected = [p.clone() for p in params]
    optimizer = MultiTensorAdamW()
    for step in (1, 2):  # new gradients every step: their addresses change
        grads = [torch.ones_like(p) for p in params]
        optimizer.step(params, grads, means, squares, None, step, AdamWOptions(lr=0.5, weight_decay=0.0))
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e - 1.0, rtol=1e-4, atol=1e-4)  # a constant gradient moves by lr a step


def test_nothing_to_do() -> None:
    MultiTensorAdamW().step([], [], [], [], None, 1, OPTIONS)


def test_refusals(draw: Draw) -> None:
    params, means, squares = state(draw, [(4, 6)])
    optimizer = MultiTensorAdamW()
    with pytest.raises(ValueError, match="unlike length"):
        optimizer.step(params, [], means, squares, None, 1, OPTIONS)
    with pytest.raises(ValueError, match=r"grads\[0\]"):
        optimizer.step(params, [params[0][:2]], means, squares, None, 1, OPTIONS)
    with pytest.raises(ValueError, match="not dense"):
        optimizer.step(params, [torch.ones(6, 4, device=params[0].device).t()], means, squares, None, 1, OPTIONS)
    with pytest.raises(ValueError, match=r"means\[0\] is torch.float64"):
        optimizer.step(params, params, [means[0].double()], squares, None, 1, OPTIONS)

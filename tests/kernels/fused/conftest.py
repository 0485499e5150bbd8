"""Fixtures of the kernels' tests.

Every test here runs three times over: on the eager references (plain CPU), on the Triton kernels in the interpreter
(`test_interpreted.py` starts that run), and on the Triton kernels on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from costlab.kernels.fused.launch import INTERPRETED

# The interpreter truncates where the hardware rounds to bf16, hence twice the unit roundoff.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same weights and inputs in every run, whatever ran before: tolerances are checked, not drawn."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """Where the tests put their tensors."""
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture
def draw(device: torch.device) -> Callable[..., Tensor]:
    """Random leaf tensors that require gradients, the same in every run."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale + shift).to(device, dtype).requires_grad_()

    return make


def relative(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference; 0 for empty tensors, NaN counts as infinite."""
    difference = (value.double() - reference.double()).norm()
    norm = reference.double().norm()
    if not value.numel():
        return 0.0
    return float("inf") if difference.isnan() else (difference / norm.clamp_min(1e-30)).item()


@pytest.fixture
def agree() -> Callable[..., None]:
    """Outputs and gradients of a fused function against its reference in fp64, by relative norm."""

    def run(
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Sequence[Tensor],
        fixed: Sequence[Tensor] = (),
        tolerance: float | None = None,
    ) -> None:
        wanted = [t for t in inputs if t.requires_grad]
        limit = tolerance or TOLERANCES[inputs[0].dtype]
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        wide_fixed = [t.double() if t.is_floating_point() else t for t in fixed]
        values, references = (_tuple(fused(*inputs, *fixed)), _tuple(reference(*wide, *wide_fixed)))
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(v.shape, generator=generator).to(v.device, v.dtype) for v in values]
        gradients = torch.autograd.grad(values, wanted, seeds)
        expected = torch.autograd.grad(references, [t for t in wide if t.requires_grad], [s.double() for s in seeds])
        for t, g in zip(wanted, gradients, strict=True):
            assert g.dtype == t.dtype and g.shape == t.shape
        errors = [relative(v, r) for v, r in zip((*values, *gradients), (*references, *expected), strict=True)]
        assert max(errors) < limit, errors

    return run


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)

"""The acceptance test of lossy optimizer state: how wrong the first Adam update after a restore would be.

The L2 error of a coded second moment ranks codecs nearly in reverse (linear FP8 has 2 % and makes the update
eight times wrong), and validation loss hides the damage, so the update itself is compared:

    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g**2,  u = m' / (1 - b1**t) / (sqrt(v' / (1 - b2**t)) + eps)

with t the next step, once from the exact and once from the decoded moments; the error is ||u_decoded - u|| / ||u||.
The gradient g is the real one where it is given, else drawn from N(0, v / (1 - b2**t)) with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

DEFAULT_THRESHOLD = 0.10


@dataclass(frozen=True, slots=True)
class Adam:
    """The optimizer's constants; PyTorch's defaults."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, slots=True)
class Moments:
    """One parameter's moments, exact and as they would be restored, its step count and, if at hand, its gradient."""

    name: str
    first: torch.Tensor
    second: torch.Tensor
    restored_first: torch.Tensor
    restored_second: torch.Tensor
    step: int
    gradient: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UpdateError:
    """Relative L2 error of the first resumed update: over all parameters, and the worst parameter's."""

    overall: float
    worst: float
    worst_name: str


def drawn_gradient(second: torch.Tensor, step: int, beta2: float) -> torch.Tensor:
    """A gradient whose square is expected to be the bias-corrected second moment; the same at every call."""
    generator = torch.Generator(device=second.device).manual_seed(0)
    noise = torch.randn(second.shape, generator=generator, device=second.device, dtype=torch.float32)
    correction = 1 - beta2 ** max(step, 1)
    return noise * (second.float().clamp_min(0) / correction).sqrt()


def adam_update(
    first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, step: int, adam: Adam
) -> torch.Tensor:
    """The update direction (without learning rate) of the step after `step`, fp32."""
    after = step + 1
    m = adam.beta1 * first.float() + (1 - adam.beta1) * gradient.float()
    v = adam.beta2 * second.float() + (1 - adam.beta2) * gradient.float().square()
    return m / (1 - adam.beta1**after) / ((v / (1 - adam.beta2**after)).sqrt() + adam.eps)


def squared_errors(moments: Moments, adam: Adam) -> torch.Tensor:
    """fp64 [2] on the moments' device: ||u_restored - u||**2 and ||u||**2."""
    gradient = moments.gradient
    if gradient is None:
        gradient = drawn_gradient(moments.second, moments.step, adam.beta2)
    exact = adam_update(moments.first, moments.second, gradient, moments.step, adam)
    restored = adam_update(moments.restored_first, moments.restored_second, gradient, moments.step, adam)
    return torch.stack([(restored - exact).double().square().sum(), exact.double().square().sum()])


def first_update_error(parameters: Iterable[Moments], adam: Adam | None = None) -> UpdateError | None:
    """Error over all parameters; None where there are none. A non-finite update counts as an infinite error."""
    names, sums = [], []
    for moments in parameters:
        names.append(moments.name)
        sums.append(squared_errors(moments, adam or Adam()).cpu())
    return combine(names, torch.stack(sums)) if sums else None


def combine(names: list[str], sums: torch.Tensor) -> UpdateError:
    """The errors of parameters from their `squared_errors`, [n, 2] on the CPU."""
    relative = (sums[:, 0] / sums[:, 1].clamp_min(1e-300)).sqrt()
    relative = torch.where(sums[:, 0] == 0, torch.zeros_like(relative), relative)
    relative = torch.where(torch.isfinite(sums).all(1), relative, torch.full_like(relative, float("inf")))
    total = sums.sum(0)
    overall = (total[0] / total[1].clamp_min(1e-300)).sqrt() if bool(torch.isfinite(total).all()) else float("inf")
    at = int(relative.argmax())
    return UpdateError(float(overall) if float(total[0]) else 0.0, float(relative[at]), names[at])

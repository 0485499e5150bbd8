"""Functions with known compile events; their line numbers are read from the source by the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def prints(x: Tensor) -> Tensor:
    """Breaks the graph once, at the print."""
    y = torch.sin(x) * 2
    print("", end="")  # the break
    return torch.relu(y)


def refused(x: Tensor) -> Tensor:
    """A break inside a context manager within a loop: Dynamo leaves the frame to eager."""
    for _ in range(2):
        with torch.no_grad():
            x = x + 1
            print("", end="")  # the refusal
    return x


def scaled(x: Tensor, factor: float) -> Tensor:
    """Recompiles when x changes its dtype."""
    return x * factor + 1

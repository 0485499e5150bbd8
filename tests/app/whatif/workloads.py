"""A user's workload for real legs: two small layers, a sleep of known length, and a size that dies."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

SLEEP_S = {"tiny": 0.02, "slow": 0.03, "dies": 0.02}


def make(ctx: Any) -> tuple[nn.Module, Any, Any]:
    """(model, batches, loss); `size` chooses how long a batch takes to come."""
    torch.manual_seed(ctx.seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))

    def batches(step: int) -> torch.Tensor:
        if ctx.size == "dies" and step >= 2:
            os._exit(9)
        time.sleep(SLEEP_S[ctx.size])
        generator = torch.Generator().manual_seed(1000 * ctx.seed + step)
        return torch.randn(8, 16, generator=generator)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(batch).square().mean()
        return out

    return model, batches, loss

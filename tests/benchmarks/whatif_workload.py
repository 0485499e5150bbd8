"""A user's workload whose steps can be made slower by an exact share: the benchmark of the what-if engine runs it.

`size` says by how much: "none", "same" (also nothing), or "plus3" for 3 %. The delay is a real wait before the batch
comes, that share of the time the step before took without it, so the true slow-down is the share on any machine.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


def make(ctx: Any) -> tuple[nn.Module, Any, Any]:
    """(model, batches, loss) of a perceptron whose step takes some 10 ms on two CPU cores, some 8 ms on a large GPU."""
    torch.manual_seed(ctx.seed)
    on_gpu = ctx.device.type == "cuda"
    width, depth, rows = (2048, 4, 3072) if on_gpu else (256, 4, 512)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    share = float(ctx.size.removeprefix("plus")) / 100 if ctx.size.startswith("plus") else 0.0
    x = torch.randn(rows, width, device=ctx.device)
    before: list[float] = []

    def batches(_step: int) -> torch.Tensor:
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if before:
            wait(now, share * (now - before[0]))
        before[:] = [time.perf_counter()]
        return x

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out

    return nn.Sequential(*layers), batches, loss


def wait(begin: float, seconds: float) -> None:
    """Return exactly `seconds` after `begin`: sleep for most of it, then watch the clock, since sleeps overrun."""
    if seconds > 0.001:
        time.sleep(seconds - 0.001)
    while time.perf_counter() < begin + seconds:
        pass

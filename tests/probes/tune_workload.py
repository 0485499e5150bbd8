"""A user's workload of functional code: nothing in it can be swapped as a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.probes.workloads.base import Workload, WorkloadContext


class Block(nn.Module):
    """Residual addition, RMSNorm and SwiGLU, all written out over plain parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Parameter(torch.randn(4 * width, width) * 0.1)
        self.down = nn.Parameter(torch.randn(width, 2 * width) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream, what is to be added to it)."""
        h = x + y
        wide = h.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(h) * self.scale
        gate, up = F.linear(normed, self.up).chunk(2, -1)
        return h, F.linear(F.silu(gate) * up, self.down)


class Model(nn.Module):
    """Three blocks and a mean."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to the same."""
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


def make(context: WorkloadContext) -> Workload:
    """The workload."""
    torch.manual_seed(context.seed)
    data = torch.randn(4, 8, 16).to(context.device)
    if context.dtype != torch.float32:
        data = data.to(context.dtype)
    return Workload(
        model=Model(), batch=lambda _step: data, loss=lambda model, x: model(x).float().square().mean(),
        blocks=[f"blocks.{i}" for i in range(3)],
    )  # fmt: skip


def broken(context: WorkloadContext) -> Workload:
    """A workload whose step fails."""
    found = make(context)

    def loss(_model: nn.Module, _batch: Tensor) -> Tensor:
        raise RuntimeError("no step\ntoday")

    return Workload(model=found.model, batch=found.batch, loss=loss, blocks=found.blocks)

"""Element types as many scripts mix them: fp32 targets in the loss, a product taken in fp32 on the way."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer((self.inner(x).float() * 2).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def make(ctx):
    return Model(), lambda _step: (torch.randn(4, 8), torch.randn(4, 8)), loss


def wide(ctx):
    """A loss that takes fp32 only, as the backward pass of mse_loss does on a GPU."""

    def only_fp32(model, batch):
        out = model(batch[0])
        if out.dtype != torch.float32:
            raise TypeError(f"the model gave {out.dtype}")
        return F.mse_loss(out, batch[1])

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, make(ctx)[1], only_fp32

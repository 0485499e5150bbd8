"""Frozen Linears with adapters that train, in blocks, between a stem that trains and a frozen head."""

import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, repeats=1):
        super().__init__()
        self.repeats = repeats
        self.stem = nn.Linear(16, 16)  # FSDP2 keeps a block gathered whose input needs no gradient
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            for _ in range(self.repeats):
                x = layer(x)
        return self.head(x)


def make(ctx):
    return Model(), lambda _step: torch.ones(4, 16), lambda m, x: m(x).square().mean()


def twice(ctx):
    return Model(), lambda _step: torch.ones(4, 16), lambda m, x: (m(x) - m(-x)).square().mean()


def again(ctx):
    return Model(repeats=2), lambda _step: torch.ones(4, 16), lambda m, x: m(x).square().mean()

"""Models on the meta device, as those are made that no rank could hold whole."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x + self.gain * self.narrow(torch.tanh(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Initialised(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.125)
        self.scale.fill_(2.0)


class Sharded(Initialised):
    def init_weights(self):
        for parameter in self.parameters():
            assert isinstance(parameter, DTensor), "whole"
            assert parameter.to_local().numel() < parameter.numel(), "whole"
        super().init_weights()


def parts(model, ctx):
    generator = torch.Generator().manual_seed(ctx.rank)

    def batch(_step):
        x = torch.randint(0, 32, (4, 8), generator=generator)
        return x, x.roll(1, 1)

    return model, batch, lambda m, b: nn.functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())


def make(ctx):
    with torch.device("meta"):
        return parts(Model(), ctx)


def tied(ctx):
    with torch.device("meta"):
        return parts(Model(tied=True), ctx)


def initialised(ctx):
    with torch.device("meta"):
        return parts(Initialised(), ctx)


def sharded(ctx):
    with torch.device("meta"):
        return parts(Sharded(), ctx)

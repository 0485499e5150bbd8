"""A workload whose warm-up leaves old garbage, and which fails if a timed step still finds it."""

import gc
import weakref

import torch
from torch import nn


class Node:
    def __init__(self):
        self.me = self


held = [Node() for _ in range(100)]
seen = weakref.ref(held[0])


def make(ctx):
    def batch(step):
        if step == 2:  # the last before the timed ones
            gc.collect()  # what survives is left to full collections
            held.clear()
        if step >= 3 and seen() is not None:
            raise RuntimeError("the garbage of the warm-up is still there")
        return torch.ones(4, 8)

    return nn.Linear(8, 1), batch, lambda m, x: m(x).square().mean()

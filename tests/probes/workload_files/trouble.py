"""Small workloads that fail in one chosen way, as a user's file might."""

import os
import signal
import sys
import time

import torch
from torch import nn


def _make(ctx, trouble):
    def loss(model, batch):
        if loss.calls >= 3 and ctx.rank == int(os.environ.get("TROUBLE_RANK", "0")):
            trouble()
        loss.calls += 1
        return model(batch).square().mean()

    loss.calls = 0
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, lambda _step: torch.randn(4, 8), loss


def _sleep():
    time.sleep(3600)


def _raise():
    raise ValueError("the data on shard 7 is empty")


def _oom():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fine(ctx):
    return _make(ctx, lambda: None)


def killed(ctx):
    return _make(ctx, lambda: os.kill(os.getpid(), signal.SIGKILL))


def segfault(ctx):
    return _make(ctx, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def exits(ctx):
    return _make(ctx, lambda: os._exit(17))


def raises(ctx):
    return _make(ctx, _raise)


def out_of_memory(ctx):
    return _make(ctx, _oom)


def hangs(ctx):
    return _make(ctx, _sleep)


def raises_in_make(ctx):
    return {}["missing"]


def wrong_shape_of_result(ctx):
    return 42


def quits(ctx):
    sys.exit("the licence server said no")

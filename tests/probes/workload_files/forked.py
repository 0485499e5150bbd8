"""Workloads that only work where their process was not forked from a template, as a spoilt driver would have it."""

import os
import signal
import sys

from trouble import fine


def _forked():
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name.endswith("probes.template")


def raises(ctx):
    if _forked():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    return fine(ctx)


def killed(ctx):
    if _forked():
        os.kill(os.getpid(), signal.SIGSEGV)
    return fine(ctx)


def killed_late(ctx):
    model, batch, loss = fine(ctx)

    def counted(model, data):
        counted.calls += 1
        if counted.calls > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, data)

    counted.calls = 0
    return model, batch, counted

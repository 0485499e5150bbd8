"""What `load_experiment.py` uses of a GPU, by main memory, so that the script can be tried without one."""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import torch

from costlab.kernels.codec import device_load

now = time.perf_counter


class PlainStream:
    """A stream of a device on which everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PlainEvent:
    """An event on such a device, with its time."""

    cuda_event = 0

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = now()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: PlainEvent) -> float:
        return (other.at - self.at) * 1e3


class PlainCopies:
    """`htod.Copies` by memmove."""

    def __init__(self, *_: Any) -> None:
        self.stream = PlainStream()
        self._keep = self._let_go = None

    def enter(self) -> None:
        pass

    def enqueue(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def event(self) -> PlainEvent:
        return PlainEvent()

    def record(self, event: PlainEvent) -> None:
        event.record()

    def done(self, event: PlainEvent) -> bool:  # noqa: ARG002
        return True

    def wait(self, event: PlainEvent) -> None:
        pass


def without_gpu() -> Any:
    """Put main memory in the device's place; what stands for `htod.Copies`."""
    empty = torch.empty
    module: Any = torch
    module.empty = lambda *a, pin_memory=False, **k: empty(*a, **k)  # noqa: ARG005, PLW0108
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = PlainStream, PlainEvent
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = lambda _=None: PlainStream()
    cuda.synchronize = lambda _=None: None
    cuda.current_device = lambda: 0
    loading: Any = device_load
    loading.Copies = PlainCopies
    return PlainCopies

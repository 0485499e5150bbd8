"""Copies from pinned memory to the GPU, enqueued through the driver by threads that keep the interpreter meanwhile.

torch lets go of the interpreter in every call. Sixteen threads that each make a few calls of some microseconds then
wait for it at every one, longer than the calls take. Enqueuing doesn't wait for the device, so nothing is lost here by
keeping the interpreter; waiting for a copy lets go of it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from costlab.kernels.codec.errors import CheckpointError


@cache
def _driver(keep: bool) -> Any:
    """The driver's library; with `keep` its functions are called without letting go of the interpreter."""
    library: Any = (ctypes.PyDLL if keep else ctypes.CDLL)("libcuda.so.1")
    handle, size = ctypes.c_void_p, ctypes.c_size_t
    library.cuMemcpyHtoDAsync_v2.argtypes = (handle, handle, size, handle)
    library.cuEventRecord.argtypes = (handle, handle)
    library.cuEventQuery.argtypes = library.cuEventSynchronize.argtypes = (handle,)
    library.cuStreamGetCtx.argtypes = (handle, handle)
    library.cuCtxSetCurrent.argtypes = (handle,)
    return library


def _done(code: int, what: str) -> None:
    if code:
        raise CheckpointError(f"{what} failed: CUDA driver error {code}")


class Copies:
    """Copies on one stream of a device, from any thread that has called `enter`. Raises `CheckpointError`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._handle = self.stream.cuda_stream
        self._keep, self._let_go = _driver(keep=True), _driver(keep=False)
        context = ctypes.c_void_p()
        _done(self._keep.cuStreamGetCtx(self._handle, ctypes.byref(context)), "finding the stream's context")
        self._context = context.value

    def enter(self) -> None:
        """Make the device's context the calling thread's: torch does so only in calls that go through it."""
        _done(self._keep.cuCtxSetCurrent(self._context), "entering the device's context")

    def enqueue(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes from an address in pinned memory to one on the device, in the order of the stream."""
        _done(self._keep.cuMemcpyHtoDAsync_v2(target, source, size, self._handle), "a copy to the device")

    def event(self) -> torch.cuda.Event:
        """An event for `record` and `wait`; waiting for it sleeps, as spinning would take a core from the readers."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)  # torch makes the event itself now
        return event

    def record(self, event: torch.cuda.Event) -> None:
        """The event comes when all copies enqueued so far are done."""
        _done(self._keep.cuEventRecord(event.cuda_event, self._handle), "recording an event")

    def done(self, event: torch.cuda.Event) -> bool:
        """Whether the copies before the event are done."""
        return not self._keep.cuEventQuery(event.cuda_event)

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the copies before the event are done."""
        if not self.done(event):
            _done(self._let_go.cuEventSynchronize(event.cuda_event), "copies to the device")

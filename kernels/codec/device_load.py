"""From page cache or disk to the GPU: several threads read into pinned buffers, check them and copy, each on
its own stream.

The pages of a mapped file aren't pinned, so the driver would copy them through a small buffer of its own. Here the
bytes are read into pinned buffers that stay warm, at the speed of several threads together; the copies overlap the
reads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import torch

from costlab.kernels.codec.container import Container
from costlab.kernels.codec.layout import Entry

PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Fill `target` (uint8 [entry.length], contiguous, on a CUDA device) with the extent of `entry`."""

    container: Container
    entry: Entry
    target: torch.Tensor


def default_threads() -> int:
    """Reader threads: the machine's cores, at most 16."""
    return min(16, os.cpu_count() or 1)


def cut(entry: Entry) -> list[tuple[int, int]]:
    """(start, end) of the pieces of an extent, cut where a multiple of 16 MiB in the file does."""
    starts = [0, *range(PIECE - entry.offset % PIECE, entry.length, PIECE)]
    return list(zip(starts, [*starts[1:], entry.length], strict=True))


class DeviceLoader:
    """Reader threads with two pinned buffers of 16 MiB each; keep one for several loads. Raises `CheckpointError`."""

    def __init__(self, device: torch.device, threads: int | None = None, verify: bool = True) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.verify = torch.device("cuda", index), verify
        self.threads = threads or default_threads()
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="checkpoint-load")
        self._local = threading.local()

    def load(self, jobs: Sequence[Job]) -> None:
        """Fill all targets; they are complete when this returns."""
        pieces = deque((job, start, end) for job in jobs for start, end in cut(job.entry))
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        work = [self._executor.submit(self._drain, pieces, ready) for _ in range(min(self.threads, len(pieces)))]
        errors = [error for future in work if (error := future.exception())]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _resources(self) -> tuple[torch.cuda.Stream, list[tuple[torch.Tensor, torch.cuda.Event]]]:
        """This thread's stream and pinned buffers, made at its first piece."""
        if not hasattr(self._local, "resources"):
            torch.cuda.set_device(self.device)
            buffers = [(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
            self._local.resources = torch.cuda.Stream(self.device), buffers
        found: tuple[torch.cuda.Stream, list[tuple[torch.Tensor, torch.cuda.Event]]] = self._local.resources
        return found

    def _drain(self, pieces: deque[tuple[Job, int, int]], ready: torch.cuda.Event) -> None:
        stream, buffers = self._resources()
        stream.wait_event(ready)
        for buffer, copied in cycle(buffers):
            try:
                job, start, end = pieces.popleft()
            except IndexError:
                break
            copied.synchronize()
            job.container.read_into(job.entry, start, buffer.numpy()[: end - start], self.verify)
            with torch.cuda.stream(stream):
                job.target[start:end].copy_(buffer[: end - start], non_blocking=True)
            copied.record(stream)
        stream.synchronize()

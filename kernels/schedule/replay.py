"""Work that is recorded once as a CUDA graph and replayed: a call of many launches then costs the host one.

A two-shot in two chunks launches 13 kernels and copies, which take the host longer than the GPU at 64 MiB.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from costlab.kernels.schedule import compat

Work = Callable[[Tensor], None]
Run = Callable[[], None]
Record = Callable[[Work, Tensor], Run]

AFTER = 2  # calls with a tensor before it is worth a recording: one that does not come again is not
KEPT = 64  # tensors remembered for one work


@dataclass
class _Place:
    """A tensor that was seen: its storage, how often, and the recording of its call."""

    storage: Any
    calls: int = 0
    run: Run | None = None


class Replayed:
    """Does `work`, from a recording once a tensor has come more than AFTER times.

    A recording holds addresses, so it serves one place in memory and ends with the storage there. What reaches the
    device is the same with and without, so ranks need not agree. While the caller captures a graph of its own, the
    work is launched into that one.
    """

    def __init__(self, work: Work, record: Record) -> None:
        self._work = work
        self._record: Record | None = record
        self._places: dict[int, _Place] = {}

    def __call__(self, flat: Tensor) -> None:
        """Do the work on `flat`."""
        run = self._recorded(flat)
        if run is None:
            self._work(flat)
        else:
            run()

    def _recorded(self, flat: Tensor) -> Run | None:
        if self._record is None or (flat.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        place = self._places.get(flat.data_ptr())
        if place is None or place.storage.expired():
            place = self._remember(flat)
        place.calls += 1
        if place.run is None and place.calls > AFTER:
            place.run = self._try(self._record, flat)
        return place.run

    def _remember(self, flat: Tensor) -> _Place:
        self._places.pop(flat.data_ptr(), None)
        if len(self._places) >= KEPT:
            self._places = {at: place for at, place in self._places.items() if not place.storage.expired()}
        if len(self._places) >= KEPT:
            del self._places[next(iter(self._places))]
        place = self._places[flat.data_ptr()] = _Place(compat.storage_reference(flat))
        return place

    def _try(self, record: Record, flat: Tensor) -> Run | None:
        """The recording; None, and no further attempt, if it fails: the peers wait for this call either way."""
        try:
            return record(self._work, flat)
        except RuntimeError as error:
            self._record = None
            warnings.warn(f"an all-reduce could not be recorded, its calls stay slower: {error}", stacklevel=2)
            return None


class Recorder:
    """Records work as a CUDA graph, on a stream of its own; nothing runs meanwhile."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, work: Work, flat: Tensor) -> Run:
        """What replays the work on `flat` on the current stream.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        if self._stream is None:
            self._stream = compat.urgent_stream(flat.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # only this thread is held to what a capture allows: NCCL's watchdog queries events meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work(flat)
            finally:
                graph.capture_end()
        replay: Run = graph.replay
        return replay

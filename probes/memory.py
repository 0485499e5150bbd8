"""Peak and current memory by phase: the device allocator's counters and this process's resident set.

Both peaks are counters that can only be read and reset, and a reset loses what came before. `PeakWindows` lets
windows nest (a phase, and a compile within it): every reset first folds the reading into all open windows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from costlab.probes.records import MemoryRow

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def host_bytes(field: str, status: Path = STATUS) -> int | None:
    """`VmHWM` (peak) or `VmRSS` (now) of a process in bytes, None where the kernel does not tell."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def reset_host_peak() -> bool:
    """Set VmHWM back to the present resident set (proc(5), clear_refs 5); False where that is not allowed."""
    try:
        CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


@dataclass(eq=False)
class Window:
    """One open measurement; `peak` holds the largest reading seen so far."""

    started: tuple[int, ...]
    peak: tuple[int, ...] | None = None


class PeakWindows:
    """Nested windows over peak counters that can only be read and reset.

    `read` returns the counters (None: not available), `reset` whether it could reset them. Without a reset a
    window's peak is known only when the counter rose within it, and is None otherwise.
    """

    def __init__(self, read: Callable[[], tuple[int, ...] | None], reset: Callable[[], bool]) -> None:
        self._read = read
        self._reset = reset
        self._open: list[Window] = []
        self._lock = threading.Lock()
        self._resettable = True

    def open(self) -> Window | None:
        """Start a window, or return None where there is no counter."""
        with self._lock:
            self._fold()
            self._resettable = self._reset()
            started = self._read()
            if started is None:
                return None
            window = Window(started)
            self._open.append(window)
            return window

    def close(self, window: Window | None) -> tuple[int, ...] | None:
        """End the window and return its peaks; None where they could not be had."""
        if window is None:
            return None
        with self._lock:
            self._fold()
            self._open.remove(window)
            if not self._resettable and window.peak == window.started:
                return None
            return window.peak

    def _fold(self) -> None:
        now = self._read()
        if now is None:
            return
        for window in self._open:
            window.peak = now if window.peak is None else tuple(map(max, window.peak, now))


@cache
def host_peaks() -> PeakWindows:
    """The process-wide windows over VmHWM."""

    def read() -> tuple[int, ...] | None:
        peak = host_bytes("VmHWM")
        return None if peak is None else (peak,)

    return PeakWindows(read, reset_host_peak)


@cache
def device_peaks(index: int) -> PeakWindows:
    """The process-wide windows over a CUDA device's (allocated, reserved) peaks."""
    import torch

    def read() -> tuple[int, ...]:
        return torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)

    def reset() -> bool:
        torch.cuda.reset_peak_memory_stats(index)
        return True

    return PeakWindows(read, reset)


def cuda_index(device: torch.device) -> int | None:
    """Index of a CUDA device, None for any other kind."""
    import torch

    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


class MemoryProbe:
    """Memory of named phases on one device; a phase entered twice keeps the larger peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = cuda_index(device)
        self._rows: dict[str, MemoryRow] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peaks of the enclosed work; costs two file reads and two allocator calls."""
        host = host_peaks().open()
        device = None if self._device is None else device_peaks(self._device).open()
        try:
            yield
        finally:
            self._record(name, host_peaks().close(host), device)

    def _record(self, name: str, host: tuple[int, ...] | None, device: Window | None) -> None:
        row = MemoryRow(rank=0, phase=name, host_peak=host[0] if host else None)
        if self._device is not None:
            self._add_device(row, self._device, device)
        before = self._rows.get(name)
        if before is not None:
            row.host_peak = _larger(before.host_peak, row.host_peak)
            row.allocated_peak = _larger(before.allocated_peak, row.allocated_peak)
            row.reserved_peak = _larger(before.reserved_peak, row.reserved_peak)
        self._rows[name] = row

    def _add_device(self, row: MemoryRow, index: int, window: Window | None) -> None:
        import torch

        peaks = device_peaks(index).close(window)
        if peaks is not None:
            row.allocated_peak, row.reserved_peak = peaks
        row.allocated = torch.cuda.memory_allocated(index)
        row.device_total = torch.cuda.mem_get_info(index)[1]

    def rows(self, rank: int) -> list[MemoryRow]:
        """One row per phase, in the order of first entry."""
        for row in self._rows.values():
            row.rank = rank
        return list(self._rows.values())


def _larger(a: int | None, b: int | None) -> int | None:
    known = [v for v in (a, b) if v is not None]
    return max(known, default=None)

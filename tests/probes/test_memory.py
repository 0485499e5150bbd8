"""Nested peak windows against brute force, and real peaks of this process."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costlab.probes.memory import MemoryProbe, PeakWindows, Window, host_bytes, reset_host_peak

MIB = 1 << 20


class Meter:
    """A gauge whose peak can only be read and reset, like VmHWM."""

    def __init__(self, resettable: bool = True) -> None:
        self.now = 0
        self.peak = 0
        self.resettable = resettable

    def set(self, value: int) -> None:
        self.now = value
        self.peak = max(self.peak, value)

    def read(self) -> tuple[int, ...]:
        return (self.peak,)

    def reset(self) -> bool:
        if self.resettable:
            self.peak = self.now
        return self.resettable


ACTIONS = st.lists(st.one_of(st.integers(0, 1000), st.sampled_from(["open", "close"])), max_size=40)


@given(ACTIONS)
def test_every_nested_window_sees_its_own_peak(actions: list[int | str]) -> None:
    meter = Meter()
    windows = PeakWindows(meter.read, meter.reset)
    stack: list[tuple[Window, list[int]]] = []
    for action in [*actions, *["close"] * len(actions)]:
        if action == "open":
            window = windows.open()
            assert window is not None
            stack.append((window, [meter.now]))
        elif action == "close":
            if stack:
                window, seen = stack.pop()
                assert windows.close(window) == (max(seen),)
        elif isinstance(action, int):
            meter.set(action)
            for _, seen in stack:
                seen.append(action)


def test_windows_may_close_in_any_order() -> None:
    meter = Meter()
    windows = PeakWindows(meter.read, meter.reset)
    outer, meter.now = windows.open(), 0
    meter.set(50)
    inner = windows.open()
    meter.set(20)
    assert windows.close(outer) == (50,)
    meter.set(30)
    assert windows.close(inner) == (50,)


def test_without_a_reset_only_a_peak_that_rose_is_known() -> None:
    meter = Meter(resettable=False)
    meter.set(100)
    windows = PeakWindows(meter.read, meter.reset)
    quiet = windows.open()
    meter.set(80)
    assert windows.close(quiet) is None
    loud = windows.open()
    meter.set(120)
    assert windows.close(loud) == (120,)


def test_a_missing_counter_yields_none() -> None:
    windows = PeakWindows(lambda: None, lambda: False)
    assert windows.close(windows.open()) is None


def test_host_bytes_reads_the_status_format(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  500 kB\nVmRSS:\t  300 kB\n")
    assert host_bytes("VmHWM", status) == 500 * 1024
    assert host_bytes("VmRSS", status) == 300 * 1024
    assert host_bytes("VmSwap", status) is None
    assert host_bytes("VmHWM", tmp_path / "absent") is None


@pytest.mark.skipif(not reset_host_peak(), reason="this kernel does not let a process reset its peak")
def test_a_phase_owns_only_its_own_peak() -> None:
    probe = MemoryProbe(torch.device("cpu"))
    with probe.phase("large"):
        with mmap.mmap(-1, 200 * MIB) as area:
            area.write(b"x" * (200 * MIB))
            with probe.phase("inner"):
                pass
    with probe.phase("small"):
        pass
    large, inner, small = (next(r for r in probe.rows(3) if r.phase == n) for n in ("large", "inner", "small"))
    assert large.host_peak and inner.host_peak and small.host_peak
    assert large.host_peak - small.host_peak > 150 * MIB
    assert inner.host_peak - small.host_peak > 150 * MIB
    assert large.rank == 3
    assert large.allocated_peak is None and large.device_total is None


def test_a_phase_entered_twice_keeps_the_larger_peak() -> None:
    probe = MemoryProbe(torch.device("cpu"))
    with probe.phase("compile"):
        with mmap.mmap(-1, 100 * MIB) as area:
            area.write(b"x" * (100 * MIB))
    first = probe.rows(0)[0].host_peak
    with probe.phase("compile"):
        pass
    assert [r.host_peak for r in probe.rows(0)] == [first]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_device_peaks_by_phase() -> None:
    device = torch.device("cuda", 0)
    probe = MemoryProbe(device)
    with probe.phase("large"):
        block = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        del block
    with probe.phase("small"):
        pass
    large, small = probe.rows(0)
    assert large.allocated_peak is not None and small.allocated_peak is not None
    assert large.allocated_peak - small.allocated_peak >= 256 * MIB
    assert large.device_total and large.reserved_peak and large.reserved_peak >= large.allocated_peak

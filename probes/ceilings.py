"""What this machine can do, measured in this run: matrix multiplication and memory copy.

Figures are medians over repetitions with their sizes stated; they are ceilings for MFU and for bandwidth shares,
not the data sheet's. Operands are random: a GPU multiplying zeros draws less power and clocks higher.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
GPU_MATMUL_N = 8192
GPU_REPEATS = 30
GPU_WARMUP = 10
GPU_COPY_BYTES = 4 * GIB
CPU_BUDGET_S = 0.6  # of one measurement, so that both together stay below 2 s
CPU_MATMUL_N = 1024
CPU_COPY_BYTES = 256 << 20


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """TFLOP/s of a square `dtype` matrix product (2 n^3 operations), and how it was measured."""
    n = _matmul_size(device, dtype)
    times = _matmul_times(device, dtype, n)
    _release(device)
    name = str(dtype).removeprefix("torch.")
    method = (
        f"{n} x {n} x {n} {name} matrix product of random values, median of {len(times)}{_fp32_note(device, dtype)}"
    )
    return 2 * n**3 / median(times) / 1e9, method


def _matmul_times(device: torch.device, dtype: torch.dtype, n: int) -> list[float]:
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
    b = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
    out = torch.empty(n, n, device=device, dtype=dtype)
    return _times(lambda: torch.mm(a, b, out=out), device)


def copy_gbps(device: torch.device) -> tuple[float, str]:
    """GB/s of a copy within the device's memory, bytes read plus bytes written, and how it was measured."""
    size = _copy_bytes(device)
    times = _copy_times(device, size)
    _release(device)
    where = "device to device" if device.type == "cuda" else "within host memory, without write-allocate traffic"
    method = f"copy of {size / GIB:.2f} GiB {where}, read + write, median of {len(times)}"
    return 2 * size / median(times) / 1e6, method


def _copy_times(device: torch.device, size: int) -> list[float]:
    import torch

    source = torch.empty(size // 4, device=device, dtype=torch.int32).random_()
    target = torch.zeros_like(source)
    return _times(lambda: target.copy_(source), device)


def _matmul_size(device: torch.device, dtype: torch.dtype) -> int:
    import torch

    if device.type != "cuda":
        return CPU_MATMUL_N
    n = GPU_MATMUL_N
    free = torch.cuda.mem_get_info(device)[0]
    while n > 1024 and 3 * n * n * dtype.itemsize > free // 2:
        n //= 2
    return n


def _copy_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 4
        return max(min(GPU_COPY_BYTES, room), 1 << 20) // 4096 * 4096
    import psutil

    room = psutil.virtual_memory().available // 8
    return max(min(max(CPU_COPY_BYTES, 4 * last_level_cache()), room), 1 << 20) // 4096 * 4096


def last_level_cache(root: Path = Path("/")) -> int:
    """Bytes of one CPU's largest cache, 0 where the kernel does not tell."""
    sizes = [0]
    for file in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"):
        text = file.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdigit() else 0)
    return max(sizes)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Milliseconds of each repetition."""
    return _cuda_times(work, device) if device.type == "cuda" else _host_times(work)


def _cuda_times(work: Callable[[], object], device: torch.device) -> list[float]:
    import torch

    with torch.cuda.device(device):
        for _ in range(GPU_WARMUP):
            work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(GPU_REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _host_times(work: Callable[[], object]) -> list[float]:
    work()
    times: list[float] = []
    end = time.perf_counter() + CPU_BUDGET_S
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _release(device: torch.device) -> None:
    """Give the operands back, so that they do not show in the workload's memory peaks."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fp32_note(device: torch.device, dtype: torch.dtype) -> str:
    import torch

    if dtype != torch.float32 or device.type != "cuda":
        return f", {torch.get_num_threads()} threads" if device.type != "cuda" else ""
    return f', float32 matmul precision "{torch.get_float32_matmul_precision()}"'

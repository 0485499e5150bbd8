"""What the topology benchmark is compared with, with nothing of costlab and no torch in it: the CUDA driver's own
copies by `ctypes` and the wall clock, and the machine's facts from `nvidia-smi` and sysfs.

    python tests/benchmarks/topology_peers.py HOST_BYTES MEMORY_BYTES   # GB/s as JSON on stdout
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES, COPIES = 7, 8
SYS = Path("/sys")


class Driver:
    """The few calls of libcuda that a copy needs; RuntimeError with the call's name and CUresult."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        self.contexts = [self._context(i) for i in range(count.value)]

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call `name`."""
        code = getattr(self.lib, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUresult {code}")

    def _context(self, index: int) -> ctypes.c_void_p:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def use(self, device: int) -> None:
        """Make a device's context the thread's."""
        self("cuCtxSetCurrent", self.contexts[device])

    def device(self, size: int) -> ctypes.c_uint64:
        """Device memory of the present context, written once."""
        at = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self("cuMemsetD8_v2", at, ctypes.c_ubyte(1), ctypes.c_size_t(size))
        return at

    def host(self, size: int) -> ctypes.c_void_p:
        """Pinned memory, written once."""
        at = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(size), ctypes.c_uint(0))
        ctypes.memset(at, 1, size)
        return at

    def gbps(self, copy: Callable[[], None], moved: int) -> float:
        """Median over batches of copies one after the other, by the wall clock, in 1e9 bytes a second."""
        found = []
        for _ in range(BATCHES + 1):
            self("cuCtxSynchronize")
            start = time.perf_counter()
            for _ in range(COPIES):
                copy()
            self("cuCtxSynchronize")
            found.append(moved * COPIES / (time.perf_counter() - start) / 1e9)
        return statistics.median(found[1:])


def host_copies(driver: Driver, size: int) -> dict[str, float]:
    """Pinned memory to device 0 and back, from every NUMA node's CPUs; the best of them."""
    driver.use(0)
    there, stream, n = driver.device(size), ctypes.c_void_p(), ctypes.c_size_t(size)
    best = {"pcie_host_to_device": 0.0, "pcie_device_to_host": 0.0}
    permitted = os.sched_getaffinity(0)
    for cpus in numa_cpus(permitted):
        os.sched_setaffinity(0, cpus)  # pages of the pinned buffer come from the node that touches them first
        here = driver.host(size)
        up = driver.gbps(lambda here=here: driver("cuMemcpyHtoDAsync_v2", there, here, n, stream), size)
        down = driver.gbps(lambda here=here: driver("cuMemcpyDtoHAsync_v2", here, there, n, stream), size)
        driver("cuMemFreeHost", here)
        for name, value in zip(best, (up, down), strict=True):
            best[name] = max(best[name], value)
    os.sched_setaffinity(0, permitted)
    driver("cuMemFree_v2", there)
    return best


def numa_cpus(permitted: set[int]) -> list[set[int]]:
    """The permitted CPUs of each NUMA node that has some."""
    found = []
    for folder in sorted(SYS.glob("devices/system/node/node[0-9]*")):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", (folder / "cpulist").read_text())
        cpus = {c for a, b in ranges for c in range(int(a), int(b or a) + 1)} & permitted
        found += [cpus] if cpus else []
    return found or [permitted]


def memory_copy(driver: Driver, size: int) -> dict[str, float]:
    """Device memory to itself; bytes read and written."""
    driver.use(0)
    src, dst, stream = driver.device(size), driver.device(size), ctypes.c_void_p()
    copied = driver.gbps(lambda: driver("cuMemcpyDtoDAsync_v2", dst, src, ctypes.c_size_t(size), stream), 2 * size)
    driver("cuMemFree_v2", src)
    driver("cuMemFree_v2", dst)
    return {"device_memory": copied}


def peer_copies(driver: Driver, size: int) -> dict[str, float]:
    """GPU 0 to GPU 1 and back, with peer access."""
    ways = {}
    for a, b in ((0, 1), (1, 0)):
        driver.use(b)
        into = driver.device(size)
        driver.use(a)
        data, stream = driver.device(size), ctypes.c_void_p()
        driver("cuCtxEnablePeerAccess", driver.contexts[b], ctypes.c_uint(0))
        there, here = driver.contexts[b], driver.contexts[a]
        copy = ("cuMemcpyPeerAsync", into, there, data, here, ctypes.c_size_t(size), stream)
        ways[f"nvlink_gpu{a}_to_gpu{b}"] = driver.gbps(lambda copy=copy: driver(*copy), size)
        driver("cuMemFree_v2", data)
        driver.use(b)
        driver("cuMemFree_v2", into)
    return ways


def copies(host_bytes: int, memory_bytes: int) -> dict[str, float]:
    """All of them on this machine."""
    driver = Driver()
    found = {**host_copies(driver, host_bytes), **memory_copy(driver, memory_bytes)}
    return {**found, **peer_copies(driver, host_bytes)} if len(driver.contexts) > 1 else found


def smi(*arguments: str) -> str:
    """What nvidia-smi prints, "" where it is not there or refuses."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpu_facts() -> list[dict[str, Any]]:
    """Of each GPU by nvidia-smi and sysfs: bus id, PCIe maximum, active NVLinks, NUMA node as the kernel has it."""
    fields = "index,pci.bus_id,pcie.link.gen.max,pcie.link.width.max"
    found = []
    for text in smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
        index, bus, generation, width = (part.strip() for part in text.split(","))
        bus = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus.lower())
        links = re.findall(r"^\s*Link \d+: [\d.]+ GB/s", smi("nvlink", "--status", "-i", index), re.MULTILINE)
        file = SYS / "bus/pci/devices" / bus / "numa_node"
        numa = int(file.read_text()) if file.is_file() else None
        found.append({"index": int(index), "bus": bus, "generation": _whole(generation), "width": _whole(width),
                      "nvlinks": len(links), "numa": numa})  # fmt: skip
    return found


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def nvswitches() -> int:
    """NVSwitches that the PCI bus shows: NVIDIA bridges of class 0x0680."""
    devices = SYS.glob("bus/pci/devices/*")
    return sum(
        (d / "vendor").read_text().strip() == "0x10de" and (d / "class").read_text().startswith("0x0680")
        for d in devices
        if (d / "class").is_file()
    )


if __name__ == "__main__":
    print(json.dumps(copies(int(sys.argv[1]), int(sys.argv[2]))))

"""What this machine is, and in words what it lacks. Torch-free. No host, user or path names are recorded.

Functions that read /proc and /sys take `root`, so that they can be tried on a copied tree.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from costlab.probes.nvml import Nvml, visible
from costlab.probes.records import Environment, Gpu

ROOT = Path("/")


def version(distribution: str) -> str | None:
    """Installed version from its metadata, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_model(root: Path = ROOT) -> str:
    """The CPU's name as the kernel reports it, else the architecture."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _cgroup_files(root: Path, controller: str, names: tuple[str, str]) -> list[str]:
    """Contents of a limit's file in this process's cgroup and all above it; v2 and v1 file names."""
    base = root / "sys/fs/cgroup"
    texts: list[str] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        mount, name = (base, names[0]) if not controllers else (base / controller, names[1])
        if controllers and controller not in controllers.split(","):
            continue
        here = Path(path.lstrip("/"))
        texts += [_read(mount / folder / name) for folder in (here, *here.parents)]
    return [t for t in texts if t]


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes this process may use: the machine's memory or the smallest cgroup limit above it."""
    limits: list[int] = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    texts = _cgroup_files(root, "memory", ("memory.max", "memory.limit_in_bytes"))
    limits += [int(t) for t in texts if t.isdigit()]
    return min(limits, default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time the smallest cgroup v2 quota allows, None without a quota."""
    quotas = [t.split() for t in _cgroup_files(root, "cpu", ("cpu.max", "cpu.max"))]
    values = [int(q) / int(p) for q, p in (x for x in quotas if len(x) == 2) if q.isdigit()]
    return min(values, default=None)


def git_commit() -> str | None:
    """Short commit of the working directory's repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _pcie(nvml: Nvml, handle: Any) -> str:
    """ "Gen5 x16 (at most Gen5 x16)"; an idle GPU may have lowered its present generation."""

    def link(generation: str, width: str) -> str:
        g, w = nvml.call(generation, handle), nvml.call(width, handle)
        return f"Gen{g} x{w}" if g and w else ""

    now = link("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")
    most = link("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth")
    return f"{now} (at most {most})" if now and most else now or most


def gpus(nvml: Nvml) -> list[Gpu]:
    """The GPUs this process may use, in CUDA_VISIBLE_DEVICES' order."""
    found: list[Gpu] = []
    for index, (_, handle) in enumerate(visible(nvml.handles(), nvml)):
        memory = nvml.call("nvmlDeviceGetMemoryInfo", handle)
        capability = nvml.call("nvmlDeviceGetCudaComputeCapability", handle)
        limit = nvml.call("nvmlDeviceGetEnforcedPowerLimit", handle)
        found.append(
            Gpu(
                index=index,
                name=nvml.text("nvmlDeviceGetName", handle),
                memory_bytes=None if memory is None else int(memory.total),
                capability=".".join(map(str, capability)) if capability else "",
                pcie=_pcie(nvml, handle),
                power_limit_w=None if limit is None else limit / 1000,
            )
        )
    return found


def _numa_unknown(nvml: Nvml, root: Path) -> bool:
    nodes: list[str] = []
    for _, handle in visible(nvml.handles(), nvml):
        info = nvml.call("nvmlDeviceGetPciInfo", handle)
        if info is None:
            continue
        bus = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
        address = bus.lower()[-12:]  # NVML writes an 8-digit domain, sysfs a 4-digit one
        nodes.append(_read(root / "sys/bus/pci/devices" / address / "numa_node"))
    return any(node in ("", "-1") for node in nodes)


def limits(nvml: Nvml, found: list[Gpu], root: Path = ROOT) -> list[str]:
    """What could not be had on this machine, one sentence each."""
    said: list[str] = []
    if not nvml.available:
        said.append(f"no NVIDIA GPU facts, energy or link states ({nvml.reason})")
    elif not found:
        said.append("no GPU is visible to this process")
    if found and not list((root / "dev").glob("nvidia-fs*")):
        said.append("no GPUDirect Storage driver (nvidia-fs): files go through host memory")
    if not list((root / "sys/class/infiniband").glob("*")):
        said.append("no RDMA network card (InfiniBand, RoCE)")
    if found and _numa_unknown(nvml, root):
        said.append("the GPUs' NUMA node is not told (sysfs says -1): local and remote memory cannot be told apart")
    quota, cpus = cpu_quota(root), len(os.sched_getaffinity(0))
    if quota is not None and quota < cpus:
        said.append(f"a cgroup limits this process to {quota:g} CPUs' worth of time of the {cpus} it sees")
    return said


def machine(root: Path = ROOT, nvml: Nvml | None = None) -> Environment:
    """Everything that can be told without torch."""
    session = nvml or Nvml()
    found = gpus(session)
    env = Environment(
        costlab=version("costlab") or "",
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        cpu=cpu_model(root),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=memory_limit(root),
        torch=version("torch") or "",
        triton=version("triton"),
        driver=session.text("nvmlSystemGetDriverVersion") or None,
        gpus=found,
        git=git_commit(),
        limits=limits(session, found, root),
    )
    if nvml is None:
        session.close()
    return env

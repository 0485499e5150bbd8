"""What `costlab doctor` says: each prerequisite, whether it is there, and what its absence means. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from costlab.probes.nvml import Nvml, visible

Status = Literal["ok", "warn", "missing"]
Line = tuple[str, Status, str]

ROOT = Path("/")
GIB = 1 << 30
LEAST_TORCH = (2, 11)
TRIED_TORCH = ("2.11", "2.13")
SMALL_SHM = GIB
SMALL_DISK = 20 * GIB
NCCL_HARMLESS = {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"}


def doctor_lines(run_home: Path | None = None, root: Path = ROOT, nvml: Nvml | None = None) -> list[Line]:
    """(check, status, sentence) for every prerequisite, in reading order."""
    session = nvml or Nvml()
    lines = [
        *_software(),
        *_gpus(session),
        *_host(run_home or Path.cwd(), root),
        *_links(bool(session.handles()), root),
        *_settings(),
        *_terminal(),
    ]
    if nvml is None:
        session.close()
    return lines


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _software() -> Iterator[Line]:
    torch = _version("torch")
    if torch is None:
        yield "torch", "missing", "PyTorch is not installed here: runs cannot be recorded, stored ones can be opened."
    elif tuple(int(p) for p in torch.split("+")[0].split(".")[:2] if p.isdigit()) < LEAST_TORCH:
        yield "torch", "missing", f"PyTorch {torch} is older than 2.11, the least that costlab runs on."
    elif torch.startswith(TRIED_TORCH):
        yield "torch", "ok", f"PyTorch {torch}."
    else:
        tried = " and ".join(TRIED_TORCH)
        yield "torch", "warn", f"PyTorch {torch}: costlab was tried on {tried}; the fusion pane may show unknown."
    triton = _version("triton")
    text = f"Triton {triton}." if triton else "Triton is not installed: Inductor cannot compile for a GPU."
    yield "triton", "ok" if triton else "warn", text
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), "")
    if compiler and shutil.which(compiler):
        yield "C++ compiler", "ok", f"{Path(compiler).name} is there for Inductor's CPU code."
    else:
        yield "C++ compiler", "missing", "No g++ or clang++: torch.compile on CPU fails; install one or set CXX."


def _gpus(nvml: Nvml) -> Iterator[Line]:
    if not nvml.available:
        yield "GPU", "warn", f"No NVIDIA GPU to be seen ({nvml.reason}): runs use the CPU."
        return
    everything = nvml.handles()
    seen = visible(everything, nvml)
    driver = nvml.text("nvmlSystemGetDriverVersion") or "unknown"
    names = ", ".join(dict.fromkeys(nvml.text("nvmlDeviceGetName", handle) for _, handle in seen))
    if seen:
        yield "GPU", "ok", f"{len(seen)} x {names}, driver {driver}."
    else:
        yield "GPU", "warn", f"Driver {driver} is there but no GPU is visible to this process: runs use the CPU."
        return
    if len(seen) < len(everything):
        text = f"CUDA_VISIBLE_DEVICES leaves {len(seen)} of {len(everything)} GPUs."
        yield "CUDA_VISIBLE_DEVICES", "warn", text
    if nvml.call("nvmlDeviceGetTotalEnergyConsumption", seen[0][1]) is None:
        yield "energy counter", "warn", "This GPU has no energy counter: runs carry no energy figure."
    else:
        yield "energy counter", "ok", "NVML's energy counter answers."


def _host(run_home: Path, root: Path) -> Iterator[Line]:
    shm = _free(root / "dev/shm")
    if shm is None:
        yield "/dev/shm", "warn", "No /dev/shm: shared-memory checkpoint staging and gloo may fail."
    elif shm < SMALL_SHM:
        text = f"{shm / GIB:.2f} GiB free in /dev/shm: shared-memory staging may fail; in Docker set --shm-size."
        yield "/dev/shm", "warn", text
    else:
        yield "/dev/shm", "ok", f"{shm / GIB:.1f} GiB free in /dev/shm."
    disk = _free(run_home)
    if disk is None:
        yield "disk", "warn", "The run folder's file system does not tell its free space."
    elif disk < SMALL_DISK:
        text = f"{disk / GIB:.1f} GiB free where runs are stored: checkpoint tests of large models are left out."
        yield "disk", "warn", text
    else:
        yield "disk", "ok", f"{disk / GIB:.0f} GiB free where runs are stored."
    nodes = [n for n in (root / "sys/devices/system/node").glob("node[0-9]*") if n.is_dir()]
    if nodes:
        text = "one NUMA node: memory is equally near everywhere." if len(nodes) == 1 else f"{len(nodes)} NUMA nodes."
        yield "NUMA", "ok", text[0].upper() + text[1:]
    else:
        yield "NUMA", "warn", "The kernel does not show NUMA nodes: placement cannot be judged."


def _free(path: Path) -> int | None:
    """Free bytes at `path` or its nearest existing parent."""
    for place in (path, *path.parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return None
    return None


def _links(has_gpu: bool, root: Path) -> Iterator[Line]:
    cards = sorted(p.name for p in (root / "sys/class/infiniband").glob("*"))
    if cards:
        yield "RDMA", "ok", f"{len(cards)} RDMA devices: {', '.join(cards[:8])}."
    else:
        yield "RDMA", "warn", "No RDMA device (InfiniBand, RoCE): several hosts would talk over TCP."
    driver = list((root / "dev").glob("nvidia-fs*")) or (root / "proc/driver/nvidia-fs").exists()
    if driver:
        yield "GPUDirect Storage", "ok", "The nvidia-fs driver is loaded."
    elif has_gpu:
        yield "GPUDirect Storage", "warn", "The nvidia-fs driver is not loaded: files go through host memory."


def _settings() -> Iterator[Line]:
    changed = sorted(k for k in os.environ if k.startswith("NCCL_") and k not in NCCL_HARMLESS)
    if changed:
        yield "NCCL settings", "warn", f"These variables change what is measured: {', '.join(changed)}."
    else:
        yield "NCCL settings", "ok", "No NCCL variable that changes results is set."
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            yield name, "warn", f"{name} is set: nothing gets compiled."


def _terminal() -> Iterator[Line]:
    term, colour = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "")
    in_tmux = bool(os.environ.get("TMUX"))
    if term in ("", "dumb"):
        yield "terminal", "warn", "TERM is unset or dumb: use `costlab report` instead of the TUI."
    elif colour in ("truecolor", "24bit") or "direct" in term:
        yield "terminal", "ok", f"{term} with 24-bit colour."
    elif "256" in term:
        yield "terminal", "ok", f"{term}: 256 colours; set COLORTERM=truecolor if the terminal can do more."
    else:
        yield "terminal", "warn", f"{term}: few colours; TERM=xterm-256color usually works."
    if in_tmux:
        text = "Inside tmux, copying from the TUI needs `set -g set-clipboard on` and a terminal that accepts OSC 52."
    else:
        text = "Copying from the TUI uses OSC 52, which the terminal must accept; over SSH it reaches your own machine."
    yield "clipboard", "ok", text

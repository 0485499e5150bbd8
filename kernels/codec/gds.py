"""GPUDirect Storage: whether it is there, in which mode, and how fast.

Saves here don't go through it: every byte is checksummed on the host on its way, and a direct write would skip
that. So this module says what a machine has and measures it, for `doctor` and for judging whether a direct path
would pay.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/driver/nvidia-fs/stats")


@dataclass(frozen=True, slots=True)
class GdsStatus:
    """`active`: cuFile took a file of this directory. `mode`: "direct" with the nvidia-fs driver, "compat"
    through the host without it, "none". GB/s are of `measured_bytes` written and read through cuFile; None
    where not measured.
    """

    active: bool
    mode: str
    reason: str
    measured_bytes: int = 0
    write_gbs: float | None = None
    read_gbs: float | None = None


def driver_loaded() -> bool:
    """Whether the nvidia-fs kernel driver is loaded, which direct mode needs."""
    return _PROC.exists()


def probe(directory: Path, size: int = 0) -> GdsStatus:
    """Try cuFile in a directory with a temporary file; with `size` bytes also measure it. Never raises."""
    if not torch.cuda.is_available():
        return GdsStatus(False, "none", "no CUDA device")
    from torch.cuda import gds

    path = directory / f".gds-probe-{os.getpid()}"
    try:
        file = gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    except (RuntimeError, OSError, AttributeError) as error:
        path.unlink(missing_ok=True)
        return GdsStatus(False, "none", f"cuFile refused: {error}")
    mode = "direct" if driver_loaded() else "compat"
    reason = "nvidia-fs driver is loaded" if mode == "direct" else "no nvidia-fs driver: cuFile goes through the host"
    try:
        if not size:
            return GdsStatus(True, mode, reason)
        return _measure(file, size, mode, reason)
    except RuntimeError as error:
        return GdsStatus(False, mode, f"cuFile failed: {error}")
    finally:
        del file
        path.unlink(missing_ok=True)


def _measure(file: torch.cuda.gds.GdsFile, size: int, mode: str, reason: str) -> GdsStatus:
    data = torch.zeros(size, dtype=torch.uint8, device="cuda")
    # torch types the argument as its legacy storage class but takes the untyped one.
    storage: Any = data.untyped_storage()
    torch.cuda.synchronize()
    start = time.perf_counter()
    file.save_storage(storage)
    middle = time.perf_counter()
    file.load_storage(storage)
    torch.cuda.synchronize()
    end = time.perf_counter()
    return GdsStatus(True, mode, reason, size, size / (middle - start) / 1e9, size / (end - middle) / 1e9)

"""Room for a checkpoint: device memory, host memory and disk that are left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from costlab.probes.machine import memory_limit

if TYPE_CHECKING:
    import torch


def device_room(device: torch.device) -> float:
    """Bytes that could still be allocated where the model lives."""
    import torch

    if device.type != "cuda":
        return 0.5 * host_available()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def host_available() -> float:
    """Bytes of host memory left: the machine's, or what a cgroup limit leaves after this host's ranks."""
    import psutil

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = memory_limit()
    free = float(psutil.virtual_memory().available)
    return free if limit is None else min(free, limit - float(psutil.Process().memory_info().rss) * ranks)


def free_disk(path: Path) -> float:
    return float(shutil.disk_usage(path).free) if path.exists() else 0.0

"""What the run ran on: the machine's facts with what torch knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes.machine import machine
from costlab.probes.records import Environment

if TYPE_CHECKING:
    import torch


def environment(device: torch.device, backend: str) -> Environment:
    """The machine's facts with torch's own versions; `device` as in "NVIDIA H200" or "cpu"."""
    import torch

    env = machine()
    found = list(env.gpus)
    for gpu in found:
        if torch.cuda.is_available() and gpu.index < torch.cuda.device_count():
            gpu.sm_count = torch.cuda.get_device_properties(gpu.index).multi_processor_count
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return msgspec.structs.replace(
        env,
        torch=str(torch.__version__),  # a TorchVersion, which is a str that encoders refuse
        cuda=torch.version.cuda,
        cudnn=str(cudnn) if cudnn else None,
        nccl=_nccl_version(),
        backend=backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        gpus=found,
    )


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    value: Any = torch.cuda.nccl.version()
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)

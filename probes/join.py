"""How the ranks of a job find their device and each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from costlab.probes.job import require_device
from costlab.probes.peers import Peers
from costlab.probes.session import loopback_interface


def join(limit: timedelta) -> tuple[torch.device, Peers]:
    """Join the default group, NCCL where this rank has a GPU and gloo elsewhere; this rank's device and its peers.

    On one host gloo keeps to the loopback interface. Collectives time out after `limit`.
    Raises SpecError where a CUDA device was asked for and there is none.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require_device(count)
    cuda = count > local
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE") and (interface := loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=limit, device_id=device if cuda else None)
    return device, Peers(dist.new_group(backend="gloo", timeout=limit))

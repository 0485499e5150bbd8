"""Which ways of saving are measured on a device, in order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from costlab.probes.checkpoint_engine import Engine
from costlab.probes.checkpoint_modes import MOST_THREADS, Background, Pinned, Process, Saver, Staged, Sync
from costlab.probes.spec import CheckpointCodec

if TYPE_CHECKING:
    import torch


def savers(device: torch.device, world: int = 1, chosen: CheckpointCodec = "dcp", *, only: bool = False) -> list[Saver]:
    """The `chosen` way (`dcp`: the plain save), costlab's engine, then DCP's other configurations.

    `async:default` is DCP as it comes; the others write with several threads where there are CPUs, `sync` too, so
    that what asynchrony saves is not mixed with what threads save. The promising come before the slow, since the
    budget may end before they all ran. A peer replica needs an even number of ranks. `only` leaves out all but the
    chosen way.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
    own: list[Saver] = [Engine(p) for p in sorted(("exact", "fp8"), key=lambda p: p != chosen)]
    replica: list[Saver] = [Engine("exact", replica=True)] if world > 1 and world % 2 == 0 else []
    default = Staged("async:default")
    if device.type == "cuda":
        others: list[Saver] = [Pinned(threads), default, Background(True, threads), Process(True, threads)]
    else:
        others = [default, Background(False, threads), Process(False, threads)]
    plain: list[Saver] = [Sync(threads)]
    first, rest = (plain, own) if chosen == "dcp" else (own[:1], [*plain, *own[1:]])
    return first if only else [*first, *rest, *others, *replica]

"""Round trips between the ranks' clocks over the process group, for `probes.clocks` to reckon with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from costlab.probes.clocks import ClockReading, RoundTrip, When, reading

if TYPE_CHECKING:
    import torch.distributed as dist

ROUNDS = 24
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Clock = Callable[[], int]  # nanoseconds


def boot_id() -> str:
    """The running kernel's identity, "" where it is not told. Compared among ranks, never stored."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_clocks(
    when: When, *, group: dist.ProcessGroup | None = None, clock: Clock = time.time_ns, kernel: str | None = None
) -> list[ClockReading]:
    """Every rank's reading, on every rank, in rank order; called by all ranks alike. [] for one rank.

    Needs a group that carries CPU tensors (gloo). Takes about 24 round trips a rank, one rank after the other.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world < 2:
        return []
    kernels: list[str] = [""] * world
    dist.all_gather_object(kernels, boot_id() if kernel is None else kernel, group=group)
    mine = ClockReading(rank=0, when=when, offset_us=0.0, uncertainty_us=0.0, how="the reference")
    for other in range(1, world):
        if rank == 0:
            _answer(other, clock, group)
        elif rank == other:
            mine = reading(rank, when, _ask(clock, group), bool(kernels[0]) and kernels[0] == kernels[rank])
    found: list[ClockReading | None] = [None] * world
    dist.all_gather_object(found, mine, group=group)
    return [r for r in found if r is not None]


def _answer(other: int, clock: Clock, group: dist.ProcessGroup | None) -> None:
    import torch
    import torch.distributed as dist

    asked, times = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(asked, group=group, group_src=other)
        times[0] = clock()
        times[1] = clock()
        dist.send(times, group=group, group_dst=other)


def _ask(clock: Clock, group: dist.ProcessGroup | None) -> list[RoundTrip]:
    import torch
    import torch.distributed as dist

    question, times, trips = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), list[RoundTrip]()
    for _ in range(ROUNDS):
        t0 = clock()
        dist.send(question, group=group, group_dst=0)
        dist.recv(times, group=group, group_src=0)
        t3 = clock()
        trips.append((t0, int(times[0]), int(times[1]), t3))
    return trips

"""What the ranks do in test_measure.py."""

from __future__ import annotations

from functools import partial

import torch
from rank_pool import worlds

from costlab.kernels.schedule import measure
from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.plan import Plan

CPU = torch.device("cpu")


def curves(rank: int) -> tuple[dict[str, list[int]], dict[int, float], dict[str, str]]:
    """Sizes measured by plan, the noise, and what was refused."""
    plans = [Plan("backend"), Plan("ring"), Plan("two-shot")]
    sizes = [4096, 65536]
    found = measure.curves(Communicator(worlds[2]), plans, sizes, torch.float32, CPU, 3, beside=True)
    assert not found.beside  # nothing runs beside a collective of the CPU
    points = {p.schedule: [size for size, _ in curve] for p, curve in found.curves.items()}
    return points, found.noise, {p.schedule: text for p, text in found.refused.items()}


def turns(rank: int) -> tuple[list[int], list[int]]:
    """The order of calls, and the samples kept of each."""
    order: list[int] = []
    samples = measure.in_turn([partial(order.append, i) for i in range(3)], 2, 1, CPU, worlds[2])
    return order, [len(row) for row in samples]


def hopeless(rank: int, slow: str) -> dict[str, list[int]]:
    """Sizes measured where one plan takes more than HOPELESS times as long as the other."""
    taken = [[measure.HOPELESS + 1 if plan == slow else 1.0] for plan in ("backend", "ring")]
    real, measure.in_turn = measure.in_turn, lambda calls, *_: taken[: len(calls)]
    try:
        plans = [Plan("backend"), Plan("ring")]
        found = measure.curves(Communicator(worlds[2]), plans, [4096, 8192], torch.float32, CPU, 1)
    finally:
        measure.in_turn = real
    return {p.schedule: [size for size, _ in curve] for p, curve in found.curves.items()}

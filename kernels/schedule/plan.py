"""What a planner decides and a communicator executes: the schedule, its chunks and its order. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from costlab.kernels.schedule.errors import ScheduleRefused

Schedule = Literal["backend", "ring", "chain", "two-level", "hybrid", "one-shot", "two-shot"]
Layout = tuple[tuple[int, ...], ...]  # ranks by segment

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
OWN: tuple[Schedule, ...] = ("ring", "chain", "two-level", "hybrid")
ALL_BUT_SYMMETRIC: tuple[Schedule, ...] = ("backend", "ring", "chain", "two-level", "hybrid")
SYMMETRIC: tuple[Schedule, ...] = ("one-shot", "two-shot")

SEED_THRESHOLD = 64 << 20
SEED_WORLD = 8
SEED_CHUNK = 16 << 20
SEED_LEAST = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one all-reduce.

    Attributes:
        schedule: `backend` is the library's own all-reduce; `one-shot` and `two-shot` use symmetric memory.
        chunks: pieces the message is cut into; they follow each other through the schedule's stages.
        channels: rings or chains that run side by side, each entering a segment at another rank.
        order: segments in the order rings and chains visit them; empty for the layout's own.
        inside: `p2p` runs the stages inside segments as rings of our own, `backend` as the library's reduce-scatter
            and all-gather (and, for `two-level`, its all-reduce between segments); needs equal segments.
    """

    schedule: Schedule
    chunks: int = 1
    channels: int = 1
    order: tuple[int, ...] = ()
    inside: Literal["p2p", "backend"] = "p2p"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ScheduleRefused(f"unknown schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.chunks < 1 or self.channels < 1:
            raise ScheduleRefused("chunks and channels start at 1")


def seed_chunks(nbytes: int, world_size: int) -> int:
    """The fixed rule: from 64 MiB and 8 ranks on, chunks of at most 16 MiB and at least 4; otherwise one."""
    if nbytes < SEED_THRESHOLD or world_size < SEED_WORLD:
        return 1
    return max(SEED_LEAST, math.ceil(nbytes / SEED_CHUNK))


def check_layout(layout: Layout, order: tuple[int, ...], world_size: int) -> None:
    """Refuse a layout that does not hold every rank once, or an order that is not one of its segments.

    Raises:
        ScheduleRefused: with what is wrong.
    """
    ranks = [rank for segment in layout for rank in segment]
    if sorted(ranks) != list(range(world_size)) or not all(layout):
        raise ScheduleRefused(f"segments {layout} do not hold ranks 0..{world_size - 1} once each")
    if order and sorted(order) != list(range(len(layout))):
        raise ScheduleRefused(f"order {order} is not an order of {len(layout)} segments")

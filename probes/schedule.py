"""Puts a planned all-reduce into a wrapped model: DDP's communication hook, or FSDP2's all-reduce hook over replicas.

Which plan a message gets is measured here, on the run's own ranks, just before the run: every candidate at three
sizes, the library's own all-reduce among them, the slowest rank's time counting; all legs of a what-if take the times
of the first that measured. `auto` takes the fastest schedule and leaves the library in place where nothing beats it by
more than a margin and the noise, or, for DDP on GPUs, where the schedule holds up matrix products beside it longer; a
named schedule only has its chunks chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from costlab.kernels.schedule import hooks, measure
from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.compat import backend_name
from costlab.kernels.schedule.errors import ScheduleError
from costlab.kernels.schedule.plan import Layout, Plan, Schedule
from costlab.kernels.schedule.planner import Choice, Planner
from costlab.kernels.schedule.topology import Link, uniform
from costlab.probes.schedule_choice import ScheduleChoice
from costlab.probes.schedule_kept import keep_curves, kept_path, read_curves
from costlab.probes.spec import RunSpec, SpecError

SIZES = (64 << 10, 1 << 20, 8 << 20)  # bytes; DDP's buckets are 1 MiB first, then 25 MiB
GPU_SIZES = (256 << 10, 4 << 20, 64 << 20)
REPEATS, GPU_REPEATS = 3, 8
_CHUNKS = (1, 4)
_NAMED: dict[str, tuple[Schedule, ...]] = {
    "ring": ("ring",),
    "chain": ("chain",),
    "two-level": ("two-level",),
    "hybrid": ("hybrid",),
    "symmetric": ("one-shot", "two-shot"),
}
_NOMINAL = Link(1e-5, 1e10)  # only names the fabric: every choice is made from measured curves


def planned_ddp(ddp: Any, spec: RunSpec, device: torch.device, choices: list[ScheduleChoice]) -> list[str]:
    """Register the hook on a DDP model; returns what was chosen, in sentences.

    `choices` gets what was measured, and later a row for each new size of message that the steps reduce.
    """
    communicator = _communicator(dist.group.WORLD, spec)
    choose, said = _measured(communicator, spec, torch.float32, device, choices, beside=True)
    ddp.register_comm_hook(None, hooks.ddp_hook(communicator, choose))
    return said


def replicate(model: nn.Module, mesh: Any) -> None:
    """Start all replicas from the first one's parameters, as a two-dimensional mesh would; before `fully_shard`."""
    hooks.broadcast_module(model, mesh["replicate"].get_group())


def planned_hsdp(
    model: nn.Module, mesh: Any, spec: RunSpec, device: torch.device, choices: list[ScheduleChoice]
) -> list[str]:
    """Reduce the shards of `model`, sharded over mesh["shard"] alone, over mesh["replicate"]; says what was chosen.

    `choices` as of `planned_ddp`.
    """
    communicator = _communicator(mesh["replicate"].get_group(), spec)
    choose, said = _measured(communicator, spec, torch.float32, device, choices)
    count = hooks.fsdp_all_reduce(model, communicator, choose)
    return [f"{text} ({count} modules)" for text in said[:1]] + said[1:]


def _communicator(group: ProcessGroup | None, spec: RunSpec) -> Communicator:
    """Segments are the hosts: torchrun numbers the ranks of a host one after the other."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    each = int(os.environ.get("LOCAL_WORLD_SIZE", str(len(ranks))))
    hosts: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        hosts.setdefault(rank // each, []).append(place)
    layout: Layout = tuple(tuple(places) for places in hosts.values())
    return Communicator(group, layout, timeout=timedelta(seconds=spec.collective_timeout_s))


def _candidates(communicator: Communicator, schedule: str, device: torch.device) -> list[Plan]:
    chunked = [Plan(s, chunks=c) for s in ("ring", "chain", "two-level", "hybrid") for c in _CHUNKS]
    symmetric = [Plan("one-shot"), *(Plan("two-shot", chunks=c) for c in (1, 2, 4))]
    if schedule == "auto":
        several = len(communicator.layout) > 1
        own = [p for p in chunked if several or p.schedule in ("ring", "chain")]
        return [Plan("backend"), *own, *(symmetric if device.type == "cuda" else [])]
    return [p for p in [*chunked, *symmetric] if p.schedule in _NAMED[schedule]]


def _measured(
    communicator: Communicator,
    spec: RunSpec,
    dtype: torch.dtype,
    device: torch.device,
    choices: list[ScheduleChoice],
    *,
    beside: bool = False,
) -> tuple[Callable[[int], Plan], list[str]]:
    """What to run for so many bytes, and the choice at each measured size in a sentence."""
    schedule = spec.schedule
    sizes, rounds = (GPU_SIZES, GPU_REPEATS) if device.type == "cuda" else (SIZES, REPEATS)
    plans = _candidates(communicator, schedule, device)
    path = kept_path(spec, communicator, plans, sizes, beside=beside)
    found = read_curves(path, communicator) if path else None
    if found is None:
        try:
            found = measure.curves(communicator, plans, sizes, dtype, device, rounds, beside=beside)
        except ScheduleError as error:
            raise SpecError(f"--schedule {schedule}: {error}") from error
        if path:
            keep_curves(path, communicator, found)
    if not found.curves:
        refused = next(reversed(found.refused.values()), "")
        raise SpecError(f"--schedule {schedule}: {refused}; --schedule auto takes what can be had")
    nominal = uniform(1, communicator.world_size, _NOMINAL, _NOMINAL)
    planner = Planner(nominal, measured=found.curves, noise=found.noise, beside=found.beside)
    kept: dict[int, Plan] = {}

    def choose(nbytes: int) -> Plan:
        if nbytes not in kept:
            choice = planner.choose(nbytes)
            choices.append(_row(choice, schedule, communicator, device, used=True))
            kept[nbytes] = choice.plan
        return kept[nbytes]

    table = planner.table(sizes)
    choices += [_row(c, schedule, communicator, device) for c in table]
    return choose, _sentences(schedule, communicator, table)


def _row(
    choice: Choice, asked: str, communicator: Communicator, device: torch.device, *, used: bool = False
) -> ScheduleChoice:
    return ScheduleChoice(
        asked=asked,
        nbytes=choice.nbytes,
        ranks=communicator.world_size,
        hosts=len(communicator.layout),
        schedule=choice.best.describe(),
        seconds={c.describe(): c.seconds for c in choice.candidates},
        library=backend_name(communicator.parent, device),
        used=used,
    )


def _sentences(schedule: str, communicator: Communicator, choices: Sequence[Choice]) -> list[str]:
    hosts = len(communicator.layout)
    where = f"{communicator.world_size} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    said = [f"all-reduce {schedule} over {where}: {c.sentence.partition('; the lower bound')[0]}" for c in choices]
    if schedule in ("hybrid", "two-level") and hosts == 1:
        said.append(f"{schedule} on one host has nothing between hosts: it is a ring in chunks here")
    return said

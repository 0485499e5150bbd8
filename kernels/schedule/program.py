"""A schedule as data: what every rank sends, receives and adds, in which order. Torch-free.

One description serves three readers: the executor runs it on process groups, the simulator times it on a fabric, and
the tests check it for completeness. A program has *tracks*, ordered lists of steps that run side by side (threads on
the CPU, streams on a GPU). The transfers of a step start together; a step ends when all of them have, and received
sums have been added; then the track's next step starts. `after` makes a step wait for other tracks of its own rank.
Positions are elements of the flat tensor.

All schedules finish every element's sum in one place and copy it from there, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from costlab.kernels.schedule.errors import ScheduleError
from costlab.kernels.schedule.plan import Layout, Plan

ALIGN = 64  # elements; unaligned slices cost vectorised adds and copies, short ones gain nothing from it


class Kind(IntEnum):
    """What a transfer does at this rank: send, receive into place, or receive and add."""

    SEND = 0
    RECV = 1
    REDUCE = 2


class Op(NamedTuple):
    """One transfer of elements [start, stop) with a peer (rank within the schedule's group)."""

    kind: Kind
    peer: int
    start: int
    stop: int


class Native(NamedTuple):
    """A collective of the backend over the track's own subgroup of `size` ranks, in place on [start, stop)."""

    what: str  # reduce_scatter, all_gather, all_reduce
    start: int
    stop: int
    size: int


class Step(NamedTuple):
    """Transfers that start together; `after` is (track, number of its steps that must have ended)."""

    ops: tuple[Op, ...] = ()
    after: tuple[tuple[str, int], ...] = ()
    native: Native | None = None


Program = dict[str, list[Step]]
Slice = tuple[int, int]


def cut(start: int, stop: int, parts: int, unit: int = 1) -> list[Slice]:
    """[start, stop) in `parts` neighbouring slices, multiples of `unit` but for the last; the same on every rank."""
    length = stop - start
    if length >= 4 * parts * ALIGN * unit:
        unit *= ALIGN
    blocks = length // unit
    base, extra = divmod(blocks, parts)
    edges = [start]
    for i in range(parts):
        edges.append(edges[-1] + (base + (i < extra)) * unit)
    edges[-1] = stop
    return list(pairwise(edges))


def tracks(plan: Plan) -> tuple[str, ...]:
    """Names of the tracks that programs of this plan may use, in the order their steps are issued."""
    lanes = range(plan.channels)
    return {
        "ring": tuple(f"ring{c}" for c in lanes),
        "chain": tuple(f"{way}{c}" for c in lanes for way in ("up", "down")),
        "two-level": ("scatter", "lane", "gather"),
        "hybrid": ("scatter", "up", "down", "gather"),
    }.get(plan.schedule, ())


@lru_cache(maxsize=256)
def build(plan: Plan, layout: Layout, numel: int, rank: int) -> Program:
    """The program of `rank` for an all-reduce of `numel` elements.

    Raises:
        ScheduleError: the plan's schedule has no program of its own (backend, symmetric memory).
    """
    if plan.schedule == "ring":
        program = _ring(plan, layout, numel, rank)
    elif plan.schedule == "chain":
        program = _chain(plan, layout, numel, rank)
    elif plan.schedule in ("two-level", "hybrid"):
        from costlab.kernels.schedule.segmented import segmented

        program = segmented(plan, layout, numel, rank)
    else:
        raise ScheduleError(f"{plan.schedule} is not made of point-to-point steps")
    return {track: steps for track, steps in program.items() if steps}


def visit(plan: Plan, layout: Layout, channel: int = 0) -> list[int]:
    """Ranks in the order a flat ring or chain visits them; a channel enters each segment at another rank."""
    order = plan.order or tuple(range(len(layout)))
    return [rank for s in order for rank in rotate(layout[s], channel)]


def rotate(ranks: Sequence[int], by: int) -> list[int]:
    """`ranks` starting `by` places later."""
    by %= len(ranks)
    return [*ranks[by:], *ranks[:by]]


def ring_scatter(order: Sequence[int], rank: int, slices: Sequence[Slice]) -> list[Step]:
    """Ring reduce-scatter: afterwards the rank at place i of `order` holds the sum of slices[i]."""
    n, me = len(order), order.index(rank)
    after, before = order[(me + 1) % n], order[(me - 1) % n]
    steps = []
    for s in range(n - 1):
        out, into = slices[(me - s - 1) % n], slices[(me - s - 2) % n]
        steps.append(Step((Op(Kind.SEND, after, *out), Op(Kind.REDUCE, before, *into))))
    return steps


def ring_gather(order: Sequence[int], rank: int, slices: Sequence[Slice]) -> list[Step]:
    """Ring all-gather of slices[i] from the rank at place i of `order`."""
    n, me = len(order), order.index(rank)
    after, before = order[(me + 1) % n], order[(me - 1) % n]
    steps = []
    for s in range(n - 1):
        out, into = slices[(me - s) % n], slices[(me - s - 1) % n]
        steps.append(Step((Op(Kind.SEND, after, *out), Op(Kind.RECV, before, *into))))
    return steps


def _ring(plan: Plan, layout: Layout, numel: int, rank: int) -> Program:
    """Each chunk is a ring of its own; chunks alternate over the channels, so adds hide behind transfers."""
    program: Program = {track: [] for track in tracks(plan)}
    for j, (start, stop) in enumerate(cut(0, numel, plan.chunks)):
        channel = j % plan.channels
        order = visit(plan, layout, channel)
        slices = cut(start, stop, len(order))
        program[f"ring{channel}"] += ring_scatter(order, rank, slices) + ring_gather(order, rank, slices)
    return program


def _chain(plan: Plan, layout: Layout, numel: int, rank: int) -> Program:
    """Chunks travel up the chain, adding, and come back down."""
    program: Program = {}
    pieces = cut(0, numel, plan.chunks)
    for channel in range(plan.channels):
        order = visit(plan, layout, channel)
        mine = pieces[channel :: plan.channels]
        up, down = chain_tracks(order, rank, mine, f"up{channel}")
        program[f"up{channel}"], program[f"down{channel}"] = up, down
    return program


def chain_tracks(
    order: Sequence[int], rank: int, pieces: Sequence[Slice], up: str, ready: Sequence[tuple[str, int]] = ()
) -> tuple[list[Step], list[Step]]:
    """The two tracks of a pipelined chain: sums towards the last rank of `order`, results back to the first.

    Args:
        up: name of the first track, for the second to wait on.
        ready: per piece, what this rank must have finished before it touches the piece.
    """
    n, me = len(order), order.index(rank)
    if n == 1:
        return [], []
    back = order[me - 1] if me > 0 else None
    ahead = order[me + 1] if me < n - 1 else None
    forward = _relay(back, Kind.REDUCE, ahead, pieces, ready)
    # the piece must have left this rank upwards, or been completed here, before its result may overwrite or leave it
    lag = 1 if back is None or ahead is None else 2
    done = [(up, j + lag) for j in range(len(pieces))]
    backward = _relay(ahead, Kind.RECV, back, pieces, done)
    return forward, backward


def _relay(
    source: int | None,
    kind: Kind,
    target: int | None,
    pieces: Sequence[Slice],
    ready: Sequence[tuple[str, int]],
) -> list[Step]:
    """Receive piece t and send piece t-1 in step t; an end of the chain only receives or only sends."""
    count = len(pieces)
    late = 0 if source is None else 1
    last = count - 1 + (late if target is not None else 0)
    steps = []
    for t in range(last + 1):
        ops = []
        if target is not None and t >= late:
            ops.append(Op(Kind.SEND, target, *pieces[t - late]))
        if source is not None and t < count:
            ops.append(Op(kind, source, *pieces[t]))
        steps.append(Step(tuple(ops), tuple(ready[t : t + 1])))
    return steps

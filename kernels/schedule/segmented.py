"""Programs of the two-level and the hybrid all-reduce: reduce-scatter inside, a ring or chain between, gather inside.

Each chunk is cut into lanes, one per rank of the smallest segment. Inside a segment a ring reduce-scatter leaves lane i
with the segment's i-th rank; those ranks then reduce their lane across the segments, by a ring (two-level; also called
BlueConnect, Cho et al. 2019, and what HSDP does) or by a pipelined chain (hybrid); a ring all-gather spreads it again.
Ranks beyond the number of lanes only take part inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from costlab.kernels.schedule.plan import Layout, Plan
from costlab.kernels.schedule.program import (
    Native,
    Program,
    Slice,
    Step,
    chain_tracks,
    cut,
    ring_gather,
    ring_scatter,
)


class _Place(NamedTuple):
    """Where a rank stands: its segment, its place in it, the lane's ranks (empty beyond the lanes), lane count."""

    segment: tuple[int, ...]
    at: int
    lane: tuple[int, ...]
    lanes: int


class _Chunk(NamedTuple):
    slices: list[Slice]  # lane i's elements; empty slices for ranks without a lane
    native: Slice | None  # the whole chunk where the backend's collectives handle it


def segmented(plan: Plan, layout: Layout, numel: int, rank: int) -> Program:
    """The program of `rank`; tracks scatter, lane (two-level) or up and down (hybrid), gather."""
    place = _place(plan, layout, rank)
    chunks = _chunks(plan, place, layout, numel)
    scatter: list[Step] = []
    ready = []
    for chunk in chunks:
        scatter += _inside("reduce_scatter", chunk, place, rank)
        ready.append(("scatter", len(scatter)))
    program: Program = {"scatter": scatter}
    done = ready
    if place.lane and len(layout) > 1:
        mine = [chunk.slices[place.at] for chunk in chunks]
        between, done = _between(plan, place, rank, mine, ready, [c.native is not None for c in chunks])
        program |= between
    gather: list[Step] = []
    for chunk, mark in zip(chunks, done, strict=True):
        steps = _inside("all_gather", chunk, place, rank)
        gather += [s._replace(after=(mark,)) if i == 0 else s for i, s in enumerate(steps)]
    return program | {"gather": gather}


def _place(plan: Plan, layout: Layout, rank: int) -> _Place:
    lanes = min(len(segment) for segment in layout)
    segment = next(s for s in layout if rank in s)
    index = segment.index(rank)
    order = plan.order or tuple(range(len(layout)))
    lane = tuple(layout[s][index] for s in order) if index < lanes else ()
    return _Place(segment, index, lane, lanes)


def _chunks(plan: Plan, place: _Place, layout: Layout, numel: int) -> list[_Chunk]:
    size = len(place.segment)
    spare: list[Slice] = [(0, 0)] * (size - place.lanes)
    native = plan.inside == "backend" and all(len(s) == place.lanes for s in layout)
    if not native:
        return [_Chunk(cut(*c, place.lanes) + spare, None) for c in cut(0, numel, plan.chunks)]
    whole = numel - numel % size
    rows = [_Chunk(_equal(c, size), c) for c in cut(0, whole, plan.chunks, unit=size)]
    return [*rows, _Chunk(cut(whole, numel, size), None)] if whole < numel else rows


def _equal(chunk: Slice, size: int) -> list[Slice]:
    width = (chunk[1] - chunk[0]) // size
    return [(chunk[0] + i * width, chunk[0] + (i + 1) * width) for i in range(size)]


def _inside(what: str, chunk: _Chunk, place: _Place, rank: int) -> list[Step]:
    if len(place.segment) == 1:
        return []
    if chunk.native is not None:
        return [Step(native=Native(what, *chunk.native, len(place.segment)))]
    ring = ring_scatter if what == "reduce_scatter" else ring_gather
    return ring(place.segment, rank, chunk.slices)


def _between(
    plan: Plan,
    place: _Place,
    rank: int,
    mine: Sequence[Slice],
    ready: Sequence[tuple[str, int]],
    native: Sequence[bool],
) -> tuple[Program, list[tuple[str, int]]]:
    """The stage between segments, and per chunk the mark at which this rank holds the result of its lane."""
    if plan.schedule == "hybrid":
        up, down = chain_tracks(place.lane, rank, mine, "up", ready)
        last = place.lane[-1] == rank
        return {"up": up, "down": down}, [("up" if last else "down", j + 1) for j in range(len(mine))]
    lane: list[Step] = []
    done = []
    for piece, mark, whole in zip(mine, ready, native, strict=True):
        if whole:
            steps = [Step(native=Native("all_reduce", *piece, len(place.lane)))]
        else:
            slices = cut(*piece, len(place.lane))
            steps = ring_scatter(place.lane, rank, slices) + ring_gather(place.lane, rank, slices)
        lane += [s._replace(after=(mark,)) if i == 0 else s for i, s in enumerate(steps)]
        done.append(("lane", len(lane)))
    return {"lane": lane}, done

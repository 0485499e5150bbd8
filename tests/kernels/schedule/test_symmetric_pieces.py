"""The two-shot in chunks on host memory: threads stand for ranks, a barrier of theirs for the device's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from costlab.kernels.schedule.chunked import lane, pieces, steps, widths


def all_reduce(flats: list[Tensor], chunks: int, unit: int, scale: float = 1.0) -> None:
    world = len(flats)
    rows, used = pieces(flats[0].numel(), chunks, world, unit)
    buffers = [torch.full((used,), -99.0) for _ in range(world)]
    meet = threading.Barrier(world, timeout=20)

    def rank(me: int) -> None:
        parts = flats[me].split(widths(rows))
        for number, piece in enumerate(rows):
            for _ in steps(parts[number * world :][:world], lane(piece, me, buffers), scale):
                meet.wait()

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(rank, range(world)))


@settings(max_examples=150, deadline=None)
@given(
    world=st.integers(2, 5),
    numel=st.integers(1, 300),
    chunks=st.integers(1, 6),
    unit=st.sampled_from([1, 4, 8]),
    scale=st.sampled_from([1.0, 0.5]),
)
@example(world=5, numel=1, chunks=6, unit=8, scale=1.0)
def test_every_rank_gets_the_sum(world: int, numel: int, chunks: int, unit: int, scale: float) -> None:
    flats = [torch.arange(numel, dtype=torch.float32) * (r + 1) + r for r in range(world)]
    expected = torch.stack(flats).sum(0) * scale
    all_reduce(flats, chunks, unit, scale)
    assert all(torch.equal(flat, expected) for flat in flats)


@given(numel=st.integers(1, 5000), world=st.integers(2, 9), chunks=st.integers(1, 9), unit=st.sampled_from([1, 4, 8]))
def test_pieces_cover_the_message_in_slots_of_their_own(numel: int, world: int, chunks: int, unit: int) -> None:
    rows, used = pieces(numel, chunks, world, unit)
    covered = [element for piece in rows for a, b in piece.slices for element in range(a, b)]
    assert covered == list(range(numel))
    assert sum(widths(rows)) == numel
    slots = [slot for piece in rows for slot in piece.slots]
    most = [max(b - a for a, b in piece.slices) for piece in rows for _ in piece.slots]
    ends = [*slots[1:], used]
    assert all(slot + width <= end for slot, width, end in zip(slots, most, ends, strict=True))
    assert all(slot % unit == 0 for slot in slots)
    assert used <= numel + chunks * world * unit


class Launches(TorchDispatchMode):
    """Counts what would be a kernel or a copy on a GPU, and views, which cost the host alone."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.counted["view" if func.is_view else "launch"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("world", "scale", "launches"), [(2, 1.0, 4), (2, 0.5, 5), (4, 1.0, 10), (4, 0.25, 11)])
def test_a_chunk_launches_no_more_than_its_transfers_and_sums(world: int, scale: float, launches: int) -> None:
    """N-1 pushes, N-1 sums, N-1 pulls, one copy; an average adds one; views of buffers are not made again."""
    rows, used = pieces(1024, 1, world, 4)
    mine = lane(rows[0], 0, [torch.zeros(used) for _ in range(world)])
    parts = torch.ones(1024).split(widths(rows))
    with Launches() as seen:
        list(steps(parts, mine, scale))
    assert seen.counted == {"launch": launches}

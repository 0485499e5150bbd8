"""The two-shot in chunks on host memory: threads stand for ranks, a barrier of theirs for the device's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from costlab.kernels.schedule.symmetric import pieces, sum_piece


def all_reduce(flats: list[Tensor], chunks: int, unit: int) -> None:
    world = len(flats)
    rows, used = pieces(flats[0].numel(), chunks, world, unit)
    buffers = [torch.full((used,), -99.0) for _ in range(world)]
    meet = threading.Barrier(world, timeout=20)

    def rank(me: int) -> None:
        for piece in rows:
            sum_piece(flats[me], piece, me, buffers, meet.wait)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(rank, range(world)))


@settings(max_examples=150, deadline=None)
@given(
    world=st.integers(2, 5),
    numel=st.integers(1, 300),
    chunks=st.integers(1, 6),
    unit=st.sampled_from([1, 4, 8]),
)
@example(world=5, numel=1, chunks=6, unit=8)
def test_every_rank_gets_the_sum(world: int, numel: int, chunks: int, unit: int) -> None:
    flats = [torch.arange(numel, dtype=torch.float32) * (r + 1) + r for r in range(world)]
    expected = torch.stack(flats).sum(0)
    all_reduce(flats, chunks, unit)
    assert all(torch.equal(flat, expected) for flat in flats)


@given(numel=st.integers(1, 5000), world=st.integers(2, 9), chunks=st.integers(1, 9), unit=st.sampled_from([1, 4, 8]))
def test_pieces_cover_the_message_in_slots_of_their_own(numel: int, world: int, chunks: int, unit: int) -> None:
    rows, used = pieces(numel, chunks, world, unit)
    covered = [element for piece in rows for a, b in piece.slices for element in range(a, b)]
    assert covered == list(range(numel))
    slots = [slot for piece in rows for slot in piece.slots]
    widths = [max(b - a for a, b in piece.slices) for piece in rows for _ in piece.slots]
    ends = [*slots[1:], used]
    assert all(slot + width <= end for slot, width, end in zip(slots, widths, ends, strict=True))
    assert all(slot % unit == 0 for slot in slots)
    assert used <= numel + chunks * world * unit

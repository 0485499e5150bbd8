"""Bounded host memory that a snapshot is staged in.

A slab is a page-aligned buffer that holds one aligned piece of the file to be: slab k holds the bytes from `k *
size` on. `SlabPool` lends slabs up to its limit and makes the caller wait for the next free one beyond it;
`Region` fills them in order and hands each over when it is full.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.layout import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_SLAB = 16 << 20


@dataclass(slots=True)
class Slab:
    """One buffer as a tensor and as an array over the same memory."""

    tensor: torch.Tensor
    array: NDArray[np.uint8]


def _allocate(size: int, pinned: bool) -> Slab:
    """A page-aligned buffer; pinned memory usually is, and is cut to be where it isn't."""
    raw = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    if raw.data_ptr() % PAGE:
        raw = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
        skip = -raw.data_ptr() % PAGE
        raw = raw[skip : skip + size]
    return Slab(raw, raw.numpy())


class SlabPool:
    """At most `limit_bytes` of slabs, made when first needed and kept. `peak` is the most that were lent at once."""

    def __init__(self, slab_bytes: int = DEFAULT_SLAB, limit_bytes: int | None = None, pinned: bool = False) -> None:
        if slab_bytes % (1 << 20) or slab_bytes <= 0:
            raise CheckpointError(f"slabs of {slab_bytes} bytes: a multiple of 1 MiB is needed")
        if limit_bytes is not None and limit_bytes < 2 * slab_bytes:
            raise CheckpointError(f"a pool of {limit_bytes} bytes holds less than two slabs of {slab_bytes}")
        self.slab_bytes, self.pinned = slab_bytes, pinned
        self._limit = None if limit_bytes is None else limit_bytes // slab_bytes
        self._free: list[Slab] = []
        self._made = 0
        self.peak = 0
        self._returned = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        """Memory held now, lent or free."""
        return self._made * self.slab_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The most it will hold; None without a limit."""
        return None if self._limit is None else self._limit * self.slab_bytes

    def reserve(self, total_bytes: int) -> None:
        """Allocate slabs for `total_bytes` now (at most the limit), because pinning memory is slow."""
        wanted = -(-total_bytes // self.slab_bytes)
        held = [self.acquire() for _ in range(wanted if self._limit is None else min(wanted, self._limit))]
        for slab in held:
            self.release(slab)

    def acquire(self, timeout: float = 600.0) -> Slab:
        """A slab; waits for one at the limit. `CheckpointError` when none comes back in time or memory is out."""
        with self._returned:
            if not self._free and (self._limit is None or self._made < self._limit):
                try:
                    self._free.append(_allocate(self.slab_bytes, self.pinned))
                except RuntimeError as error:
                    raise CheckpointError(
                        f"no memory for a staging buffer of {self.slab_bytes} bytes: {error}"
                    ) from error
                self._made += 1
            if not self._returned.wait_for(lambda: bool(self._free), timeout):
                raise CheckpointError(f"no staging buffer came free within {timeout:.0f} s: the disk does not keep up")
            slab = self._free.pop()
            self.peak = max(self.peak, self._made - len(self._free))
            return slab

    def release(self, slab: Slab) -> None:
        """Give a slab back."""
        with self._returned:
            self._free.append(slab)
            self._returned.notify()


class Region:
    """Fills slabs with the bytes from `start` of a file in rising order; `full(index, slab)` gets each when done."""

    def __init__(self, pool: SlabPool, start: int, full: Callable[[int, Slab], None]) -> None:
        self._pool, self._full = pool, full
        self.start = self.position = start
        self._slab: Slab | None = None

    def _pieces(self, length: int) -> Iterator[tuple[Slab, int, int]]:
        """(slab, first, last + 1) of the next `length` bytes; moves the position."""
        size = self._pool.slab_bytes
        while length:
            if self._slab is None:
                self._slab = self._pool.acquire()
            at = self.position % size
            count = min(length, size - at)
            yield self._slab, at, at + count
            self.position += count
            length -= count
            if self.position % size == 0:
                self._hand_over(self.position // size - 1)

    def _hand_over(self, index: int) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            self._full(index, slab)

    def skip_to(self, offset: int) -> None:
        """Zeros up to `offset`."""
        for slab, first, last in self._pieces(offset - self.position):
            slab.array[first:last] = 0

    def copy_in(self, offset: int, data: torch.Tensor) -> None:
        """Bytes (uint8, any device) at `offset`; copies from a GPU are enqueued on the current stream."""
        self.skip_to(offset)
        done = 0
        for slab, first, last in self._pieces(data.numel()):
            slab.tensor[first:last].copy_(data[done : done + last - first], non_blocking=True)
            done += last - first

    def finish(self) -> None:
        """Hand over the last, partly filled slab."""
        if self._slab is not None:
            self._hand_over(self.position // self._pool.slab_bytes)

    def abort(self) -> None:
        """Give back a slab that was being filled; no copy into it may be under way."""
        if self._slab is not None:
            self._pool.release(self._slab)
            self._slab = None

"""From page cache or disk to the GPU: threads read into pinned buffers, the calling thread sends them.

The pages of a mapped file aren't pinned, so the driver would copy them through a small buffer of its own. Here the
bytes are read into pinned buffers that stay warm, at the speed of several threads together; the copies overlap the
reads. The readers do nothing but read, because what Python does in many threads at once takes turns. Checksums are
computed on the GPU from the bytes as they arrived there (see `device_crc`), while later ones are read; where that
can't be done, by the readers. Either way the load ends only when all are right.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from costlab.kernels.codec import crc, device_crc, triton_tiles
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.layout import PAGE, Entry
from costlab.kernels.codec.snapshot import Table, copy_rows
from costlab.kernels.codec.turns import quick_turns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE = 12 << 20
SMALL = 256 << 10
BATCH = 512 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Fill `target` (uint8 [entry.length], contiguous, on a CUDA device) with the extent of `entry`."""

    container: Container
    entry: Entry
    target: torch.Tensor


@dataclass(slots=True)
class _Piece:
    """A stretch of a file: (target, first byte of the stretch) of all that lies in it, and the batch it belongs to."""

    container: Container
    offset: int
    length: int
    targets: list[tuple[torch.Tensor, int]]
    batch: int
    arrived_at: int = 0
    check: list[tuple[Entry, int, int, int]] = field(default_factory=list)


def default_threads() -> int:
    """Reader threads: the machine's cores, at most 16."""
    return min(16, os.cpu_count() or 1)


def buffer_bytes() -> int:
    """Size of a reader's buffer: a piece, and a third so that no small rest is left of an extent."""
    return PIECE + PIECE // 3


def cut(entry: Entry) -> list[tuple[int, int]]:
    """(start, end) of the pieces of an extent, cut where a multiple of 1 MiB in the file does."""
    found, start = [], 0
    while entry.length - start > buffer_bytes():
        end = start + PIECE
        end -= (entry.offset + end) % crc.CHUNK
        found.append((start, end))
        start = end
    return [*found, (start, entry.length)]


class DeviceLoader:
    """Reader threads and pinned buffers of 16 MiB, two a reader; keep one for several loads. One load at a time.

    Raises `CheckpointError`.
    """

    def __init__(self, device: torch.device, threads: int | None = None, verify: bool = True) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.verify = torch.device("cuda", index), verify
        self.threads = threads or default_threads()
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="checkpoint-load")
        self._copying, self._checking = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(2 * self.threads):
            memory = torch.empty(buffer_bytes(), dtype=torch.uint8, pin_memory=True)
            self._free.put(_Buffer(memory, memory.numpy(), torch.cuda.Event()))

    def load(self, jobs: Iterable[Job]) -> None:
        """Fill all targets; they are complete and checked when this returns. Reading begins with the first job."""
        with quick_turns():
            self._load(jobs)

    def _load(self, jobs: Iterable[Job]) -> None:
        feed: SimpleQueue[_Piece | None] = SimpleQueue()
        filled: SimpleQueue[_Filled] = SimpleQueue()
        for stream in (self._copying, self._checking):
            stream.wait_stream(torch.cuda.current_stream(self.device))
        work = [self._executor.submit(self._read, feed, filled) for _ in range(self.threads)]
        batches = _Batches(self._on_device)
        transfer = _Transfer(self, batches)
        try:
            for piece in batches.pieces(jobs):
                feed.put(piece)
                transfer.fed += 1
                while not filled.empty():
                    transfer.send(filled.get())
        finally:
            batches.complete = True
            for _ in work:
                feed.put(None)
            while transfer.sent < transfer.fed:
                transfer.send_next(filled)
            transfer.finish()
        transfer.raise_errors()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _on_device(self, job: Job) -> bool:
        """Whether the job's checksums can be computed from its target."""
        fits = job.target.data_ptr() % 4 == 0 and job.entry.length % 4 == 0
        return self.verify and fits and device_crc.usable(job.target.device)

    def _read(self, feed: SimpleQueue[_Piece | None], filled: SimpleQueue[_Filled]) -> None:
        while (piece := feed.get()) is not None:
            buffer = self._free.get()
            error: BaseException | None = None
            try:
                self._read_piece(piece, buffer)
            except BaseException as problem:
                error = problem
            filled.put((piece, buffer, error))

    def _read_piece(self, piece: _Piece, buffer: _Buffer) -> None:
        data = buffer.array[: piece.length]
        with readable(f"reading {piece.container.path}"):
            piece.container._pread_into(piece.offset, data)
        for entry, start, first, last in piece.check if self.verify else ():
            at = entry.offset + start
            number = at // crc.CHUNK - entry.offset // crc.CHUNK
            crcs = crc.chunk_crcs(entry.seed(), data[first:last], at, number)
            piece.container.compare(entry, crcs, number)


@dataclass(slots=True)
class _Buffer:
    """Pinned memory as a tensor and as an array, and the event of the last copy from it."""

    memory: torch.Tensor
    array: NDArray[np.uint8]
    copied: torch.cuda.Event


_Filled = tuple[_Piece, _Buffer, BaseException | None]


class _Transfer:
    """The calling thread's side of a load: copies what the readers filled, gives buffers back, starts the checks."""

    def __init__(self, loader: DeviceLoader, batches: _Batches) -> None:
        self.fed = self.sent = 0
        self._loader, self._batches = loader, batches
        self._under_way: deque[_Buffer] = deque()
        self._errors: list[BaseException] = []
        self._arrived: list[int] = []
        self._spread: list[list[_Piece]] = []
        self._held: dict[int, list[torch.Tensor]] = {}
        self._checked = 0
        self._flags: list[tuple[list[Job], torch.Tensor]] = []

    def send_next(self, filled: SimpleQueue[_Filled]) -> None:
        """Send one piece, or make a buffer free where the readers may be waiting for one."""
        if filled.empty() and self._under_way:
            self._recycle(wait=True)
        else:
            self.send(filled.get())

    def send(self, found: _Filled) -> None:
        """Enqueue the copies of a filled buffer."""
        piece, buffer, error = found
        self.sent += 1
        if error is not None or self._errors:
            self._errors += [] if error is None else [error]
            self._loader._free.put(buffer)
            return
        with torch.cuda.stream(self._loader._copying):
            if len(piece.targets) > 1 and device_crc.usable(piece.targets[0][0].device):
                self._copy_together(piece, buffer)
            else:
                for target, at in piece.targets:
                    target.copy_(buffer.memory[at : at + target.numel()], non_blocking=True)
            buffer.copied.record(self._loader._copying)
        self._under_way.append(buffer)
        self._note(piece)
        self._recycle()

    def _copy_together(self, piece: _Piece, buffer: _Buffer) -> None:
        """Small targets: one copy to the device now; there a kernel spreads a whole batch of them."""
        device = piece.targets[0][0].device
        together = torch.empty(piece.length, dtype=torch.uint8, device=device)
        together.copy_(buffer.memory[: piece.length], non_blocking=True)
        self._held.setdefault(piece.batch, []).append(together)
        piece.arrived_at = together.data_ptr()

    def _recycle(self, wait: bool = False) -> None:
        while self._under_way and (wait or self._under_way[0].copied.query()):
            buffer = self._under_way.popleft()
            if wait:
                buffer.copied.synchronize()
                wait = False
            self._loader._free.put(buffer)

    def _note(self, piece: _Piece) -> None:
        while len(self._arrived) <= piece.batch:
            self._arrived.append(0)
            self._spread.append([])
        self._arrived[piece.batch] += piece.length
        if piece.arrived_at:
            self._spread[piece.batch].append(piece)
        self._check_whole_batches()

    def _check_whole_batches(self) -> None:
        """Start the checks of batches that no more pieces will be added to and that are there."""
        lengths = self._batches.lengths
        known = len(lengths) if self._batches.complete else len(lengths) - 1
        while self._checked < min(known, len(self._arrived)) and self._arrived[self._checked] == lengths[self._checked]:
            self._check(self._checked)
            self._checked += 1

    def _check(self, batch: int) -> None:
        jobs, pieces = self._batches.jobs[batch], self._spread[batch]
        self._loader._checking.wait_stream(self._loader._copying)
        with torch.cuda.stream(self._loader._checking):
            _spread(pieces)
            for together in self._held.pop(batch, ()):
                if together.is_cuda:
                    together.record_stream(self._loader._checking)
            rows = [row for job in jobs for row in _rows(job)]
            if rows:
                self._flags.append((jobs, device_crc.check(rows, jobs[0].target.device)))

    def finish(self) -> None:
        """Wait for the device; all buffers are free again."""
        if not self._errors:
            self._check_whole_batches()
        for stream in (self._loader._copying, self._loader._checking):
            stream.synchronize()
        while self._under_way:
            self._loader._free.put(self._under_way.popleft())

    def raise_errors(self) -> None:
        """The first error of a reader, or `CheckpointError` for the first chunk that is wrong."""
        if self._errors:
            raise self._errors[0]
        for jobs, flags in self._flags:
            wrong = flags.cpu().nonzero().view(-1).tolist()
            chunks = [(job, chunk) for job in jobs for chunk in range(len(job.entry.crcs))] if wrong else []
            for job, chunk in (chunks[index] for index in wrong):
                # Whatever the chunk's checksum is, it isn't the stored one.
                job.container.compare(job.entry, [job.entry.crcs[chunk] ^ 1], chunk)


def _spread(pieces: list[_Piece]) -> None:
    """Copy small extents from where they arrived to their targets."""
    tables: dict[tuple[object, ...], Table] = {}
    if not pieces:
        return
    base = pieces[0].targets[0][0]
    for piece in pieces:
        for target, at in piece.targets:
            copy_rows(tables, piece.arrived_at + at, target.data_ptr() - base.data_ptr(), target.numel())
    for (_, word), table in tables.items():
        assert isinstance(word, int)
        triton_tiles.copy_many(*table.upload(base.device), base, word)


def _rows(job: Job) -> list[tuple[int, int, int, int]]:
    """The job's chunks as `device_crc.check` takes them."""
    entry, address = job.entry, job.target.data_ptr()
    count = len(entry.crcs)
    starts = [crc.chunk_start(entry.offset, chunk) for chunk in range(count)]
    ends = [*starts[1:], entry.length]
    seeds = crc.chunk_seeds(entry.seed(), 0, count)
    return [
        (address + start, (end - start) // 4, seed, stored)
        for start, end, seed, stored in zip(starts, ends, seeds, entry.crcs, strict=True)
    ]


class _Batches:
    """Cuts jobs into pieces; jobs whose checksums the GPU computes are kept by batch, with the batch's bytes."""

    def __init__(self, on_device: Callable[[Job], bool]) -> None:
        self._on_device = on_device
        self.complete = False
        self.jobs: list[list[Job]] = [[]]
        self.lengths = [0]

    def pieces(self, jobs: Iterable[Job]) -> Iterator[_Piece]:
        """Small extents that lie side by side make one piece; large ones make several."""
        run: list[Job] = []
        for job in jobs:
            small = job.entry.length < SMALL
            if run and not (small and _continues(run, job)):
                yield self._run(run)
                run = []
            if small:
                run.append(job)
            else:
                yield from self._large(job)
        if run:
            yield self._run(run)

    def _account(self, length: int) -> int:
        self.lengths[-1] += length
        return len(self.lengths) - 1

    def _close_full(self) -> None:
        if self.lengths[-1] >= BATCH:
            self.lengths.append(0)
            self.jobs.append([])

    def _keep(self, job: Job) -> bool:
        """Note a job for the GPU's checking, if it can be."""
        if self._on_device(job):
            self.jobs[-1].append(job)
            return True
        return False

    def _large(self, job: Job) -> Iterator[_Piece]:
        self._close_full()
        checked, entry = self._keep(job), job.entry
        for start, end in cut(entry):
            batch, length = self._account(end - start), end - start
            piece = _Piece(job.container, entry.offset + start, length, [(job.target[start:end], 0)], batch)
            if not checked:
                piece.check = [(entry, start, 0, length)]
            yield piece

    def _run(self, run: list[Job]) -> _Piece:
        self._close_full()
        first, last = run[0].entry, run[-1].entry
        unchecked = [job for job in run if not self._keep(job)]
        length = last.offset + last.length - first.offset
        targets = [(job.target, job.entry.offset - first.offset) for job in run]
        piece = _Piece(run[0].container, first.offset, length, targets, self._account(length))
        for job in unchecked:
            at = job.entry.offset - first.offset
            piece.check.append((job.entry, 0, at, at + job.entry.length))
        return piece


def _continues(run: list[Job], job: Job) -> bool:
    last = run[-1].entry
    gap = job.entry.offset - last.offset - last.length
    together = job.entry.offset + job.entry.length - run[0].entry.offset
    return job.container is run[0].container and 0 <= gap < PAGE and together <= PIECE

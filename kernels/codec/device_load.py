"""From page cache or disk to the GPU: several threads read into pinned buffers, each copying on its own stream.

The pages of a mapped file aren't pinned, so the driver would copy them through a small buffer of its own. Here the
bytes are read into pinned buffers that stay warm, at the speed of several threads together; the copies overlap the
reads. Checksums are computed on the GPU from the bytes as they arrived there (see `device_crc`), while later ones are
read; where that can't be done, by the threads from what they read. Either way the load ends only when all are right.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from queue import SimpleQueue

import torch

from costlab.kernels.codec import crc, device_crc
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.layout import PAGE, Entry

PIECE = 8 << 20
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
    check: list[tuple[Entry, int, int, int]] = field(default_factory=list)


def default_threads() -> int:
    """Reader threads: the machine's cores, at most 16."""
    return min(16, os.cpu_count() or 1)


def buffer_bytes() -> int:
    """Size of a reader's buffer: a piece, and a quarter so that no small rest is left of an extent."""
    return PIECE + PIECE // 4


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
    """Reader threads with two pinned buffers of 10 MiB each; keep one for several loads. Raises `CheckpointError`."""

    def __init__(self, device: torch.device, threads: int | None = None, verify: bool = True) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.verify = torch.device("cuda", index), verify
        self.threads = threads or default_threads()
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="checkpoint-load")
        self._local = threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._checking: torch.cuda.Stream | None = None

    def load(self, jobs: Iterable[Job]) -> None:
        """Fill all targets; they are complete and checked when this returns. Reading begins with the first job."""
        feed: SimpleQueue[_Piece | None] = SimpleQueue()
        done: SimpleQueue[tuple[int, int]] = SimpleQueue()
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        work = [self._executor.submit(self._drain, feed, done, ready) for _ in range(self.threads)]
        batches = _Batches(self._on_device)
        try:
            for piece in batches.pieces(jobs):
                feed.put(piece)
        finally:
            for _ in work:
                feed.put(None)
        wrong = [(rows, self._check(rows)) for rows in self._complete(batches, done) if rows]
        errors = [error for future in work if (error := future.exception())]
        if errors:
            raise errors[0]
        if self._checking is not None:
            self._checking.synchronize()
        for rows, flags in wrong:
            _raise_for(rows, flags)

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _on_device(self, job: Job) -> bool:
        """Whether the job's checksums can be computed from its target."""
        fits = job.target.data_ptr() % 4 == 0 and job.entry.length % 4 == 0
        return self.verify and fits and device_crc.usable(job.target.device)

    def _complete(self, batches: _Batches, done: SimpleQueue[tuple[int, int]]) -> Iterator[list[Row]]:
        """Each batch's rows when all its bytes are enqueued; ends early when a reader failed."""
        left = list(batches.lengths)
        for number, jobs in enumerate(batches.jobs):
            rows = [row for job in jobs for row in _rows(job)]
            while left[number] > 0:
                batch, length = done.get()
                if batch < 0:
                    return
                left[batch] -= length
            yield rows

    def _check(self, rows: list[Row]) -> torch.Tensor:
        """Checksums of chunks whose copies are enqueued on the readers' streams; enqueued too."""
        if self._checking is None:
            self._checking = torch.cuda.Stream(self.device)
        for stream in list(self._streams):
            self._checking.wait_stream(stream)
        with torch.cuda.stream(self._checking):
            return device_crc.check([row.numbers for row in rows], rows[0].device)

    def _resources(self) -> tuple[torch.cuda.Stream, list[tuple[torch.Tensor, torch.cuda.Event]]]:
        """This thread's stream and pinned buffers, made at its first piece."""
        if not hasattr(self._local, "resources"):
            torch.cuda.set_device(self.device)
            size = buffer_bytes()
            buffers = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
            self._local.resources = torch.cuda.Stream(self.device), buffers
            self._streams.append(self._local.resources[0])
        found: tuple[torch.cuda.Stream, list[tuple[torch.Tensor, torch.cuda.Event]]] = self._local.resources
        return found

    def _drain(
        self, feed: SimpleQueue[_Piece | None], done: SimpleQueue[tuple[int, int]], ready: torch.cuda.Event
    ) -> None:
        try:
            stream, buffers = self._resources()
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                for buffer, copied in cycle(buffers):
                    piece = feed.get()
                    if piece is None:
                        break
                    copied.synchronize()
                    self._move(piece, buffer)
                    copied.record(stream)
                    done.put((piece.batch, piece.length))
            stream.synchronize()
        except BaseException:
            done.put((-1, 0))
            raise

    def _move(self, piece: _Piece, buffer: torch.Tensor) -> None:
        data = buffer.numpy()[: piece.length]
        with readable(f"reading {piece.container.path}"):
            piece.container._pread_into(piece.offset, data)
        if self.verify:
            for entry, start, first, last in piece.check:
                at = entry.offset + start
                number = at // crc.CHUNK - entry.offset // crc.CHUNK
                crcs = crc.chunk_crcs(entry.seed(), data[first:last], at, number)
                piece.container.compare(entry, crcs, number)
        for target, at in piece.targets:
            target.copy_(buffer[at : at + target.numel()], non_blocking=True)


@dataclass(slots=True)
class Row:
    """One chunk to be checked on the GPU, and how to say that it is wrong."""

    numbers: tuple[int, int, int, int]
    job: Job
    chunk: int

    @property
    def device(self) -> torch.device:
        """Where its bytes are."""
        return self.job.target.device


def _rows(job: Job) -> Iterator[Row]:
    entry, address, seed = job.entry, job.target.data_ptr(), job.entry.seed()
    for chunk, stored in enumerate(entry.crcs):
        start = crc.chunk_start(entry.offset, chunk)
        end = min(crc.chunk_start(entry.offset, chunk + 1), entry.length)
        before = crc.of_bytes(seed + chunk.to_bytes(4, "little"))
        yield Row((address + start, (end - start) // 4, before, stored), job, chunk)


def _raise_for(rows: list[Row], wrong: torch.Tensor) -> None:
    """`CheckpointError` for the first chunk that is wrong, with tensor name and offset."""
    for index in wrong.cpu().nonzero().view(-1).tolist():
        row = rows[index]
        # Whatever the chunk's checksum is, it isn't the stored one.
        row.job.container.compare(row.job.entry, [row.job.entry.crcs[row.chunk] ^ 1], row.chunk)
    if bool(wrong.any()):
        raise CheckpointError("checksums are wrong")


class _Batches:
    """Cuts jobs into pieces; jobs whose checksums the GPU computes are kept by batch, with the batch's bytes."""

    def __init__(self, on_device: Callable[[Job], bool]) -> None:
        self._on_device = on_device
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

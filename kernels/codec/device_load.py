"""From page cache or disk to the GPU: threads read into pinned buffers and send them on their way themselves.

The pages of a mapped file aren't pinned, so the driver would copy them through a small buffer of its own. Here every
reader takes the next piece of the file, reads it into a pinned buffer and enqueues the copies from there. No thread
stands in between: one that handed every piece on would have to get the interpreter between sixteen others first.

Pieces are small, and of the buffers whose copies are done the one that was done last is the next to be filled: those
in use then stay in the processor's cache, which the bus reads from, and the memory carries the file once, not thrice.

Checksums are computed on the GPU from the bytes as they arrived there (see `device_crc`), a batch of pieces at a time
while later ones are read; where that can't be done, by the readers. Either way the load ends only when all are right.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from costlab.kernels.codec import crc, device_crc
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.htod import Copies
from costlab.kernels.codec.layout import PAGE, Entry
from costlab.kernels.codec.turns import quick_turns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE = 4 << 20
FIRST_PIECES = 1 << 20
BATCH = 128 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Fill `target` (uint8 [entry.length], contiguous, on a CUDA device) with the extent of `entry`."""

    container: Container
    entry: Entry
    target: torch.Tensor


@dataclass(slots=True)
class Part:
    """Bytes `start` to `end` of a job's extent: at `at` in their piece, to go to `address`."""

    job: Job
    start: int
    end: int
    at: int
    address: int

    @property
    def first_chunk(self) -> int:
        """Number of its first chunk in the extent. Pieces are cut between chunks, so parts hold whole ones."""
        offset = self.job.entry.offset
        return (offset + self.start) // crc.CHUNK - offset // crc.CHUNK

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return crc.chunk_count(self.job.entry.offset + self.start, self.end - self.start)


class Batch:
    """Pieces whose bytes are checked together. `parts` are those that the GPU checks."""

    def __init__(self) -> None:
        self.length = 0
        self.parts: list[Part] = []
        self.arrived = torch.cuda.Event(blocking=True)
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> None:
        """One more piece to be sent."""
        with self._lock:
            self._holders += 1

    def release(self) -> bool:
        """A piece was sent, or no more will come; whether that was the last of it."""
        with self._lock:
            self._holders -= 1
            return self._holders == 0


@dataclass(slots=True)
class Piece:
    """A stretch of a file that is read at once, up to `limit` in the file; `checks` are the reader's."""

    container: Container
    offset: int
    limit: int
    batch: Batch
    length: int = 0
    parts: list[Part] = field(default_factory=list)
    checks: list[Part] = field(default_factory=list)

    def takes(self, container: Container, offset: int) -> bool:
        """Whether bytes at this offset can be read along; what lies between two extents is less than a page."""
        end = self.offset + self.length
        return container is self.container and end <= offset < min(self.limit, end + PAGE)


class Run:
    """What the threads of one load share: pieces to be read, batches whose copies are enqueued, the first error."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.stopped = False
        self._whole: SimpleQueue[Batch | None] = SimpleQueue()

    def release(self, batch: Batch) -> None:
        """One holder of the batch less; the last one makes it ready to be checked."""
        if batch.release():
            batch.arrived.record(self._stream)
            self._whole.put(batch)

    def fail(self, error: BaseException) -> None:
        """Keep the first error, end the readers and wake the calling thread."""
        self.error = self.error or error
        self.stopped = True
        self._whole.put(None)

    def whole(self) -> list[Batch]:
        """The batches that became ready since the last call, at least one; raises the first error."""
        found = [self._whole.get()]
        while not self._whole.empty():
            found.append(self._whole.get())
        if self.error is not None:
            raise self.error
        return [batch for batch in found if batch is not None]


class Cutter:
    """Cuts extents that come in file order into pieces, and pieces into batches; `batches` have been begun.

    The first pieces are small: the bus has something to do soon, and the readers don't all come at once.
    """

    def __init__(self, piece: int, threads: int, verify: bool, run: Run) -> None:
        self.batches = 0
        self._piece, self._threads, self._verify, self._run = piece, threads, verify, run
        self._cut = 0
        self._batch: Batch | None = None

    def pieces(self, jobs: Iterable[Job]) -> Iterator[Piece]:
        """Every byte of the jobs once, cut where a multiple of 1 MiB in the file does. The run gets whole batches."""
        piece: Piece | None = None
        for job in jobs:
            entry, start, address = job.entry, 0, job.target.data_ptr()
            while start < entry.length:
                at = entry.offset + start
                if piece is None or not piece.takes(job.container, at):
                    if piece is not None:
                        yield piece
                    piece = self._begin(job.container, at)
                end = min(entry.length, piece.limit - entry.offset)
                self._add(piece, Part(job, start, end, at - piece.offset, address + start))
                start = end
        if piece is not None:
            yield piece
        self._end_batch()

    def _begin(self, container: Container, offset: int) -> Piece:
        if self._batch is not None and self._batch.length >= BATCH:
            self._end_batch()
        if self._batch is None:
            self._batch = Batch()
            self.batches += 1
        self._batch.hold()
        size = min(self._piece, max(FIRST_PIECES, self._cut // (2 * self._threads)))
        return Piece(container, offset, (offset + size) // crc.CHUNK * crc.CHUNK, self._batch)

    def _add(self, piece: Piece, part: Part) -> None:
        piece.parts.append(part)
        added = part.at + part.end - part.start - piece.length
        piece.length += added
        piece.batch.length += added
        self._cut += added
        if self._verify:
            fits = part.address % 4 == 0 and (part.end - part.start) % 4 == 0
            on_device = fits and device_crc.usable(part.job.target.device)
            (piece.batch.parts if on_device else piece.checks).append(part)

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._run.release(self._batch)
        self._batch = None


@dataclass(slots=True)
class Buffer:
    """Pinned memory as an array and its address, and the event of the last copy from it."""

    array: NDArray[np.uint8]
    address: int
    copied: torch.cuda.Event


class Buffers:
    """Buffers to be filled: the last whose copies were done first, else the next whose copies will be."""

    def __init__(self, copies: Copies, buffers: Iterable[Buffer]) -> None:
        self._copies = copies
        self._ready = list(buffers)
        self._flying: deque[Buffer] = deque()
        self._lock = threading.Lock()

    def take(self) -> Buffer:
        """A buffer that nothing is copied from any more; there must be more buffers than takers."""
        with self._lock:
            while self._flying and self._copies.done(self._flying[0].copied):
                self._ready.append(self._flying.popleft())
            if self._ready:
                return self._ready.pop()
            buffer = self._flying.popleft()
        self._copies.wait(buffer.copied)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back whose copies, if any, are enqueued and recorded."""
        with self._lock:
            self._flying.append(buffer)

    def __len__(self) -> int:
        return len(self._ready) + len(self._flying)


Checked = tuple[list[Part], torch.Tensor]


def default_threads() -> int:
    """Reader threads: the machine's cores, at most 16."""
    return min(16, os.cpu_count() or 1)


class DeviceLoader:
    """Reader threads and pinned buffers of `piece` bytes (a multiple of 1 MiB), two a reader; keep one for many loads.

    A load raises `CheckpointError` for a file that can't be read or is damaged; whatever it raises, none of its threads
    and copies goes on. Loads from several threads take turns.
    """

    def __init__(
        self, device: torch.device, threads: int | None = None, verify: bool = True, piece: int | None = None
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.verify = torch.device("cuda", index), verify
        self.threads, self.piece = threads or default_threads(), piece or PIECE
        self._turn = threading.Lock()
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="checkpoint-load")
        self._copies, self._checking = Copies(self.device), torch.cuda.Stream(self.device)
        self._memory = [torch.empty(self.piece, dtype=torch.uint8, pin_memory=True) for _ in range(2 * self.threads)]
        made = (Buffer(m.numpy(), m.data_ptr(), self._copies.event()) for m in self._memory)
        self._buffers = Buffers(self._copies, made)

    def load(self, jobs: Iterable[Job]) -> None:
        """Fill all targets; they are complete and checked when this returns. Reading begins with the first job."""
        with self._turn, quick_turns():
            checked = self._load(self._here(jobs), Run(self._copies.stream))
        if checked:
            flags = torch.cat([flags for _, flags in checked]).cpu()
            _raise_wrong([part for parts, _ in checked for part in parts], flags)

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _here(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            if job.target.is_cuda and job.target.device != self.device:
                raise CheckpointError(f"{job.entry.name}: is on {job.target.device}, not on the loader's {self.device}")
            yield job

    def _load(self, jobs: Iterable[Job], run: Run) -> list[Checked]:
        cutter = Cutter(self.piece, self.threads, self.verify, run)
        readers: list[Future[None]] = []
        for stream in (self._copies.stream, self._checking):
            stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            for piece in cutter.pieces(jobs):
                run.pieces.put(piece)
                if len(readers) < self.threads:
                    readers.append(self._executor.submit(self._read, run))
                if run.stopped:
                    break
            run.pieces.put(None)
            done, checked = 0, []
            while done < cutter.batches:
                batches = run.whole()
                done += len(batches)
                checked += self._check(batches)
            return checked
        finally:
            self._end(run, readers)

    def _end(self, run: Run, readers: list[Future[None]]) -> None:
        run.stopped = True
        run.pieces.put(None)
        try:
            wait(readers)
        finally:
            for stream in (self._copies.stream, self._checking):
                stream.synchronize()

    def _read(self, run: Run) -> None:
        try:
            self._copies.enter()
            while self._next(run):
                pass
        except BaseException as error:
            run.fail(error)

    def _next(self, run: Run) -> bool:
        """Bring the next piece through a buffer; False when there is none."""
        buffer = self._buffers.take()
        try:
            piece = run.pieces.get()
            if piece is None or run.stopped:
                run.pieces.put(None)  # for the next reader
                return False
            self._fill(piece, buffer)
            if run.stopped:
                return False
            self._send(piece, buffer)
        finally:
            self._buffers.give(buffer)
        run.release(piece.batch)
        return True

    def _fill(self, piece: Piece, buffer: Buffer) -> None:
        """Read a piece, and check what the GPU can't."""
        data = buffer.array[: piece.length]
        with readable(f"reading {piece.container.path}"):
            piece.container._pread_into(piece.offset, data)
        for part in piece.checks:
            entry, first = part.job.entry, part.first_chunk
            found = data[part.at : part.at + part.end - part.start]
            crcs = crc.chunk_crcs(entry.seed(), found, entry.offset + part.start, first)
            piece.container.compare(entry, crcs, first)

    def _send(self, piece: Piece, buffer: Buffer) -> None:
        """Enqueue the copies of a filled buffer."""
        for part in piece.parts:
            self._copies.enqueue(part.address, buffer.address + part.at, part.end - part.start)
        self._copies.record(buffer.copied)

    def _check(self, batches: list[Batch]) -> list[Checked]:
        """Once they have arrived, compare checksums: a flag for each chunk of the parts, 0 where it is right."""
        parts = [part for batch in batches for part in batch.parts]
        rows = [row for part in parts for row in _rows(part)]
        if not rows:
            return []
        # The host waits, asleep: `check` uploads a table from pageable memory, for which it would spin in the stream.
        for batch in batches:
            batch.arrived.synchronize()
        with torch.cuda.stream(self._checking):
            return [(parts, device_crc.check(rows, parts[0].job.target.device))]


def _rows(part: Part) -> list[tuple[int, int, int, int]]:
    """The part's chunks as `device_crc.check` takes them."""
    entry, first, count = part.job.entry, part.first_chunk, part.chunks
    starts = [crc.chunk_start(entry.offset, number) - part.start for number in range(first, first + count)]
    sizes = (end - start for start, end in itertools.pairwise([*starts, part.end - part.start]))
    seeds = crc.chunk_seeds(entry.seed(), first, count)
    return [
        (part.address + start, size // 4, seed, stored)
        for start, size, seed, stored in zip(starts, sizes, seeds, entry.crcs[first : first + count], strict=True)
    ]


def _raise_wrong(parts: list[Part], flags: torch.Tensor) -> None:
    """Raise `CheckpointError` for the first chunk whose flag (int32, one a chunk) isn't 0."""
    wrong = flags.nonzero().view(-1).tolist()
    if not wrong:
        return
    chunks = [(part, part.first_chunk + number) for part in parts for number in range(part.chunks)]
    part, chunk = chunks[wrong[0]]
    # Whatever the chunk's checksum is, it isn't the stored one.
    part.job.container.compare(part.job.entry, [part.job.entry.crcs[chunk] ^ 1], chunk)

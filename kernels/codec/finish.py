"""The background half of a save: write staged slabs, append what is packed, commit the file, then the checkpoint."""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costlab.kernels.codec import crc, lossless, sparse
from costlab.kernels.codec.codecs import SPARSE, Codec, block_grid
from costlab.kernels.codec.commit import Site, commit, make_directory, report_failure
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, aligned_buffer
from costlab.kernels.codec.layout import (
    INDEX_OFFSET,
    PAGE,
    align,
    digest_of,
    extent_length,
    pack_index,
    part_offsets,
    place,
)
from costlab.kernels.codec.manifest import RankFile
from costlab.kernels.codec.plan import Item, Plan, Way
from costlab.kernels.codec.replica import Replica
from costlab.kernels.codec.slabs import Region, Slab, SlabPool
from costlab.kernels.codec.stage import Stager
from costlab.kernels.codec.writing import file_size

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

ZEROS_WORTH_CODING = 0.2
PACK_AHEAD = 8


@dataclass(slots=True)
class Timeline:
    """(stage, start, end) in seconds since the save was called; safe to add to from several threads."""

    origin: float = field(default_factory=time.perf_counter)
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, stage: str, start: float) -> None:
        """A stage that began at `start` (perf_counter) and ends now."""
        self.spans.append((stage, start - self.origin, time.perf_counter() - self.origin))

    def seconds(self, stage: str) -> float:
        """From the first start to the last end of a stage; 0 where it did not happen."""
        found = [span for span in self.spans if span[0] == stage]
        return max(s[2] for s in found) - min(s[1] for s in found) if found else 0.0


class FileSink:
    """The rank's file and, if there is one, its replica: both get the same bytes."""

    def __init__(self, path: Path, direct: bool, size: int, replica: Replica | None) -> None:
        self.file = AtomicFile(path, direct=direct)
        self.replica = replica
        try:
            self.file.allocate(size)
        except BaseException:
            self.file.abort()
            raise

    def write(self, data: Bytes, offset: int) -> None:
        """Write at an offset; from several threads."""
        self.file.write(data, offset)
        if self.replica is not None:
            self.replica.send(data, offset)


class Tail:
    """Appends extents behind the fixed part through a page-aligned buffer, as O_DIRECT asks."""

    SIZE = 4 << 20

    def __init__(self, sink: FileSink, start: int, head: Bytes) -> None:
        self._sink = sink
        self._buffer = aligned_buffer(self.SIZE)
        self._base = start // PAGE * PAGE
        self._used = head.size
        self._buffer[: head.size] = head

    @property
    def position(self) -> int:
        """The file offset that comes next."""
        return self._base + self._used

    def append(self, data: Bytes, offset: int) -> None:
        """Bytes at `offset`, zeros before it."""
        self._add(np.zeros(offset - self.position, np.uint8))
        self._add(data)

    def _add(self, data: Bytes) -> None:
        while data.size:
            count = min(data.size, self.SIZE - self._used)
            self._buffer[self._used : self._used + count] = data[:count]
            self._used += count
            data = data[count:]
            if self._used == self.SIZE:
                self._flush(self.SIZE)
                self._base += self.SIZE
                self._used = 0

    def _flush(self, size: int) -> None:
        self._sink.write(self._buffer[:size], self._base)

    def finish(self) -> None:
        """Write what is left, padded with zeros to a page."""
        if self._used:
            end = align(self._used, PAGE)
            self._buffer[self._used : end] = 0
            self._flush(end)


class SaveJob:
    """One save from the first staged slab to the commit.

    `launched`: the calling thread is done. `enqueued`: all that reads the state is enqueued on the device.
    `staged`: the state may change again.
    """

    def __init__(
        self, plan: Plan, site: Site, pool: SlabPool, writers: Executor, stager: Stager, direct: bool,
        replica: Replica | None, count_zeros: bool,
    ) -> None:  # fmt: skip
        self.plan, self.site, self.pool = plan, site, pool
        self.timeline = Timeline()
        self.launched, self.enqueued, self.staged = threading.Event(), threading.Event(), threading.Event()
        self.fixed, self.packed = Region(pool, plan.start, self.slab_full), Region(pool, 0, self.loose_full)
        self.failure: BaseException | None = None
        self.coded_later = plan.coded_later
        self.launch_parts: tuple[tuple[str, float], ...] = ()
        self.zeros: frozenset[str] = frozenset()
        self.replica_path: Path | None = None
        self.replica_error: str | None = None
        self.direct = False
        self._writers, self._stager, self._want_direct, self._replica = writers, stager, direct, replica
        self._sink: Future[FileSink] = Future()
        self._writes: list[Future[None]] = []
        self._loose: dict[int, Slab] = {}
        self._last_page = np.zeros(plan.fixed_end % PAGE, np.uint8)
        self._sorted = [item for item in plan.fixed if item.entry.length]
        self._ends = [item.end for item in self._sorted]
        self._nonzero: dict[str, int] | None = {} if count_zeros else None
        self._lock = threading.Lock()

    def open_soon(self) -> None:
        """Make directory and file in a thread, so that a slow filesystem doesn't delay the copies. Call it first."""
        self._writers.submit(self._open)

    def _open(self) -> None:
        start = time.perf_counter()
        try:
            make_directory(self.site)
            sink = FileSink(self.site.file, self._want_direct, self.plan.fixed_end, self._replica)
        except BaseException as error:
            self._sink.set_exception(error)
            return
        self.direct = sink.file.direct
        self.timeline.add("open", start)
        self._sink.set_result(sink)

    def slab_full(self, index: int, slab: Slab) -> None:
        """A slab of the file is enqueued: write it when the device has filled it."""
        self._writes.append(self._writers.submit(self._write_slab, index, slab, self._event()))

    def loose_full(self, index: int, slab: Slab) -> None:
        """A slab of what is packed before it is written."""
        self._loose[index] = slab

    def _event(self) -> torch.cuda.Event | None:
        if self._stager.start is None or self._stager.stream is None:
            return None
        import torch

        event = torch.cuda.Event()
        event.record(self._stager.stream)
        return event

    def _write_slab(self, index: int, slab: Slab, ready: torch.cuda.Event | None) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            low = index * self.pool.slab_bytes
            high = min(low + self.pool.slab_bytes, self.plan.fixed_end)
            sink = self._sink.result()
            start = time.perf_counter()
            self._zero_gaps(slab.array, low, high)
            self._check_in(slab.array, low, high)
            self.timeline.add("checksum", start)
            start = time.perf_counter()
            first, last = max(low, self.plan.start), high // PAGE * PAGE
            if last > first:
                sink.write(slab.array[first - low : last - low], first)
            if high == self.plan.fixed_end and high % PAGE:
                self._last_page = slab.array[last - low : high - low].copy()
            self.timeline.add("write", start)
        finally:
            self.pool.release(slab)

    def _zero_gaps(self, array: Bytes, low: int, high: int) -> None:
        """What the device left between values between file offsets `low` and `high` isn't ours to store."""
        gaps = self.plan.paddings
        for first, last in gaps[max(bisect.bisect_right(gaps, (low, low)) - 1, 0) :]:
            if first >= high:
                break
            if last > low:
                array[max(first, low) - low : min(last, high) - low] = 0

    def _check_in(self, array: Bytes, low: int, high: int) -> None:
        """Checksum the parts of extents between file offsets `low` and `high`; chunks never straddle slabs."""
        for item in self._sorted[bisect.bisect_right(self._ends, low) :]:
            entry = item.entry
            if entry.offset >= high:
                break
            start, end = max(entry.offset, low), min(item.end, high)
            first = start // crc.CHUNK - entry.offset // crc.CHUNK
            crcs = crc.chunk_crcs(entry.seed(), array[start - low : end - low], start, first)
            entry.crcs[first : first + len(crcs)] = crcs
            codes_end = min(end, entry.offset + entry.parts[0])
            if self._nonzero is not None and item.choice.sparse and entry.choice.codec in SPARSE and start < codes_end:
                found = int(np.count_nonzero(array[start - low : codes_end - low]))
                with self._lock:
                    self._nonzero[entry.name] = self._nonzero.get(entry.name, 0) + found

    def run(self) -> RankFile:
        """The background work; raises `CheckpointError`. Always frees the memory; tells the other ranks of failure."""
        receiving = None
        if self._replica is not None:
            receiving = self._replica.begin(self.site.directory.name, self._replica.source_name)
        try:
            self._wait_for_copies()
            file = self._write_all(self._sink.result())
        except BaseException as error:
            self._give_up(error)
            self._finish_replica(receiving, None)
            if isinstance(error, OSError):
                raise CheckpointError(f"saving {self.site.directory}: {error.strerror or error}") from error
            raise
        start = time.perf_counter()
        try:
            commit(self.site, file)
            self.timeline.add("commit", start)
        except OSError as error:
            report_failure(self.site, error)
            raise CheckpointError(f"committing {self.site.directory}: {error.strerror or error}") from error
        finally:
            self._finish_replica(receiving, file.size)  # the peer's disk may be slower than the commit
        return file

    def _give_up(self, error: BaseException) -> None:
        self.launched.wait()
        self._stager.abandon()
        self.fixed.abort()
        self.packed.abort()
        self.enqueued.set()
        for write in self._writes:
            write.exception()
        if self._sink.exception() is None:
            self._sink.result().file.abort()
        for slab in self._loose.values():
            self.pool.release(slab)
        self._loose = {}
        self.staged.set()
        report_failure(self.site, error)

    def _wait_for_copies(self) -> None:
        self.launched.wait()
        if self.failure is not None:
            raise self.failure
        start = time.perf_counter()
        self._stager.copy_direct(self.plan, self.fixed, self.packed)
        self.enqueued.set()
        self._stager.resolve(self.plan)
        self.plan.release()
        self.timeline.add("stage", start)
        self.staged.set()
        start = time.perf_counter()
        self._stager.copy_snapshot(self.plan, self.fixed, self.packed)
        self.timeline.add("copy", start)

    def _write_all(self, sink: FileSink) -> RankFile:
        for write in self._writes:
            write.result()
        start = time.perf_counter()
        tail = Tail(sink, self.plan.fixed_end, self._last_page)
        self._append_packed(tail)
        self._append_patches(tail)
        self.zeros = self._zeros()
        entries = [item.entry for item in self.plan.items]
        site = self.site
        header, index, table = pack_index(entries, tail.position, site.step, site.rank, site.world_size)
        tail.append(np.frombuffer(table, np.uint8), align(tail.position, PAGE))
        tail.finish()
        self.timeline.add("pack", start)
        start = time.perf_counter()
        sink.file.sync()
        sink.write(_front(header, index), 0)
        sink.file.commit(file_size(header))
        self.timeline.add("sync", start)
        return RankFile(site.file.name, file_size(header), digest_of(header, index).hex())

    def _append_packed(self, tail: Tail) -> None:
        """Compress or code the zeros of the packed items, several at a time, and append them."""
        try:
            under_way: deque[tuple[Item, Future[Bytes]]] = deque()
            for item in self.plan.packed:
                under_way.append((item, self._writers.submit(self._pack, item)))
                # A window, because the packed bytes are held until their turn comes.
                if len(under_way) > PACK_AHEAD:
                    _append(tail, under_way[0][0], under_way.popleft()[1].result())
            for item, packed in under_way:
                _append(tail, item, packed.result())
        finally:
            for slab in self._loose.values():
                self.pool.release(slab)
            self._loose = {}

    def _pack(self, item: Item) -> Bytes:
        entry = item.entry
        staged = self._staged_bytes(item.staged_at, entry.length)
        if item.choice.codec is Codec.ZSTD:
            values, structure = lossless.compress(staged, entry.dtype.itemsize)
            entry.choice = item.choice
            return _extent(item, values, np.empty(0, np.uint8), structure)
        codes_at, scales_at, _ = part_offsets(entry.parts)
        codes = staged[codes_at : codes_at + entry.parts[0]]
        scales = staged[scales_at : scales_at + entry.parts[1]]
        if self._nonzero is not None:
            with self._lock:
                self._nonzero[entry.name] = int(np.count_nonzero(codes))
        entry.layout, values, structure = sparse.pack(codes, block_grid(entry.shape, entry.choice.block).cols)
        return _extent(item, values, scales, structure)

    def _staged_bytes(self, offset: int, length: int) -> Bytes:
        size, out, done = self.pool.slab_bytes, np.empty(length, np.uint8), 0
        while done < length:
            index, at = divmod(offset + done, size)
            count = min(length - done, size - at)
            out[done : done + count] = self._loose[index].array[at : at + count]
            done += count
        return out

    def _append_patches(self, tail: Tail) -> None:
        for item in self.plan.items:
            if item.patch.size:
                offset = place(tail.position, item.patch.size)
                item.entry.patch_offset, item.entry.patch_length = offset, item.patch.size
                item.entry.patch_crcs = crc.chunk_crcs(item.entry.seed(patch=True), item.patch, offset)
                tail.append(item.patch, offset)

    def _zeros(self) -> frozenset[str]:
        """Names of tensors with enough zero codes to be worth coding them at the next save."""
        if self._nonzero is None:
            return frozenset(item.entry.name for item in self.plan.packed if item.choice.codec is not Codec.ZSTD)
        numel = {item.entry.name: item.entry.numel for item in self.plan.items if item.way is Way.KERNEL}
        counted = {n: k for n, k in self._nonzero.items() if n in numel}
        return frozenset(n for n, k in counted.items() if 1 - k / numel[n] > ZEROS_WORTH_CODING)

    def _finish_replica(self, receiving: Future[Path | None] | None, size: int | None) -> None:
        """End the exchange (no size: given up). A lost replica is reported, it doesn't undo the save."""
        if self._replica is None or receiving is None:
            return
        start = time.perf_counter()
        self._replica.end(size)
        error = receiving.exception()
        self.replica_error = self._replica.failed or (None if error is None else str(error))
        self.replica_path = None if error is not None else receiving.result()
        self.timeline.add("replica", start)


def _front(header: bytes, index: bytes) -> Bytes:
    """Header and index as the file's first pages."""
    front = aligned_buffer(align(INDEX_OFFSET + len(index), PAGE))
    front[: len(header)] = np.frombuffer(header, np.uint8)
    front[INDEX_OFFSET : INDEX_OFFSET + len(index)] = np.frombuffer(index, np.uint8)
    return front


def _extent(item: Item, values: Bytes, scales: Bytes, structure: Bytes) -> Bytes:
    parts = (values.size, scales.size, structure.size)
    item.entry.parts, item.entry.length = parts, extent_length(parts)
    extent = np.zeros(item.entry.length, np.uint8)
    for at, piece in zip(part_offsets(parts), (values, scales, structure), strict=True):
        extent[at : at + piece.size] = piece
    return extent


def _append(tail: Tail, item: Item, extent: Bytes) -> None:
    entry = item.entry
    if not extent.size:
        return
    entry.offset = place(tail.position, extent.size)
    entry.crcs = crc.chunk_crcs(entry.seed(), extent, entry.offset)
    tail.append(extent, entry.offset)

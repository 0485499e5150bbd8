"""Where the time of a load from the page cache to a GPU goes, and what speed is attainable. Under a minute on an H200.

    python tests/benchmarks/load_experiment.py --out load.json          4 GiB of weights and AdamW moments
    python tests/benchmarks/load_experiment.py --tiny --out load.json   tries the script; no GPU: memmove

Speeds are medians of five after one that isn't counted, and of the whole load: from the call until everything is on the
device and checked. `raw` is the same work without the product's code: the readers of ctypes' pread into pinned memory,
each copying on. With `one target` all bytes go to one buffer, with `parts` to the tensors. What doesn't fit in
`--seconds` isn't measured, which is said.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from common import result
from load_aio import Reads
from load_standin import without_gpu
from load_timeline import measure_timeline

from costlab.kernels.codec import device_load, turns
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.device_load import DeviceLoader, Job
from costlab.kernels.codec.htod import Copies
from costlab.kernels.codec.pipeline import AsyncCheckpointer

GB, MIB = 1e9, 1 << 20
SMALL = 256 << 10
DEPTH = 2  # reads under way in a lane
Plan = list[tuple[int, int, list[tuple[int, int, int]]]]
now = time.perf_counter


@dataclass
class Experiment:
    """What is loaded, the results so far, and until when to go on."""

    tiny: bool
    root: Path
    deadline: float
    device: torch.device
    repeats: int = 5
    ceiling: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[list[float]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)

    @property
    def total(self) -> int:
        """Bytes that a load brings."""
        return sum(job.entry.length for job in self.jobs)

    def add(self, metric: str, value: float, unit: str, n: int = 1) -> None:
        """Keep a result and print it; speeds stand beside the ceiling."""
        against = {"peer": "HtoD", "peer_value": self.ceiling} if unit == "GB/s" and self.ceiling else {}
        row = result(metric, value, unit, n=n, **against)
        self.results.append(row)
        ratio = "" if row["ratio"] is None else f"   {row['ratio']:.3f} of HtoD"
        print(f"  {metric:<66} {value:>9.2f} {unit}{ratio}", flush=True)

    def speed(self, metric: str, work: Callable[[], object], nbytes: int | None = None) -> None:
        """Time a call and keep its GB/s."""
        if now() > self.deadline:
            print(f"  {metric:<66} not measured: out of time", flush=True)
            return
        taken = [timed(work) for _ in range(self.repeats + 1)][1:]
        self.add(metric, (nbytes or self.total) / statistics.median(taken) / GB, "GB/s", self.repeats)


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call, the device being idle before and after."""
    torch.cuda.synchronize()
    start = now()
    work()
    torch.cuda.synchronize()
    return now() - start


# What is loaded


def save(experiment: Experiment) -> Path:
    """A checkpoint as `checkpoint_bench` saves it, read once: its directory."""
    state: dict[str, Any]
    if experiment.tiny:
        sizes = itertools.chain.from_iterable((MIB, 2048, 2048, 1) for _ in range(6))
        state = {f"layer{i:02}": torch.randn(n) for i, n in enumerate(sizes)}
    else:
        from checkpoint_common import Bench, Workload

        state = Workload(Bench(False, experiment.root, "")).state()
    with AsyncCheckpointer(experiment.root / "saved", "exact", gate_every=0) as checkpointer:
        report = checkpointer.save(0, state).result()
    assert report is not None
    for path in report.directory.glob("rank-*.clck"):
        with path.open("rb", buffering=0) as source:
            while source.read(16 << 20):
                pass
    return report.directory


def jobs_of(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> list[Job]:
    """Loads of all tensors, in the order of the file."""
    file = checkpoint.files[0]
    found = [
        Job(file, entry, state[name].view(-1).view(torch.uint8))
        for name, entry in file.entries.items() if name in state and entry.length
    ]  # fmt: skip
    return sorted(found, key=lambda job: job.entry.offset)


def equal(experiment: Experiment) -> bool:
    """Whether some of the targets hold what the file has; clears them."""
    found = True
    for job in experiment.jobs[:: max(1, len(experiment.jobs) // 40)]:
        found = found and torch.equal(job.target.cpu(), torch.from_numpy(job.container.extent(job.entry)))
    for job in experiment.jobs:
        job.target.zero_()
    return found


# Parts of the way


def measure_ceiling(experiment: Experiment) -> None:
    """Copies of 1 GiB from pinned memory, and of pieces from a buffer that is in the cache."""
    pinned, size = experiment.pinned, experiment.pinned.nbytes
    there = torch.empty(size, dtype=torch.uint8, device=experiment.device)

    def four() -> None:
        for _ in range(4):
            there.copy_(pinned, non_blocking=True)

    experiment.speed(f"HtoD, 4 x {size // MIB} MiB from pinned memory", four, 4 * size)
    experiment.ceiling = experiment.results[-1]["value"]
    copies = Copies(experiment.device)
    copies.enter()
    for piece in (2, 8, 16, 32):
        step = min(piece * MIB, size)

        def run(step: int = step) -> None:
            for at in range(0, size, step):
                copies.enqueue(there.data_ptr() + at, pinned.data_ptr() + at % (64 * MIB), min(step, size - at))
            copies.stream.synchronize()

        experiment.speed(f"HtoD, pieces of {piece} MiB one after another", run, size)


def reader_pool(threads: int) -> ThreadPoolExecutor:
    """Threads that are there before the clock starts."""
    pool, together = ThreadPoolExecutor(threads), threading.Barrier(threads)
    list(pool.map(lambda _: together.wait(), range(threads)))
    return pool


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_libc.pread.restype = ctypes.c_ssize_t


def read(fd: int, address: int, length: int, offset: int) -> None:
    """pread all of it, by ctypes: lets go of the interpreter."""
    got = _libc.pread(fd, address, length, offset)
    if got != length:
        raise OSError(ctypes.get_errno(), f"read {got} of {length} bytes at {offset}")


def plan_of(experiment: Experiment, piece: int, base: int | None) -> Plan:
    """(offset, length, [(target, place in the piece, size)]) of equal pieces: to `base`, or to the tensors."""
    first = experiment.jobs[0].entry.offset
    end = experiment.jobs[-1].entry.offset + experiment.jobs[-1].entry.length
    spans = [(at, min(piece, end - at)) for at in range(first, end, piece)]
    if base is not None:
        return [(at, length, [(base + at - first, 0, length)]) for at, length in spans]
    found: Plan = [(at, length, []) for at, length in spans]
    for job in experiment.jobs:
        start, stop, address = job.entry.offset, job.entry.offset + job.entry.length, job.target.data_ptr()
        for number in range((start - first) // piece, (stop - 1 - first) // piece + 1):
            at, length, parts = found[number]
            low, high = max(start, at), min(stop, at + length)
            parts.append((address + low - start, low - at, high - low))
    return found


class Raw:
    """A load without the product's code. `streams`: the readers take them in turn. `keep`: they keep the interpreter
    while they enqueue copies. `apart`: small parts are copied on streams of their own.
    """

    def __init__(
        self, experiment: Experiment, plan: Plan, threads: int, piece: int, streams: int = 1, keep: bool = True,
        apart: bool = False, copy: bool = True,
    ) -> None:  # fmt: skip
        self._fd, self._plan, self._threads = experiment.jobs[0].container._fd, plan, threads
        self._pool, self._apart, self._copy = reader_pool(threads), apart, copy
        self._copies = [Copies(experiment.device) for _ in range(2 * streams)]
        for copies in self._copies:
            copies._keep = copies._keep if keep else copies._let_go
        assert 2 * threads * piece <= experiment.pinned.nbytes
        self._slots: list[tuple[int, Any, Any]] = [
            (experiment.pinned.data_ptr() + i * piece, self._copies[0].event(), self._copies[0].event())
            for i in range(2 * threads)
        ]

    def load(self) -> None:
        """Read all pieces, and copy them."""
        numbers = itertools.count()
        list(self._pool.map(lambda reader: self._read(reader, numbers), range(self._threads)))
        for copies in self._copies:
            copies.stream.synchronize()

    def _read(self, reader: int, numbers: Iterator[int]) -> None:
        mine = 2 * reader % len(self._copies)
        large, small = self._copies[mine : mine + 2]
        large.enter()
        for turn, number in enumerate(numbers):
            if number >= len(self._plan):
                return
            offset, length, parts = self._plan[number]
            address, event, other = self._slots[2 * reader + turn % 2]
            large.wait(event)
            if self._apart:
                small.wait(other)
            read(self._fd, address, length, offset)
            if self._copy:
                for target, at, size in parts:
                    (small if self._apart and size < SMALL else large).enqueue(target, address + at, size)
                large.record(event)
                if self._apart:
                    small.record(other)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def raw_speed(experiment: Experiment, metric: str, base: int | None, threads: int, piece: int, **options: Any) -> None:
    """One raw variant."""
    if now() > experiment.deadline:
        print(f"  {metric:<66} not measured: out of time", flush=True)
        return
    raw = Raw(experiment, plan_of(experiment, piece * MIB, base), threads, piece * MIB, **options)
    try:
        experiment.speed(metric, raw.load)
    finally:
        raw.close()


def measure_reads(experiment: Experiment) -> None:
    """From the page cache to pinned memory and no further; then while the bus is busy with something else."""
    for threads, piece in ((8, 16), (16, 16), (16, 4)):
        name = f"page cache to pinned memory, {threads} x {piece} MiB"
        raw_speed(experiment, name, 0, threads, piece, copy=False)
    if now() > experiment.deadline:
        return
    # Pinned memory that no reader writes to.
    pinned = torch.empty(experiment.pinned.nbytes // 4, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=experiment.device)
    raw = Raw(experiment, plan_of(experiment, 16 * MIB, 0), 16, 16 * MIB, copy=False)
    reads, bus = [], []
    for _ in range(experiment.repeats + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(16):
            there.copy_(pinned, non_blocking=True)
        last.record()
        start = now()
        raw.load()
        reads.append(now() - start)
        torch.cuda.synchronize()
        bus.append(max(first.elapsed_time(last), 1e-6) / 1e3)
    raw.close()
    n = experiment.repeats
    experiment.add(
        "  the same, 16 x 16 MiB, while the bus is busy",
        experiment.total / statistics.median(reads[1:]) / GB,
        "GB/s",
        n,
    )
    experiment.add("  the bus meanwhile", 16 * pinned.nbytes / statistics.median(bus[1:]) / GB, "GB/s", n)


class OneThread:
    """A load that one thread of Python drives, while the C library's threads read (see load_aio.py)."""

    def __init__(self, experiment: Experiment, plan: Plan, lanes: int, piece: int, spare: int = 8) -> None:
        self._plan, self._lanes = plan, lanes
        self._descriptor = experiment.jobs[0].container._fd
        self._copies = Copies(experiment.device)
        self._copies.enter()
        count = DEPTH * lanes + spare
        assert count * piece <= experiment.pinned.nbytes
        self._ready = [(experiment.pinned.data_ptr() + i * piece, self._copies.event()) for i in range(count)]
        self._flying: deque[tuple[int, Any]] = deque()

    def load(self) -> None:
        """Read all pieces, and copy them."""
        reads, left, copies = Reads(self._descriptor, self._lanes, DEPTH), iter(self._plan), self._copies
        piece = next(left, None)
        try:
            while piece is not None or len(reads):
                while piece is not None and not reads.full:
                    buffer = self._buffer()
                    reads.begin(buffer[0], piece[1], piece[0], (piece, buffer))
                    piece = next(left, None)
                for (_, _, parts), (address, event) in reads.done():  # type: ignore[misc]
                    for target, at, size in parts:
                        copies.enqueue(target, address + at, size)
                    copies.record(event)
                    self._flying.append((address, event))
        finally:
            reads.close()
        copies.stream.synchronize()

    def _buffer(self) -> tuple[int, Any]:
        """The one whose copies were done last, else the next whose copies will be."""
        while self._flying and self._copies.done(self._flying[0][1]):
            self._ready.append(self._flying.popleft())
        if self._ready:
            return self._ready.pop()
        buffer = self._flying.popleft()
        self._copies.wait(buffer[1])
        return buffer


def one_thread_speed(experiment: Experiment, metric: str, base: int | None, lanes: int, piece: int) -> None:
    """One such variant."""
    driven = OneThread(experiment, plan_of(experiment, piece * MIB, base), lanes, piece * MIB)
    experiment.speed(metric, driven.load)


def measure_raw(experiment: Experiment) -> None:
    """What the same work attains without the product's code."""
    length = experiment.jobs[-1].entry.offset + experiment.jobs[-1].entry.length - experiment.jobs[0].entry.offset
    one = torch.empty(length, dtype=torch.uint8, device=experiment.device)
    base = one.data_ptr()
    for lanes, piece in ((16, 4), (16, 2), (16, 8), (12, 4), (24, 4)):
        one_thread_speed(experiment, f"one thread, {lanes} lanes x {piece} MiB, one target", base, lanes, piece)
    raw_speed(experiment, "raw 16 x 16 MiB, one target", base, 16, 16)
    raw_speed(experiment, "raw 16 x 16 MiB, parts", None, 16, 16)
    raw_speed(experiment, "raw 16 x 16 MiB, parts, small ones on another stream", None, 16, 16, apart=True)
    raw_speed(experiment, "raw 16 x 16 MiB, one target, interpreter let go", base, 16, 16, keep=False)
    raw_speed(experiment, "raw 16 x 16 MiB, parts, interpreter let go", None, 16, 16, keep=False)
    raw_speed(experiment, "raw 16 x 16 MiB, one target, two streams", base, 16, 16, streams=2)
    raw_speed(experiment, "raw 16 x 16 MiB, one target, a stream for each", base, 16, 16, streams=16)
    for threads, piece in ((16, 2), (16, 4), (16, 8), (8, 16), (12, 16), (24, 16)):
        raw_speed(experiment, f"raw {threads} x {piece} MiB, one target", base, threads, piece)


# The product


def otherwise(spin: bool) -> type[Copies]:
    """`Copies` whose waits spin, or whose every call lets go of the interpreter."""

    class Changed(Copies):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._keep = self._keep if spin else self._let_go

        def event(self) -> torch.cuda.Event:
            event = torch.cuda.Event(blocking=not spin)
            event.record(self.stream)
            return event

    return Changed


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a module's name, for a while."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def load_speed(experiment: Experiment, metric: str, threads: int, piece: int, verify: bool) -> None:
    """The loader with these settings."""
    if now() > experiment.deadline:
        print(f"  {metric:<66} not measured: out of time", flush=True)
        return
    loader = DeviceLoader(experiment.device, threads, verify, piece * MIB)
    try:
        experiment.speed(metric, partial(loader.load, experiment.jobs))
    finally:
        loader.close()


def measure_checkpoint(experiment: Experiment, checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    """`Checkpoint.load` as users call it, and what of it is before the loader begins and after it ended."""
    experiment.speed("Checkpoint.load, verified", partial(checkpoint.load, state))
    loader = next(iter(checkpoint._loaders.values()), None)
    if loader is None:
        return
    marks: list[tuple[float, float]] = []
    plain = loader.load

    def marked(jobs: Iterable[Job]) -> None:
        start = now()
        plain(jobs)
        marks.append((start, now()))

    with replaced(loader, "load", marked):
        spans = []
        for _ in range(experiment.repeats):
            start = now()
            checkpoint.load(state)
            spans.append((start, now()))
    before, after = zip(*((m[0] - s[0], s[1] - m[1]) for m, s in zip(marks, spans, strict=True)), strict=True)
    experiment.add("  of it before the loader begins", statistics.median(before) * 1e3, "ms", len(before))
    experiment.add("  of it after the loader's end", statistics.median(after) * 1e3, "ms", len(after))


def measure_settings(experiment: Experiment) -> None:
    """Threads, sizes, checks, the switch interval, and how readers wait."""
    for verify in (True, False):
        load_speed(experiment, f"loader 16 x 4 MiB, {_checked(verify)}", 16, 4, verify)
    for name, quick in (("5 ms, Python's own", 5e-3), ("5 us", 5e-6)):
        for verify in (True, False):
            with replaced(turns, "QUICK", quick):
                load_speed(experiment, f"  switch interval {name}, {_checked(verify)}", 16, 4, verify)
    for name, spin in (("waits that spin", True), ("interpreter let go while enqueuing", False)):
        with replaced(device_load, "Copies", otherwise(spin)):
            load_speed(experiment, f"  {name}, checked", 16, 4, True)
    for first in (4, 16):
        with replaced(device_load, "FIRST_PIECES", first * MIB):
            load_speed(experiment, f"  first pieces of {first} MiB instead of 1, checked", 16, 4, True)
    for batch in (64, 512):
        with replaced(device_load, "BATCH", batch * MIB):
            load_speed(experiment, f"  batches of {batch} MiB instead of 128, checked", 16, 4, True)
    for verify, threads, piece in itertools.product((True, False), (16, 12, 24), (4, 2, 8, 16)):
        if (threads, piece) != (16, 4):
            load_speed(experiment, f"loader {threads} x {piece} MiB, {_checked(verify)}", threads, piece, verify)


def _checked(verify: bool) -> str:
    return "checked" if verify else "not checked"


def environment(experiment: Experiment) -> dict[str, Any]:
    """What the figures were taken on."""
    cuda = torch.cuda.is_available()
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None, "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "cpus": os.cpu_count(), "kernel": platform.release(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "l3": cache.read_text().strip() if cache.exists() else None, "load_average": os.getloadavg()[0],
        "tiny": experiment.tiny, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def run(experiment: Experiment) -> None:
    """All parts, those that decide first."""
    with Checkpoint.open(save(experiment)) as checkpoint:
        names = [n for n in checkpoint.names if not checkpoint.places[n][0][1].kind]
        like = {n: checkpoint.tensor(n, verify=False) for n in names}
        state = {n: torch.zeros_like(t, device=experiment.device) for n, t in like.items()}
        experiment.jobs = jobs_of(checkpoint, state)
        print(f"  {len(experiment.jobs)} tensors, {experiment.total / 2**30:.2f} GiB", flush=True)
        measure_ceiling(experiment)
        measure_reads(experiment)
        measure_checkpoint(experiment, checkpoint, state)
        for verify in (True, False):
            if now() < experiment.deadline:
                measure_timeline(experiment, verify)
        equal(experiment)
        raw_speed(experiment, "raw 16 x 16 MiB, parts (its bytes are compared)", None, 16, 16)
        experiment.add("raw: bytes are the file's", float(equal(experiment)), "yes = 1")
        one_thread_speed(experiment, "one thread, 16 lanes x 4 MiB, parts (its bytes are compared)", None, 16, 4)
        experiment.add("one thread: bytes are the file's", float(equal(experiment)), "yes = 1")
        load_speed(experiment, "loader 16 x 4 MiB, checked (its bytes are compared)", 16, 4, True)
        experiment.add("loader: bytes are the file's", float(equal(experiment)), "yes = 1")
        measure_raw(experiment)
        measure_settings(experiment)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="25 MB, two repeats")
    parser.add_argument("--seconds", type=float, default=55, help="measure nothing more after so long")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        parser.error("no CUDA GPU: only --tiny runs here")
    if not cuda:
        globals()["Copies"] = without_gpu()
    start = now()
    with tempfile.TemporaryDirectory(prefix="load-experiment-") as root:
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        experiment = Experiment(options.tiny, Path(root), start + options.seconds, device, 2 if options.tiny else 5)
        body = {"environment": environment(experiment), "results": experiment.results, "timeline": experiment.timeline}
        try:
            run(experiment)
        finally:
            experiment.add("the whole experiment", now() - start, "s")
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

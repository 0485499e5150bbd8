"""One load piece by piece: when what began and ended, and what the readers did with their time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from costlab.kernels.codec.device_load import DeviceLoader, Job

MIB = 1 << 20
now = time.perf_counter


@dataclass
class Turn:
    """A reader's turn with one piece: seconds of the host's clock, and of the thread's own for reading and sending."""

    reader: int
    length: int
    waited: float
    began: float
    read_cpu: float
    read_end: float
    sent: float
    send_cpu: float
    done: Any


class Traced(DeviceLoader):
    """A loader that notes when what happens."""

    def begin(self, events: list[Any]) -> None:
        """Forget the last load; `events` are for its pieces."""
        self.turns: list[Turn] = []
        self.checks: list[tuple[float, float]] = []
        self.ended = self.readers_ended = 0.0
        self._events = iter(events)
        self._local = threading.local()

    def _fill(self, piece: Any, buffer: Any) -> None:
        start, cpu = now(), time.thread_time()
        super()._fill(piece, buffer)
        self._local.read = (start, time.thread_time() - cpu, now())

    def _send(self, piece: Any, buffer: Any) -> None:
        cpu, done = time.thread_time(), next(self._events)
        super()._send(piece, buffer)
        self._copies.record(done)
        sent, last = now(), getattr(self._local, "last", None)
        start, read_cpu, read_end = self._local.read
        waited = start - last if last is not None else 0.0
        spent = time.thread_time() - cpu
        turn = Turn(threading.get_ident(), piece.length, waited, start, read_cpu, read_end, sent, spent, done)
        self.turns.append(turn)
        self._local.last = now()

    def _check(self, batches: Any) -> Any:
        start = now()
        found = super()._check(batches)
        self.checks.append((start, now()))
        return found

    def _end(self, run: Any, readers: Any) -> None:
        self.ended = now()
        super()._end(run, readers)
        self.readers_ended = now()


def measure_timeline(experiment: Any, verify: bool) -> None:
    """The quickest of some traced loads: when what began and ended, and what the readers did with their time."""
    loader = Traced(experiment.device, 16, verify)
    best: tuple[float, Callable[[], None]] | None = None
    for _ in range(experiment.repeats + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(experiment.total // MIB + len(experiment.jobs))]
        first = torch.cuda.Event(enable_timing=True)
        for event in (*events, first):
            event.record(loader._copies.stream)
        loader.begin(events)
        torch.cuda.synchronize()
        first.record(loader._copies.stream)
        start, fed = now(), [0.0]

        def jobs(fed: list[float] = fed) -> Iterator[Job]:
            yield from experiment.jobs
            fed[0] = now()

        loader.load(jobs())
        end = now()
        torch.cuda.synchronize()
        if best is None or end - start < best[0]:
            marks = {"fed": fed[0], "readers told to end": loader.ended, "all ended": loader.readers_ended, "end": end}
            turns_, checks = loader.turns, loader.checks
            best = (end - start, partial(report, experiment, verify, first, start, marks, turns_, checks))
    loader.close()
    assert best is not None
    best[1]()


def report(
    experiment: Any, verify: bool, first: Any, start: float, marks: dict[str, float], found: list[Turn],
    checks: list[tuple[float, float]],
) -> None:  # fmt: skip
    """Keep the summary of a traced load."""
    prefix = "timeline, checked" if verify else "timeline, not checked"
    copied = [first.elapsed_time(turn.done) for turn in found]
    readers = len({turn.reader for turn in found})
    times = {
        "first read begins": (min(turn.began for turn in found) - start) * 1e3,
        "first copy enqueued": (min(turn.sent for turn in found) - start) * 1e3,
        "first piece on the device": min(copied), "all pieces fed": (marks["fed"] - start) * 1e3,
        "last read ends": (max(turn.read_end for turn in found) - start) * 1e3, "last copy ends": max(copied),
        "last check enqueued": (max((last for _, last in checks), default=start) - start) * 1e3,
        "readers told to end": (marks["readers told to end"] - start) * 1e3,
        "readers and streams ended": (marks["all ended"] - start) * 1e3, "load ends": (marks["end"] - start) * 1e3,
    }  # fmt: skip
    for name, value in times.items():
        experiment.add(f"{prefix}: {name}", value, "ms")
    experiment.add(f"{prefix}: pieces", len(found), "")
    whole = readers * times["last read ends"] / 1e3
    read_wall, read_cpu = sum(t.read_end - t.began for t in found), sum(t.read_cpu for t in found)
    send_wall, send_cpu = sum(t.sent - t.read_end for t in found), sum(t.send_cpu for t in found)
    shares = {
        "reading, on a core": read_cpu, "reading, off it (interpreter, or no core)": read_wall - read_cpu,
        "sending, on a core": send_cpu, "sending, off it": send_wall - send_cpu,
        "waiting for a buffer or a piece": sum(t.waited for t in found),
        "the rest (starting, ending)": whole - read_wall - send_wall - sum(t.waited for t in found),
    }  # fmt: skip
    for name, value in shares.items():
        experiment.add(f"{prefix}: readers {name}", 100 * value / whole, "% of their time")
    order = sorted(range(len(found)), key=lambda i: copied[i])
    gaps = [copied[b] - copied[a] - found[b].length / experiment.ceiling / 1e6 for a, b in itertools.pairwise(order)]
    experiment.add(f"{prefix}: bus idle after the first piece", sum(max(0.0, gap) for gap in gaps), "ms")
    for begin, last in checks[-3:]:
        experiment.add(f"{prefix}: a last check begins", (begin - start) * 1e3, "ms")
        experiment.add(f"{prefix}: and is enqueued", (last - start) * 1e3, "ms")
    numbers = {ident: number for number, ident in enumerate(dict.fromkeys(turn.reader for turn in found))}
    for turn, at in zip(found, copied, strict=True):
        line = [(turn.began - start) * 1e3, (turn.read_end - start) * 1e3, (turn.sent - start) * 1e3, at]
        experiment.timeline.append([int(verify), numbers[turn.reader], turn.length, *(round(x, 3) for x in line)])

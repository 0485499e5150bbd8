"""Runs a program on process groups: a thread per track on the CPU, a stream per track on a GPU.

The order of transfers within a track is fixed and the same on all ranks, and a step's transfers are posted together,
so no order of arrival can deadlock. On the CPU each wait carries the communicator's time-out; on a GPU the host never
waits, NCCL's watchdog or the handle's `synchronize` does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule import compat
from costlab.kernels.schedule.errors import ScheduleAborted, ScheduleError, ScheduleTimeout
from costlab.kernels.schedule.program import Kind, Native, Program, Step

SLOTS = 2  # steps of a track whose receives may be posted at the same time


@dataclass
class Wires:
    """What a track transfers over.

    Attributes:
        group: process group of the track's point-to-point calls; tag keeps tracks apart where groups are shared.
        peers: global rank of each of the schedule's ranks.
        native: group of the track's backend collectives, None where it has none.
    """

    group: ProcessGroup
    peers: tuple[int, ...]
    tag: int = 0
    native: ProcessGroup | None = None


@dataclass
class Scratch:
    """Receive buffers by track, kept between calls; each holds two of the track's longest received slices."""

    _held: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def take(self, track: str, numel: int, like: Tensor) -> Tensor:
        """A flat buffer of `numel` elements. While a CUDA graph is captured it belongs to the graph instead."""
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return like.new_empty(numel)
        key = (track, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            held = self._held[key] = like.new_empty(numel)
        return held[:numel]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._held.values())


@dataclass
class Call:
    """One run of a program: the flat tensor it works on in place, and what surrounds it."""

    name: str
    rank: int
    flat: Tensor
    program: Program
    wires: Mapping[str, Wires]
    scratch: Mapping[str, Tensor]
    timeout: timedelta | None
    tag: Callable[[], AbstractContextManager[Any]] = nullcontext


def buffers(program: Program, flat: Tensor, scratch: Scratch) -> dict[str, Tensor]:
    """A receive buffer for every track that adds, or runs a backend's reduce-scatter: room for two steps."""
    sizes = {track: max((_scratch_elements(step) for step in steps), default=0) for track, steps in program.items()}
    return {track: scratch.take(track, SLOTS * size, flat) for track, size in sizes.items() if size}


def _scratch_elements(step: Step) -> int:
    if step.native is not None:
        return (step.native.stop - step.native.start) // step.native.size if step.native.what != "all_reduce" else 0
    return sum(op.stop - op.start for op in step.ops if op.kind == Kind.REDUCE)


class _Incoming(NamedTuple):
    """Receives of one step that have been posted, and what to add where once they are there."""

    works: list[Any]
    adds: list[tuple[Tensor, Tensor]]


def _operations(call: Call, track: str, number: int, sends: bool) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
    """The step's sends, or its receives with the adds that follow them; empty slices are left out on both sides."""
    wires, flat = call.wires[track], call.flat
    posts: list[Any] = []
    adds: list[tuple[Tensor, Tensor]] = []
    held = call.scratch.get(track)
    used = 0 if held is None else number % SLOTS * (held.numel() // SLOTS)
    for op in call.program[track][number].ops:
        size = op.stop - op.start
        if size == 0 or (op.kind == Kind.SEND) != sends:
            continue
        place = flat[op.start : op.stop]
        if op.kind == Kind.REDUCE and held is not None:
            received = held[used : used + size]
            used += size
            adds.append((place, received))
            place = received
        way = dist.isend if op.kind == Kind.SEND else dist.irecv
        posts.append(dist.P2POp(way, place, wires.peers[op.peer], group=wires.group, tag=wires.tag))
    return posts, adds


def _listen(call: Call, track: str, number: int) -> _Incoming:
    """Post a step's receives ahead of its turn, so that the sender need not wait for the request.

    This is safe at any time: what is received in place is a finished sum, which cannot exist before this rank's own
    contribution has been received in full by a peer.
    """
    posts, adds = _operations(call, track, number, sends=False)
    return _Incoming(dist.batch_isend_irecv(posts) if posts else [], adds)


def _finish(call: Call, track: str, number: int, incoming: _Incoming) -> None:
    """Send, wait for both ways, add."""
    step = call.program[track][number]
    if step.native is not None:
        _native(call, track, step.native)
        return
    posts, _ = _operations(call, track, number, sends=True)
    sent = dist.batch_isend_irecv(posts) if posts else []
    _wait([*incoming.works, *sent], call.timeout)
    for place, received in incoming.adds:
        place.add_(received)


def _together(call: Call, track: str, number: int) -> None:
    """Post sends and receives as one group, as NCCL needs it, and let the stream wait for them."""
    step = call.program[track][number]
    if step.native is not None:
        _native(call, track, step.native)
        return
    sends, _ = _operations(call, track, number, sends=True)
    receives, adds = _operations(call, track, number, sends=False)
    if sends or receives:
        _wait(dist.batch_isend_irecv([*sends, *receives]), None)
    for place, received in adds:
        place.add_(received)


@contextmanager
def _explaining(call: Call, track: str, number: int) -> Iterator[None]:
    """Turn what torch raises into a ScheduleError that names schedule, track and peers."""
    try:
        yield
    except ScheduleError:
        raise
    except (RuntimeError, ValueError) as error:
        peers = sorted({call.wires[track].peers[op.peer] for op in call.program[track][number].ops})
        text = f"{call.name} on rank {call.rank}: step {number} of track {track} with ranks {peers} failed: {error}"
        late = any(word in str(error).lower() for word in ("timed out", "timeout"))
        raise (ScheduleTimeout if late else ScheduleError)(text) from error


def _wait(works: list[Any], timeout: timedelta | None) -> None:
    for work in works:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)


def _native(call: Call, track: str, native: Native) -> None:
    group = call.wires[track].native
    if group is None:
        raise ScheduleError(f"track {track} has no group for the backend's {native.what}")
    span = call.flat[native.start : native.stop]
    if span.numel() == 0:
        return
    if native.what == "all_reduce":
        _wait([dist.all_reduce(span, group=group, async_op=True)], call.timeout)
        return
    width, me = span.numel() // native.size, dist.get_rank(group)
    mine = span[me * width : (me + 1) * width]
    # NCCL documents these two as in place when the shard lies inside the whole; gloo does not
    shard = mine if span.is_cuda else call.scratch[track][:width]
    if native.what == "reduce_scatter":
        _wait([compat.reduce_scatter_flat(shard, span, group)], call.timeout)
        if shard is not mine:
            mine.copy_(shard)
    else:
        if shard is not mine:
            shard.copy_(mine)
        _wait([compat.all_gather_flat(span, shard, group)], call.timeout)


class _Progress:
    """How many steps each track has ended; a failure of one track wakes and ends the others."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        self._changed = threading.Condition()
        self.failure: BaseException | None = None

    def advance(self, track: str) -> None:
        with self._changed:
            self._ended[track] = self._ended.get(track, 0) + 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()

    def wait_for(self, marks: tuple[tuple[str, int], ...]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._reached(marks))
            if self.failure is not None:
                raise ScheduleAborted("another track failed") from self.failure

    def _reached(self, marks: tuple[tuple[str, int], ...]) -> bool:
        return all(self._ended.get(track, 0) >= count for track, count in marks)


def run_threads(call: Call, pool: Executor) -> None:
    """Run a program on CPU tensors; returns when this rank's part is done.

    The pool needs a free thread for every track but one. The first failure is raised after all tracks have stopped.
    """
    progress = _Progress()
    names = list(call.program)
    others = [pool.submit(_track, call, name, progress) for name in names[1:]]
    if names:
        _track(call, names[0], progress)
    for other in others:
        other.result()
    if progress.failure is not None:
        raise progress.failure


def _track(call: Call, track: str, progress: _Progress) -> None:
    """One track on one thread; the receives of the next step are always posted before the current one is sent."""
    steps = call.program[track]
    incoming: deque[_Incoming] = deque()
    try:
        with call.tag():
            for number, step in enumerate(steps):
                for ahead in range(number + len(incoming), min(number + SLOTS, len(steps))):
                    with _explaining(call, track, ahead):
                        incoming.append(_listen(call, track, ahead))
                progress.wait_for(step.after)
                with _explaining(call, track, number):
                    _finish(call, track, number, incoming.popleft())
                progress.advance(track)
    except BaseException as error:  # run_threads raises it
        progress.fail(error)


def run_streams(call: Call, streams: Mapping[str, torch.cuda.Stream]) -> None:
    """Issue a program on CUDA tensors; afterwards the current stream waits for all of it, the host does not."""
    here = torch.cuda.current_stream(call.flat.device)
    for track in call.program:
        streams[track].wait_stream(here)
    ended: dict[tuple[str, int], torch.cuda.Event] = {}
    marks = {mark for steps in call.program.values() for step in steps for mark in step.after}
    with call.tag():
        for track, number in issue_order(call.program):
            _issue(call, track, number, streams[track], ended, marks)
    for track in call.program:
        here.wait_stream(streams[track])


def _issue(
    call: Call,
    track: str,
    number: int,
    stream: torch.cuda.Stream,
    ended: dict[tuple[str, int], torch.cuda.Event],
    marks: set[tuple[str, int]],
) -> None:
    step = call.program[track][number]
    for mark in step.after:
        if mark in ended:
            stream.wait_event(ended[mark])
    with torch.cuda.stream(stream), _explaining(call, track, number):
        _together(call, track, number)
        if (track, number + 1) in marks:
            ended[track, number + 1] = stream.record_event()


def issue_order(program: Program) -> list[tuple[str, int]]:
    """(track, step) in an order that respects `after`, taking one step of each track in turn.

    Ranks with the same tracks get nearly the same order, which two communicators on one GPU need in order not to
    wait for each other.
    """
    position = dict.fromkeys(program, 0)
    order: list[tuple[str, int]] = []
    total = sum(map(len, program.values()))
    while len(order) < total:
        before = len(order)
        for track, steps in program.items():
            at = position[track]
            if at < len(steps) and all(position.get(t, 0) >= n or n == 0 for t, n in steps[at].after):
                order.append((track, at))
                position[track] += 1
        if len(order) == before:
            raise ScheduleError("the program's steps wait for each other in a circle")
    return order

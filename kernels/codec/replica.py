"""A copy of every rank's file on a peer, sent while it is written.

    replica = Replica.create("/local/disk/replicas")      # all ranks, after init_process_group
    checkpointer = AsyncCheckpointer("runs/a", "exact", replica=replica)
    ...
    checkpointer.close()
    replica.close()                                       # all ranks

Rank r and rank (r + W / 2) mod W hold each other's copies, so that a replica is as far away as ranks are numbered: give
ranks so that these are different hosts, for a copy in the same host, rack or power domain is lost with the original.
The peer writes what it gets under the same directory and file name below its own root (a local disk, say), where
`Checkpoint.open(replicas=...)` finds it.

Every rank takes part in every save, also one that fails (it says so to its peer). A peer that is gone shows when its
connection breaks or the groups time out, and then the replica stays `failed`; saves go on without it.

What is sent and when is agreed over a gloo group. The bytes follow over that group too, by TCP, or over two NCCL groups
by whatever transport NCCL has (RDMA where the network does; nothing here can tell, NCCL_DEBUG=INFO does). Two, because
two threads of a rank must not use one NCCL communicator, which would also run a send and a receive one after the other:
the lower half of the ranks sends over the first and receives over the second. A kernel of NCCL that waits for its peer
keeps multiprocessors from training, so it is launched only when both sides have said over gloo that they are ready. A
process that dies between that and the end of the piece, about a millisecond, ends its peer too, as it would in
training's own NCCL calls. Memory: four pieces of the host's, with NCCL also two of the device's.

What arrives is written with O_DIRECT, three requests at a time, where the filesystem has it: page cache would take
memory that training's hosts may not have, and its writeback comes all at once with the last sync.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, sync_directory
from costlab.kernels.codec.manifest import rank_name
from costlab.kernels.codec.slabs import SlabPool

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    Bytes = NDArray[np.uint8]

PIECE = 16 << 20  # what a writer hands over at once: the default slab
WRITERS = 3  # requests in flight
BUFFERS = WRITERS + 1  # one is filled while the others are written
AHEAD = 1 << 30  # most that is allocated before it arrives
TIMEOUT = timedelta(minutes=10)
CLOSE_TIMEOUT = timedelta(seconds=30)
NCCL_BLOCKS = 4  # most multiprocessors that a transfer takes from training
_END, _ABORT = -1, -2
_HEAD, _READY, _BYTES = range(3)  # tags


class Replica:
    """Sends this rank's file to its peer and receives the peer's below `root`.

    group: carries CPU tensors among all ranks, as gloo does.
    lanes: two NCCL groups of the same ranks for the bytes; all ranks then construct alike, at the same time.

    `failed` says what ended it. Raises `CheckpointError` for an odd number of ranks or a group that can't serve.
    """

    def __init__(
        self, group: ProcessGroup, root: Path | str, lanes: tuple[ProcessGroup, ProcessGroup] | None = None
    ) -> None:
        backend = _backends(group).get("cpu")
        if backend is None:
            raise CheckpointError(
                "a replica can't use an NCCL group alone, whose one communicator would serve two threads: "
                "use Replica.create(root), which makes the groups it needs"
            )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        _check_even(self.world_size)
        self.group, self.root = group, Path(root)
        self._peer = (self.rank + self.world_size // 2) % self.world_size
        nccl = lanes is not None and "nccl" in _backends(lanes[0]).values()
        self.label = "nccl over its own transport" if nccl else f"{backend} over TCP"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        first, second = (_Lane(lane, group, self._peer, device) for lane in lanes or (group, group))
        self._out, self._in = (first, second) if self.rank < self._peer else (second, first)
        pool = SlabPool(PIECE, BUFFERS * PIECE, pinned=nccl)
        self._buffers = [pool.acquire().tensor for _ in range(BUFFERS)]
        self._lock = threading.Lock()
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-replica")
        self._taken: Future[Path | None] | None = None
        self._made: tuple[ProcessGroup, ...] = ()
        self._lost: str | None = None
        self.failed: str | None = None
        if lanes is not None:
            self._connect(first, second)

    @classmethod
    def create(
        cls, root: Path | str, backend: Literal["nccl", "gloo"] | None = None, timeout: timedelta = TIMEOUT
    ) -> Self:
        """Make the groups and the replica; called by all ranks together, from the thread that set the CUDA device.

        root: where this rank keeps its peer's files, made if absent.
        backend: what carries the bytes; default NCCL where the default group has it, else gloo.
        timeout: most time between two messages of a save, such as the peer's disk takes for 16 MiB or its last sync.

        Raises `CheckpointError` without a default group, for an odd number of ranks or without the backend.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise CheckpointError("a replica needs its peers: call torch.distributed.init_process_group first")
        _check_even(dist.get_world_size())
        chosen = backend or ("nccl" if torch.cuda.is_available() and "nccl" in _backends(None).values() else "gloo")
        if chosen not in ("nccl", "gloo"):
            raise CheckpointError(f"replicas are sent over nccl or gloo, not {chosen}")
        if chosen == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise CheckpointError("a replica over nccl needs a CUDA device and a torch with NCCL")
        try:
            group = dist.new_group(backend="gloo", timeout=timeout)
            lanes = (_nccl_group(timeout), _nccl_group(timeout)) if chosen == "nccl" else None
            made = cls(group, root, lanes)
        except RuntimeError as error:
            raise CheckpointError(f"no connection for replicas: {str(error).partition(chr(10))[0]}") from error
        made._made = (group, *(lanes or ()))
        return made

    def begin(self, directory: str, name: str) -> Future[Path | None]:
        """Start receiving into `<root>/<directory>/<name>`; gives the path, or None if the sender gave up."""
        self._taken = self._receiver.submit(self._receive, self.root / directory, name)
        return self._taken

    def send(self, data: Bytes, offset: int) -> None:
        """Send bytes of the file; from several threads. A failure is kept in `failed` and ends the replica only."""
        with self._sending() as sound:
            for at in range(0, data.size if sound else 0, PIECE):
                piece = self._out.stage(data[at : at + PIECE])
                self._say(offset + at, piece.numel())
                self._out.send(piece)

    def end(self, size: int | None) -> None:
        """Say that the file is complete with this size; None says that it never will be."""
        with self._sending() as sound:
            if sound:
                self._say(_ABORT if size is None else _END, size or 0)

    def decline(self, directory: str, name: str) -> None:
        """Take part in a save that this rank has given up: take what the peer sends, send nothing."""
        taken = self.begin(directory, name)
        self.end(None)
        taken.exception()

    @property
    def source_name(self) -> str:
        """Name of the file that is received here."""
        return rank_name(self._peer)

    def close(self) -> None:
        """End the receiving thread. Groups of `create` go too, when all ranks call this and all are done and sound.

        Otherwise they stay until `destroy_process_group`: a transfer may be under way in them.
        """
        self._receiver.shutdown(wait=False)
        groups, self._made = self._made, ()
        idle = self._taken is None or self._taken.done()
        if groups and dist.is_initialized() and self._all(idle and self.failed is None and self._lost is None):
            for group in groups:
                dist.destroy_process_group(group)

    def _all(self, mine: bool) -> bool:
        """Whether every rank says so in time."""
        word = torch.tensor([int(mine)])
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MIN), CLOSE_TIMEOUT
        try:
            self.group.allreduce([word], options).wait()
        except RuntimeError:
            return False
        return bool(word)

    def _connect(self, first: _Lane, second: _Lane) -> None:
        """Send a piece each way: NCCL makes a communicator when both peers first use it, here in the same order."""
        for lane in (first, second):
            if lane is self._out:
                lane.send(lane.stage(np.zeros(PIECE, np.uint8)))
            else:
                lane.receive(self._buffers[0])

    @contextlib.contextmanager
    def _sending(self) -> Iterator[bool]:
        """One thread at a time; gives whether nothing has failed yet, and keeps what fails in the block."""
        with self._lock:
            try:
                yield self.failed is None
            except (RuntimeError, ValueError) as error:
                self.failed = str(error)

    def _say(self, kind: int, size: int) -> None:
        dist.send(torch.tensor([kind, size]), group=self.group, group_dst=self._peer, tag=_HEAD)

    def _receive(self, directory: Path, name: str) -> Path | None:
        """Everything the peer sends is taken, also when it can't be written here: the sender must not block."""
        if self._lost is not None:
            raise RuntimeError(self._lost)
        file: AtomicFile | None = None
        problem: OSError | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = AtomicFile(directory / name, direct=True)
        except OSError as error:
            problem = error
        try:
            size = self._take(file)
            if problem is not None:
                raise problem
            if size is None or file is None:
                return None
            file.commit(size)
            sync_directory(directory.parent)
            return directory / name
        except (RuntimeError, ValueError) as error:
            self._lost = str(error)
            raise
        finally:
            if file is not None:
                file.abort()

    def _take(self, file: AtomicFile | None) -> int | None:
        """Write what arrives until the sender ends; the size it stated, None if it gave up.

        Raises the first `OSError` of writing at the end.
        """
        head = torch.zeros(2, dtype=torch.int64)
        problem: BaseException | None = None
        writes: deque[Future[None]] = deque()
        allocated = 0
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint-replica-write") as writer:
            for number in itertools.count():
                if len(writes) == BUFFERS:
                    earlier = writes.popleft().exception()
                    problem = problem or earlier
                dist.recv(head, group=self.group, group_src=self._peer, tag=_HEAD)
                kind, size = (int(v) for v in head)
                if kind in (_END, _ABORT):
                    break
                piece = self._buffers[number % BUFFERS][:size]
                self._in.receive(piece)
                allocated = _allocate(file, allocated, kind + size)
                writes.append(writer.submit(_write, file, piece, kind))
        for failure in (problem, *(write.exception() for write in writes)):
            if failure is not None:
                raise failure
        return size if kind == _END else None


class _Lane:
    """One direction's bytes, which one thread at a time moves.

    With a GPU they pass through a buffer of its memory, on a stream of the lane's own: the threads' usual stream is the
    one that training computes on.
    """

    def __init__(self, group: ProcessGroup, words: ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._words, self._peer = group, words, peer
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffer: torch.Tensor | None = None
        # A blocking event sleeps; Stream.synchronize would spin on a core that training's threads could use.
        self._done = None if self._stream is None else torch.cuda.Event(blocking=True)
        if self._stream is not None:
            with self._on_stream():
                self._buffer = torch.empty(PIECE, dtype=torch.uint8, device=device)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What the block enqueues runs on the lane's stream and is done when the block ends."""
        if self._stream is None or self._done is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
            self._done.record(self._stream)
        self._done.synchronize()

    def stage(self, data: Bytes) -> torch.Tensor:
        """The bytes where `send` takes them from, until the next call."""
        host = torch.from_numpy(data)
        if self._buffer is None:
            return host
        part = self._buffer[: data.size]
        with self._on_stream():
            part.copy_(host, non_blocking=True)
        return part

    def send(self, piece: torch.Tensor) -> None:
        """Send staged bytes when the peer is ready for them; returns when they are gone."""
        dist.recv(torch.zeros(1), group=self._words, group_src=self._peer, tag=_READY)
        with self._on_stream():
            dist.send(piece, group=self._group, group_dst=self._peer, tag=_BYTES)

    def receive(self, target: torch.Tensor) -> None:
        """Fill `target`, host memory (pinned where there is a GPU), with the bytes the peer sends next."""
        dist.send(torch.zeros(1), group=self._words, group_dst=self._peer, tag=_READY)
        with self._on_stream():
            landed = target if self._buffer is None else self._buffer[: target.numel()]
            dist.recv(landed, group=self._group, group_src=self._peer, tag=_BYTES)
            if landed is not target:
                target.copy_(landed, non_blocking=True)


def _allocate(file: AtomicFile | None, allocated: int, end: int) -> int:
    """How far the file is allocated, after making that reach `end`: direct writes that extend a file exclude others.

    What is too much is cut off at the end. A disk without the room shows when the bytes are written.
    """
    if file is None or not file.direct or end <= allocated:
        return allocated
    target = max(end, 4 * PIECE, min(2 * allocated, allocated + AHEAD))
    with contextlib.suppress(OSError):
        file.allocate(target, allocated)
    return target


def _write(file: AtomicFile | None, piece: torch.Tensor, offset: int) -> None:
    if file is not None:
        file.write(piece.numpy(), offset)


def _check_even(world_size: int) -> None:
    if world_size < 2 or world_size % 2:
        raise CheckpointError(f"replicas need an even number of ranks, not {world_size}")


def _backends(group: ProcessGroup | None) -> dict[str, str]:
    """Backend by kind of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _nccl_group(timeout: timedelta) -> ProcessGroup:
    """High priority, so that the peer's kernel doesn't wait long until ours finds room beside training's."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = NCCL_BLOCKS
    group: ProcessGroup = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
    return group

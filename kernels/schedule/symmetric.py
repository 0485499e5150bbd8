"""One-shot and two-shot all-reduce through symmetric memory, inside one NVLink domain.

Every rank maps every other rank's buffer. One-shot: each rank reads all buffers and sums them itself; one barrier, N-1
times the bytes, best for small messages. Two-shot: each rank sums one slice and all read the sums; the bytes of a ring
without its steps. Both in one piece are torch's kernels (`torch.ops.symm_mem`); a two-shot in chunks is made here of
copies into and out of the peers' buffers, so that a chunk's local work hides behind another's transfer. Every element
is summed by one rank or in rank order, so all ranks get the same bits; NVLink multicast (multimem) is never used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule.errors import ScheduleRefused
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.program import cut

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
DTYPES = (torch.float32, torch.bfloat16)
WRITES_OUT = (2, 4, 8)  # world sizes for which torch compiles the two-shot kernel that writes to another tensor
_ALIGN = 16  # bytes of the kernels' widest access
_STREAMS = 2
_KEPT = 256
_ops: Any = torch.ops

Work = Callable[[Tensor], None]


def refusal(device: torch.device, dtype: torch.dtype, world_size: int) -> str:
    """Why symmetric memory cannot serve this call, empty if nothing known speaks against it."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA tensors, not {device.type}"
    if os.environ.get(NO_MULTICAST, "1") != "1":
        return f"{NO_MULTICAST} is set to {os.environ[NO_MULTICAST]!r}; these schedules run with multicast off only"
    if dtype not in DTYPES:
        return f"symmetric memory reduces fp32 and bf16, not {dtype}"
    if world_size < 2:
        return "one rank has nothing to reduce"
    if not _present("one_shot_all_reduce") or not _present("two_shot_all_reduce_"):
        return f"torch {torch.__version__} has no symmetric-memory all-reduce operators"
    return ""


def _present(name: str) -> bool:
    try:
        import torch.distributed._symmetric_memory  # noqa: F401 - registers the operators

        return hasattr(_ops.symm_mem, name)
    except (ImportError, AttributeError):
        return False


class Piece(NamedTuple):
    """One chunk of a two-shot in chunks: rank p sums `slices[p]`.

    `slots[q]` is where rank q's addend lies in the buffer of the rank that sums; its own slot holds the sum. Elements.
    """

    slices: list[tuple[int, int]]
    slots: list[int]


def pieces(numel: int, chunks: int, world: int, unit: int) -> tuple[list[Piece], int]:
    """The chunks of a two-shot over `world` ranks and the elements of buffer that they need, in multiples of `unit`."""
    rows: list[Piece] = []
    used = 0
    for start, stop in cut(0, numel, chunks):
        width = -(-(stop - start) // (world * unit)) * unit
        edges = [min(start + p * width, stop) for p in range(world + 1)]
        rows.append(Piece(list(pairwise(edges)), [used + q * width for q in range(world)]))
        used += world * width
    return rows, used


def sum_piece(flat: Tensor, piece: Piece, me: int, buffers: list[Tensor], barrier: Callable[[], object]) -> None:
    """One chunk: push addends to the rank that sums them, sum, pull the sums.

    Args:
        flat: this rank's message; the chunk's elements are replaced by their sums.
        buffers: every rank's buffer as this rank sees it.
        barrier: returns, or lets the stream go on, once all ranks have come to it.
    """
    others = [*range(me + 1, len(buffers)), *range(me)]
    for p in others:
        (a, b), slot = piece.slices[p], piece.slots[me]
        buffers[p][slot : slot + b - a].copy_(flat[a:b])
    barrier()
    a, b = piece.slices[me]
    for q in others:
        slot = piece.slots[q]
        flat[a:b].add_(buffers[me][slot : slot + b - a])
    slot = piece.slots[me]
    buffers[me][slot : slot + b - a].copy_(flat[a:b])
    barrier()
    for p in others:
        (a, b), slot = piece.slices[p], piece.slots[p]
        flat[a:b].copy_(buffers[p][slot : slot + b - a])


class SymmetricMemory:
    """A symmetric buffer on the ranks of one group, grown on demand (growing is collective).

    Args:
        group: ranks of one NVLink domain; its name identifies the mapping to torch.
        outgrown: called when the buffer is replaced, after which works handed out before keep the old one alive.
    """

    def __init__(self, group: ProcessGroup, outgrown: Callable[[], None] = lambda: None) -> None:
        self.group = group
        self._outgrown = outgrown
        self.world, self.rank = group.size(), group.rank()
        self._buffer: Tensor | None = None
        self._handle: Any = None
        self._works: dict[tuple[Plan, int, torch.dtype], Work] = {}
        self._streams: list[torch.cuda.Stream] = []

    def all_reduce(self, flat: Tensor, plan: Plan) -> None:
        """Sum a flat CUDA tensor in place; the same bits on all ranks.

        Raises:
            ScheduleRefused: symmetric memory cannot serve this tensor or group, with the reason.
        """
        reason = refusal(flat.device, flat.dtype, self.world)
        if reason:
            raise ScheduleRefused(reason)
        try:
            self.work(flat, plan)(flat)
        except RuntimeError as error:
            if isinstance(error, ScheduleRefused):
                raise
            raise ScheduleRefused(f"torch's {plan.schedule} all-reduce refused the call: {error}") from error

    def work(self, flat: Tensor, plan: Plan) -> Work:
        """What sums a flat tensor of this size and dtype; kept, so that repeated calls cost the host little."""
        key = (plan, flat.numel(), flat.dtype)
        if key not in self._works:
            if len(self._works) >= _KEPT:
                self._works.clear()
            self._works[key] = self._make(flat, plan)
        return self._works[key]

    def _make(self, flat: Tensor, plan: Plan) -> Work:
        numel, unit = flat.numel(), _ALIGN // flat.element_size()
        if plan.schedule == "two-shot" and plan.chunks > 1:
            rows, used = pieces(numel, plan.chunks, self.world, unit)
            return self._chunked(rows, self._take(used, flat), flat)
        padded = -(-numel // (unit * self.world)) * unit * self.world
        buffer = self._take(padded, flat)
        return (self._one_shot if plan.schedule == "one-shot" else self._two_shot)(numel, buffer)

    def _one_shot(self, numel: int, buffer: Tensor) -> Work:
        name = self.group.group_name
        plain = _ops.symm_mem.one_shot_all_reduce.default
        fused = _ops.symm_mem.one_shot_all_reduce_copy_out.default if _present("one_shot_all_reduce_copy_out") else None
        whole = numel == buffer.numel()

        def work(flat: Tensor) -> None:
            if whole and fused is not None and flat.data_ptr() % _ALIGN == 0:
                # copies in, sums and writes out in one kernel; each thread writes only what it has copied itself
                fused(buffer, flat, "sum", name, flat)
                return
            _fill(buffer, flat)
            flat.copy_(plain(buffer, "sum", name)[:numel])

        return work

    def _two_shot(self, numel: int, buffer: Tensor) -> Work:
        name = self.group.group_name
        in_place = _ops.symm_mem.two_shot_all_reduce_.default
        writes_out = self.world in WRITES_OUT and _present("two_shot_all_reduce_out")
        outward = _ops.symm_mem.two_shot_all_reduce_out.default if writes_out else None
        whole = numel == buffer.numel()

        def work(flat: Tensor) -> None:
            _fill(buffer, flat)
            if whole and outward is not None and flat.data_ptr() % _ALIGN == 0:
                outward(buffer, "sum", name, flat)
                return
            in_place(buffer, "sum", name)
            flat.copy_(buffer[:numel])

        return work

    def _chunked(self, rows: list[Piece], buffer: Tensor, like: Tensor) -> Work:
        """`sum_piece` for each chunk, alternating over two streams."""
        handle = self._handle
        whole = [buffer.numel()]
        buffers = [buffer if p == self.rank else handle.get_buffer(p, whole, like.dtype, 0) for p in range(self.world)]
        streams = self._side_streams(like.device)

        def work(flat: Tensor) -> None:
            here = torch.cuda.current_stream(flat.device)
            for stream in streams:
                stream.wait_stream(here)
            for number, piece in enumerate(rows):
                channel = number % _STREAMS
                with torch.cuda.stream(streams[channel]):
                    sum_piece(flat, piece, self.rank, buffers, partial(handle.barrier, channel))
            for stream in streams:
                here.wait_stream(stream)
            handle.barrier(0)  # nobody writes to a buffer that a peer still reads

        return work

    def _side_streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        if not self._streams:
            self._streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        return self._streams

    def _take(self, numel: int, like: Tensor) -> Tensor:
        """The first `numel` elements of the buffer in `like`'s dtype."""
        nbytes = numel * like.element_size()
        if self._buffer is None or self._buffer.numel() < nbytes:
            if torch.cuda.is_current_stream_capturing():
                raise ScheduleRefused("prepare() this size before capturing a CUDA graph: the mapping is collective")
            self._works.clear()
            self._outgrown()
            self._buffer = self._handle = None
            self._buffer, self._handle = self._map(1 << max(20, (nbytes - 1).bit_length()), like.device)
        return self._buffer[:nbytes].view(like.dtype)

    def _map(self, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
        import torch.distributed._symmetric_memory as symm_mem

        os.environ[NO_MULTICAST] = "1"  # read by torch when it maps
        try:
            buffer: Tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
            handle: Any = symm_mem.rendezvous(buffer, self.group)
        except RuntimeError as error:
            raise ScheduleRefused(f"the ranks' GPUs cannot map each other's memory: {error}") from error
        if handle is None:
            raise ScheduleRefused("the ranks' GPUs cannot map each other's memory")
        if getattr(handle, "multicast_ptr", 0):
            raise ScheduleRefused("torch mapped the buffer for multicast although it is switched off; not using it")
        return buffer, handle


def _fill(buffer: Tensor, flat: Tensor) -> None:
    numel = flat.numel()
    if numel == buffer.numel():
        buffer.copy_(flat)
        return
    buffer[:numel].copy_(flat)
    buffer[numel:].zero_()

"""One-shot and two-shot all-reduce through symmetric memory, inside one NVLink domain.

Every rank maps every other rank's buffer. One-shot: each rank reads all buffers and sums them itself; one barrier, N-1
times the bytes, best for small messages. Two-shot: each rank sums one slice and all read the sums; the bytes of a ring
without its steps. Both in one piece are torch's kernels (`torch.ops.symm_mem`); `chunked.py` has a two-shot in chunks.
Calls with a tensor that keeps coming are replayed from a CUDA graph (`replay.py`). Every element is summed by one rank
or in rank order, so all ranks get the same bits; NVLink multicast (multimem) is never used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule import compat
from costlab.kernels.schedule.chunked import Chunked, pieces
from costlab.kernels.schedule.errors import ScheduleRefused
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.replay import Recorder, Replayed, Work

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
DTYPES = (torch.float32, torch.bfloat16)
WRITES_OUT = (2, 4, 8)  # world sizes for which torch compiles the two-shot kernel that writes to another tensor
_ALIGN = 16  # bytes of the kernels' widest access
_STREAMS = 2
_KEPT = 256
_ops: Any = torch.ops


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
        self._works: dict[tuple[Plan, int, torch.dtype, float], Work] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._record = Recorder()

    def all_reduce(self, flat: Tensor, plan: Plan, scale: float = 1.0) -> None:
        """Sum a flat CUDA tensor in place, each addend times `scale`; the same bits on all ranks.

        Raises:
            ScheduleRefused: symmetric memory cannot serve this tensor or group, with the reason.
        """
        reason = refusal(flat.device, flat.dtype, self.world)
        if reason:
            raise ScheduleRefused(reason)
        try:
            self.work(flat, plan, scale)(flat)
        except RuntimeError as error:
            if isinstance(error, ScheduleRefused):
                raise
            raise ScheduleRefused(f"torch's {plan.schedule} all-reduce refused the call: {error}") from error

    def work(self, flat: Tensor, plan: Plan, scale: float = 1.0) -> Work:
        """What sums a flat tensor of this size and dtype; kept, so that repeated calls cost the host little."""
        key = (plan, flat.numel(), flat.dtype, scale)
        if key not in self._works:
            if len(self._works) >= _KEPT:
                self._works.clear()
            self._works[key] = Replayed(self._make(flat, plan, scale), self._record)
        return self._works[key]

    def _make(self, flat: Tensor, plan: Plan, scale: float) -> Work:
        numel, unit = flat.numel(), _ALIGN // flat.element_size()
        if plan.schedule == "two-shot" and plan.chunks > 1:
            return self._chunked(numel, plan.chunks, unit, flat, scale)
        padded = -(-numel // (unit * self.world)) * unit * self.world
        buffer = self._take(padded, flat)
        return (self._one_shot if plan.schedule == "one-shot" else self._two_shot)(numel, buffer, scale)

    def _one_shot(self, numel: int, buffer: Tensor, scale: float) -> Work:
        """A copy in, then the kernel.

        torch's kernel that also copies in (`one_shot_all_reduce_copy_out`) signals the peers without a
        `__syncthreads()` after its copy, so a peer may read what another warp has not written yet.
        """
        name = self.group.group_name
        plain = _ops.symm_mem.one_shot_all_reduce.default
        outward = _ops.symm_mem.one_shot_all_reduce_out.default if _present("one_shot_all_reduce_out") else None
        whole = numel == buffer.numel()

        def work(flat: Tensor) -> None:
            _fill(buffer, flat, scale)
            if whole and outward is not None and flat.data_ptr() % _ALIGN == 0:
                outward(buffer, "sum", name, flat)
                return
            flat.copy_(plain(buffer, "sum", name)[:numel])

        return work

    def _two_shot(self, numel: int, buffer: Tensor, scale: float) -> Work:
        name = self.group.group_name
        in_place = _ops.symm_mem.two_shot_all_reduce_.default
        writes_out = self.world in WRITES_OUT and _present("two_shot_all_reduce_out")
        outward = _ops.symm_mem.two_shot_all_reduce_out.default if writes_out else None
        whole = numel == buffer.numel()

        def work(flat: Tensor) -> None:
            _fill(buffer, flat, scale)
            if whole and outward is not None and flat.data_ptr() % _ALIGN == 0:
                outward(buffer, "sum", name, flat)
                return
            in_place(buffer, "sum", name)
            flat.copy_(buffer[:numel])

        return work

    def _chunked(self, numel: int, chunks: int, unit: int, like: Tensor, scale: float) -> Work:
        rows, used = pieces(numel, chunks, self.world, unit)
        buffer = self._take(used, like)
        handle = self._handle
        others = [handle.get_buffer(p, [used], like.dtype, 0) if p != self.rank else buffer for p in range(self.world)]
        barriers = [partial(handle.barrier, channel) for channel in range(_STREAMS)]
        return Chunked(rows, self.rank, others, barriers, self._side_streams(like.device), scale)

    def _side_streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        if not self._streams:
            self._streams = [compat.urgent_stream(device) for _ in range(_STREAMS)]
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


def _fill(buffer: Tensor, flat: Tensor, scale: float) -> None:
    numel = flat.numel()
    place = buffer[:numel]
    if scale == 1.0:
        place.copy_(flat)
    else:
        torch.mul(flat, scale, out=place)
    if numel < buffer.numel():
        buffer[numel:].zero_()

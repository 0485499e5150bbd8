"""One-shot and two-shot all-reduce through symmetric memory, inside one NVLink domain.

Every rank maps every other rank's buffer. One-shot: each rank reads all buffers and sums them itself; one barrier, N-1
times the bytes, best for small messages. Two-shot: each rank sums one slice and all read the sums; the bytes of a ring
without its steps. The kernels are torch's (`torch.ops.symm_mem`) and sum in rank order, so
all ranks get the same bits; NVLink multicast (multimem) is never used.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule.errors import ScheduleRefused

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
DTYPES = (torch.float32, torch.bfloat16)
WRITES_OUT = (2, 4, 8)  # world sizes for which torch compiles the two-shot kernel that writes to another tensor
_ALIGN = 16  # bytes of the kernels' widest access
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
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._buffer: Tensor | None = None

    def all_reduce(self, flat: Tensor, schedule: str) -> None:
        """Sum a flat CUDA tensor in place; the same bits on all ranks.

        Raises:
            ScheduleRefused: symmetric memory cannot serve this tensor or group, with the reason.
        """
        reason = refusal(flat.device, flat.dtype, self.group.size())
        if reason:
            raise ScheduleRefused(reason)
        unit = _ALIGN // flat.element_size() * self.group.size()
        padded = -(-flat.numel() // unit) * unit
        buffer = self._take(padded * flat.element_size(), flat.device).view(flat.dtype)[:padded]
        try:
            if schedule == "one-shot":
                self._one_shot(flat, buffer)
            else:
                self._two_shot(flat, buffer)
        except RuntimeError as error:
            raise ScheduleRefused(f"torch's {schedule} all-reduce refused the call: {error}") from error

    def _one_shot(self, flat: Tensor, buffer: Tensor) -> None:
        name = self.group.group_name
        if _direct(flat, buffer) and _present("one_shot_all_reduce_copy_out"):
            # copies in, sums and writes out in one kernel; each thread writes only what it has copied itself
            _ops.symm_mem.one_shot_all_reduce_copy_out(buffer, flat, "sum", name, flat)
            return
        _fill(buffer, flat)
        flat.copy_(_ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)[: flat.numel()])

    def _two_shot(self, flat: Tensor, buffer: Tensor) -> None:
        name = self.group.group_name
        _fill(buffer, flat)
        writes_out = self.group.size() in WRITES_OUT and _present("two_shot_all_reduce_out")
        if writes_out and _direct(flat, buffer):
            _ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", name, flat)
            return
        _ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name)
        flat.copy_(buffer[: flat.numel()])

    def _take(self, nbytes: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < nbytes:
            if torch.cuda.is_current_stream_capturing():
                raise ScheduleRefused("prepare() this size before capturing a CUDA graph: the mapping is collective")
            self._buffer = self._map(1 << max(20, (nbytes - 1).bit_length()), device)
        return self._buffer[:nbytes]

    def _map(self, nbytes: int, device: torch.device) -> Tensor:
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
        return buffer


def _direct(flat: Tensor, buffer: Tensor) -> bool:
    """Whether a kernel may read and write the caller's tensor itself: same size, widest alignment."""
    return flat.numel() == buffer.numel() and flat.data_ptr() % _ALIGN == 0


def _fill(buffer: Tensor, flat: Tensor) -> None:
    buffer[: flat.numel()].copy_(flat)
    buffer[flat.numel() :].zero_()

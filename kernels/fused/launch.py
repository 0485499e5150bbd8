"""What every fused kernel needs: Triton if it is there, tile sizes, and when to take the eager reference instead.

Kernels run on CUDA tensors, or on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before the import).
Everywhere else `usable` is false and the ops compute their eager reference, so that a model with fused kernels still
runs on a CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from costlab.kernels.fused.quick import Quick

__all__ = [
    "FLOATS",
    "INTERPRETED",
    "MAX_COLUMNS",
    "Tile",
    "as_rows",
    "autocast",
    "cdiv",
    "direct_launch",
    "is_direct",
    "jit",
    "power_of_2",
    "programs",
    "tl",
    "usable",
    "wrap_triton",
]

try:
    import triton
    import triton.language as tl

    jit: Callable[[Any], Any] = triton.jit
except ImportError:  # a platform without Triton wheels: `usable` stays false and no kernel is ever launched
    triton = tl = None

    def jit(fn: Any) -> Any:
        """Leave the function as it is; it is never called."""
        return fn


class _Launching(threading.local):
    """Per thread, since the backward runs in a thread of autograd's own."""

    direct = False


_launching = _Launching()
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_COLUMNS = 16384
_INTERPRETED_SMS = 3
_INTERPRETED_SHARED_BYTES = 160 << 10


@dataclass(frozen=True)
class Tile:
    """Launch shape: values a tile, warps a program, resident programs an SM (persistent kernels), pipeline stages."""

    elements: int
    warps: int
    per_sm: int = 1
    stages: int = 1

    def rows(self, columns: int) -> int:
        """Rows of `columns` values (a power of two) that make one tile; at least one, at most 64."""
        return max(1, min(64, self.elements // columns))

    def buffered(self, columns: int, device: torch.device, size: int) -> tuple[int, int]:
        """Rows a tile and pipeline stages, cut until the stages of a tile fit in shared memory at `size` bytes a value.

        `size` is the sum over the tensors that are read.
        """
        rows, stages = self.rows(columns), self.stages
        most = _shared_bytes(device)
        while stages > 1 and rows * columns * size * stages > most:
            rows, stages = (rows // 2, stages) if rows > 1 else (rows, stages - 1)
        return rows, stages

    def warps_for(self, columns: int) -> int:
        """Warps for one tile of whole rows: `warps` up to the tile's size, then in proportion, 16 at most."""
        return max(1, min(16, self.warps * max(1, columns // self.elements)))


def usable(*tensors: Tensor) -> bool:
    """Whether Triton kernels serve these tensors: on one CUDA device (or interpreted), of a dtype in `FLOATS`."""
    first = tensors[0]
    if triton is None or not (first.is_cuda or INTERPRETED):
        return False
    return all(t.device == first.device and t.dtype in FLOATS for t in tensors)


def wrap_triton(kernel: Any) -> Any:
    """The kernel in the form that suits: for tracing, for an eager launch, or as it is for the interpreter.

    Named like torch's own because torch looks for calls of that name, to put the kernels' source in its cache keys.
    """
    if INTERPRETED:
        return kernel
    return _quick(kernel) if _launching.direct else torch.library.wrap_triton(kernel)


@cache
def _quick(kernel: Any) -> Quick:
    return Quick(kernel)


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class direct_launch:
    """Launch at once inside the block, as opaque ops may, not through torch's tracing (about 1 ms a launch)."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before = _launching.direct
        _launching.direct = True

    def __exit__(self, *_: object) -> None:
        _launching.direct = self.before


def programs(device: torch.device, per_sm: int, tiles: int) -> int:
    """Programs of a persistent kernel: `per_sm` a multiprocessor, never more than there are tiles, at least one."""
    sms = _multiprocessors(_index(device)) if device.type == "cuda" else _INTERPRETED_SMS
    return max(1, min(per_sm * sms, tiles))


@cache
def _device_shared_bytes(index: int) -> int:
    # The reductions of a kernel need shared memory of their own, hence not all of it.
    properties = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)) * 7 // 10


def _shared_bytes(device: torch.device) -> int:
    return _device_shared_bytes(_index(device)) if device.type == "cuda" else _INTERPRETED_SHARED_BYTES


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; works on symbolic sizes."""
    return (a + b - 1) // b


def power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 for n <= 1."""
    return 1 << max(0, int(n) - 1).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """[..., n] -> contiguous [rows, n]; copies only what is strided."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on, as a matrix product would take them; else unchanged."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def is_direct() -> bool:
    """Whether this thread is inside `direct_launch`."""
    return _launching.direct

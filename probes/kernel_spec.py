"""What `costlab bench kernels` asks for and what it gets back; torch-free, so that the command line can read both."""

from __future__ import annotations

import msgspec

KERNELS = (
    "add_rms_norm", "add_layer_norm", "gated", "rope", "norm_rope", "batch_norm_relu", "batch_norm_add_relu",
    "ffn_layer_norm", "linear_cross_entropy",
)  # fmt: skip
RESULT_FILE = "kernels.json"


class KernelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which kernels, and calls timed for each figure."""

    kernels: tuple[str, ...] = KERNELS
    samples: int = 50
    inductor: bool = True


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in ms of one way of computing it: as called from Python, and on the device alone."""

    called_ms: float
    device_ms: float


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel in one direction. `times` has "fused", "eager", "inductor"; what failed is in `failed` instead.

    `ceiling_ms` is the least time this device needs for `bytes_moved` (ceiling "copy") or `flops` (ceiling "matmul").
    `error` is the relative difference of the fused kernel's outputs (and gradients) from the eager ones, by norm.
    """

    kernel: str
    shape: str
    way: str
    times: dict[str, KernelTime]
    failed: dict[str, str] = {}
    error: float | None = None
    ceiling: str = "copy"
    ceiling_ms: float = 0.0
    bytes_moved: int = 0
    flops: int = 0


class KernelBench(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured. `unavailable` says why nothing was, where nothing can be."""

    device: str = ""
    torch: str = ""
    triton: str = ""
    copy_gbs: float = 0.0
    matmul_tflops: float = 0.0
    samples: int = 0
    rows: tuple[KernelRow, ...] = ()
    unavailable: str = ""

"""What `costlab codec` asks of its subprocess and what comes back. Torch-free."""

from __future__ import annotations

import msgspec

from costlab.probes.spec import BUILTIN_WORKLOADS, WORKLOAD_SIZES, SpecError

BITS_CLAIMED = 3.2  # FP8 in 16x16 blocks with sparse zeros, as published without the zeros it needs
MOST_MIB = 1 << 20


class CodecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a file or folder (`path`), or of a built-in model after `steps`; `limit_mb` MiB of each class."""

    path: str = ""
    model: str = ""
    steps: int = 20
    device: str = "auto"
    limit_mb: float = 0.0  # 0: 2 on the CPU, 256 on a GPU
    timing: bool = True


class CodecTableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One codec on one class of tensors."""

    codec: str
    tensor_class: str  # weight, first moment, second moment
    values: int
    bits: float  # stored bits a value, everything included
    ratio: float  # original over stored bytes
    rel_l2: float  # relative L2 error over finite values
    max_abs: float  # largest absolute error
    flushed: int  # values that were not zero and came back as zero
    update_error: float | None  # relative error of the first resumed Adam update with only this class coded
    encode_gbps: float | None  # original bytes over wall time
    decode_gbps: float | None


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed size of FP8 16x16 with sparse zeros, beside what these weights have."""

    bits: float
    bitmap_zeros: float  # share of exact zeros it needs with a bitmap
    csr16_zeros: float
    csr32_zeros: float
    least_error: float  # relative L2 error that no code of so many bits goes below on Gaussian values
    zeros: float | None  # share of zero codes that FP8 16x16 makes of these weights
    measured_bits: float | None  # bits a value that FP8 16x16 with the best coding of zeros takes here


class CodecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The table; `error` says why there is none."""

    source: str = ""
    kind: str = ""  # safetensors, costlab, DCP, torch, model
    device: str = ""
    tensors: int = 0
    values: int = 0  # of all float tensors
    sampled: int = 0  # of them, those the table is of
    exact: int = 0  # values of tensors that every policy keeps exact: norms, biases, steps
    rows: list[CodecTableRow] = []
    claim: ClaimRow | None = None
    notes: list[str] = []
    error: str = ""
    usage: bool = False  # whether the error is of the options, not of the source


def check(request: CodecRequest) -> None:
    """Raise SpecError for a request that makes no sense."""
    if bool(request.path) == bool(request.model):
        raise SpecError("give either a FILE or --model NAME")
    name, _, size = request.model.partition(":")
    if request.model and name not in BUILTIN_WORKLOADS:
        raise SpecError(f"no model '{name}'; there are: {', '.join(BUILTIN_WORKLOADS)}, as llama or llama:small")
    if size and size not in WORKLOAD_SIZES[name]:
        raise SpecError(f"{name} has no size '{size}'; there are: {', '.join(WORKLOAD_SIZES[name])}")
    if request.steps < 1 or not 0 <= request.limit_mb <= MOST_MIB:
        raise SpecError(f"--steps must be at least 1, and --limit 0 to {MOST_MIB} MiB")

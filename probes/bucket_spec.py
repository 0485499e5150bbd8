"""The gradient layout sweep's options and rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

RESULT_FILE = "buckets.json"
MIB = 1 << 20
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
DDP_BUCKET = 25 * MIB  # torch's default bucket_cap_mb
BUCKETS = (0, MIB, 4 * MIB, 16 * MIB, DDP_BUCKET, 64 * MIB, 256 * MIB)
EVERY = (1, 2, 4, 8)

Layout = Literal["view", "copy", "strided"]
LAYOUTS: dict[Layout, str] = {
    "view": "gradients are views of their bucket (gradient_as_bucket_view=True)",
    "copy": "each gradient is a tensor of its own, copied into the bucket and back (DDP's default)",
    "strided": "as copy, from gradients that are not contiguous (transposed, channels last)",
}


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Options. `elements` gradients are reduced a step; `seconds` is the time for one case."""

    elements: int = 16 * MIB
    buckets: tuple[int, ...] = BUCKETS  # bytes; 0: one collective a tensor
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    every: tuple[int, ...] = EVERY
    seconds: float = 1.0
    rounds: int = 3  # the whole plan is gone through so often, so that drift meets all cases alike


class BucketCase(msgspec.Struct, frozen=True, kw_only=True):
    """One layout: how gradients lie, and how often they are reduced."""

    bucket: int  # bytes, 0: one collective a tensor
    dtype: str
    layout: Layout
    every: int  # micro-batches to one reduction (gradient accumulation, no_sync)


class BucketRow(msgspec.Struct, frozen=True, kw_only=True):
    """A case as measured: seconds of one reduction of all gradients and of the micro-batches' accumulation with it."""

    case: BucketCase
    collectives: int  # in one reduction
    bytes: int  # of all gradients, one rank
    seconds: float  # median over repetitions, the slowest rank's
    low: float  # least and largest median of a round
    high: float
    reduce_seconds: float  # the reduction alone
    repeats: int

    @property
    def per_batch(self) -> float:
        """Seconds for one micro-batch."""
        return self.seconds / self.case.every


class BucketResult(msgspec.Struct, kw_only=True):
    """All rows; `skipped` says in words what was not run."""

    date: str
    backend: str
    device: str
    ranks: int
    version: str = ""  # NCCL's, where it is the backend
    elements: int = 0
    tensors: int = 0
    complete: bool = False
    rows: list[BucketRow] = []
    skipped: list[str] = []


def plan(spec: BucketSpec) -> list[BucketCase]:
    """Bucket sizes in every dtype; then layouts and frequencies at DDP's bucket size, or at one bucket for all.

    Of the sizes that hold all gradients the smallest stands for the others: they are the same layout.
    """
    dtype = spec.dtypes[0]
    base = base_bucket(spec)
    cases = [
        BucketCase(bucket=b, dtype=d, layout="view", every=1) for d in spec.dtypes for b in distinct_buckets(spec, d)
    ]
    cases += [BucketCase(bucket=base, dtype=dtype, layout=layout, every=1) for layout in LAYOUTS]
    cases += [BucketCase(bucket=base, dtype=dtype, layout="view", every=n) for n in spec.every]
    return list(dict.fromkeys(cases))


def distinct_buckets(spec: BucketSpec, dtype: str) -> list[int]:
    """The bucket sizes that differ in layout for the gradients in `dtype`."""
    total = spec.elements * DTYPES[dtype]
    whole = [b for b in spec.buckets if b >= total]
    return [b for b in spec.buckets if b < total] + ([min(whole)] if whole else [])


def base_bucket(spec: BucketSpec) -> int:
    """Where layouts and frequencies are compared: DDP's default, else the largest measured."""
    found = distinct_buckets(spec, spec.dtypes[0])
    return DDP_BUCKET if DDP_BUCKET in found else max(found)


def shapes(elements: int) -> list[tuple[int, ...]]:
    """Tensors of transformer blocks, from the last layer to the first as gradients come; their sizes sum to `elements`.

    Widths are such that there are about four blocks, and at least 64.
    """
    width = max(64, int((elements / 48) ** 0.5) // 64 * 64)
    block = [(width,), (width, 4 * width), (4 * width, width), (width,), (width, width), (3 * width, width)]
    found: list[tuple[int, ...]] = []
    left, n = elements, 0
    while left > 0:
        shape = block[n % len(block)]
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        found.append(shape if size <= left else (left,))
        left, n = left - min(size, left), n + 1
    return found


def assign(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Indices of tensors by bucket, in order, a bucket closed when it has `cap` bytes or more; cap 0: each alone."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        buckets[-1].append(index)
        filled += size
        if filled >= cap:
            buckets.append([])
            filled = 0
    return [b for b in buckets if b]

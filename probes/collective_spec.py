"""The collective benchmark's options and rows, as nccl-tests names its columns. Torch-free."""

from __future__ import annotations

import msgspec

RESULT_FILE = "collectives.json"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")


class BenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes double from `least` to `most`; `iterations` calls are timed together, as in nccl-tests."""

    ops: tuple[str, ...] = ("all_reduce",)
    least: int = 8
    most: int = 128 << 20
    iterations: int = 20
    warm_up: int = 5
    dtype: str = "float32"
    budget_s: float = 2.0  # of one size; fewer iterations where it would be exceeded


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size: `size` is the larger of a rank's input and output; time is the mean over iterations and ranks."""

    op: str
    size: int  # bytes
    count: int  # elements of one rank's smaller buffer, nccl-tests' count
    dtype: str
    redop: str
    root: int
    in_place: bool
    time_us: float
    slowest_us: float  # mean over iterations of the slowest rank
    wrong: int | None  # elements that differ from the exact result; None where not looked at
    iterations: int


class BenchResult(msgspec.Struct, kw_only=True):
    """All rows; `skipped` says in words what was not run."""

    date: str
    backend: str
    device: str
    ranks: int
    version: str = ""  # NCCL's, where it is the backend
    complete: bool = False
    rows: list[BenchRow] = []
    skipped: list[str] = []


def sizes(spec: BenchSpec) -> list[int]:
    """least, 2 x least ... most."""
    found = [spec.least]
    while found[-1] * 2 <= spec.most:
        found.append(found[-1] * 2)
    return found

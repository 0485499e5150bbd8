"""The shape job's options and results: seen shapes through static, dynamic and eager steps. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

RESULT_FILE = "shapes.json"
MOST_SHAPES = 64
Path = Literal["static", "mark_dynamic", "eager"]
PATHS: tuple[Path, ...] = ("static", "mark_dynamic", "eager")


class Shape(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One seen shape: `batch` samples of `seq` tokens (0: the workload has no sequence), seen `count` times."""

    batch: int
    seq: int
    count: int = 1


class ShapesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`shapes` may be empty where `sampler` (file.py:function yielding (batch, seq) pairs) names them."""

    workload: str = "llama"
    size: str = "tiny"
    device: str = "auto"
    dtype: Literal["fp32", "bf16"] = "bf16"
    compile: Literal["block", "model"] = "block"
    shapes: tuple[Shape, ...] = ()
    sampler: str = ""
    samples: int = 1000  # pairs drawn from the sampler at most
    steps: int = 10  # timed steps of each shape and path
    seed: int = 0


class ShapeCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one shape costs on one path; `first_ms` is the first step, with whatever it compiled."""

    batch: int
    seq: int
    count: int
    step_ms: float  # median
    low_ms: float
    high_ms: float
    first_ms: float

    @property
    def compile_s(self) -> float:
        """What the first step took longer than the later ones."""
        return max(0.0, self.first_ms - self.step_ms) / 1e3


class Recompile(msgspec.Struct, frozen=True, kw_only=True):
    """A compile that a failed guard caused."""

    guard: str
    source: str
    seconds: float | None
    shape: str  # batch x seq that was running


class PathResult(msgspec.Struct, kw_only=True):
    """One path over all shapes in the order they were seen; `problem` says why it ended early."""

    path: Path
    shapes: list[ShapeCost] = []
    compile_s: float = 0.0  # Dynamo's own account of all compiles, forward and backward
    graphs: int = 0
    recompiles: list[Recompile] = []
    cache_entries: int | None = None  # compiled versions that Dynamo keeps; None where this torch does not tell
    peak_bytes: int | None = None  # device memory; None on CPU
    problem: str = ""

    @property
    def step_ms(self) -> float | None:
        """Mean step weighted by how often each shape was seen."""
        weight = sum(s.count for s in self.shapes)
        return sum(s.step_ms * s.count for s in self.shapes) / weight if weight else None


class ShapesResult(msgspec.Struct, kw_only=True):
    """All paths, and on what they ran."""

    date: str
    device: str
    torch: str
    spec: ShapesSpec
    title: str
    shapes: list[Shape]
    recompile_limit: int  # torch's own; it was raised for the measurement where the shapes are more
    paths: list[PathResult] = []
    notes: list[str] = []
    complete: bool = False

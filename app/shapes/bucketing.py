"""Which shapes to pad to: the buckets that cost least in padded steps and compiles together. Pure.

Buckets are chosen among the seen shapes, whose step was measured; a shape runs in the cheapest bucket that is at least
as large in batch and in sequence.

    cost(B) = steps x sum_i share_i x min_{b in B, b >= i} step(b) + sum_{b in B} compile(b)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf

import msgspec

EXACT = 12  # shapes up to which all subsets are tried


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A seen shape with its measured static step and compile; `count` is how often it was seen."""

    batch: int
    seq: int
    count: int
    step_ms: float
    compile_s: float


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A shape to pad to and the seen shapes that run in it."""

    batch: int
    seq: int
    members: list[tuple[int, int]]


class Bucketing(msgspec.Struct, frozen=True, kw_only=True):
    """The choice: what a mean step, all compiles and the whole run cost with it; `exact` where no other is cheaper."""

    buckets: list[Bucket]
    step_ms: float
    compile_s: float
    total_s: float
    padding: float  # share of the computed samples x tokens that is padding
    exact: bool


def covers(bucket: Candidate, shape: Candidate) -> bool:
    """Whether a shape can be padded to the bucket."""
    return bucket.batch >= shape.batch and bucket.seq >= shape.seq


def choose(shapes: Sequence[Candidate], steps: int) -> Bucketing:
    """The cheapest buckets for a run of `steps` steps.

    All subsets are tried for up to EXACT shapes; above, buckets are dropped one by one while that helps. Raises
    ValueError without shapes.
    """
    if not shapes:
        raise ValueError("no shapes to bucket")
    exact = len(shapes) <= EXACT
    chosen = _best_subset(shapes, steps) if exact else _descend(shapes, steps)
    return describe(shapes, chosen, steps, exact=exact)


def describe(shapes: Sequence[Candidate], buckets: Sequence[int], steps: int, *, exact: bool = False) -> Bucketing:
    """What a choice of buckets (indices into `shapes`) costs. Raises ValueError where a shape fits none of them."""
    homes = [_home(shapes, i, buckets) for i in range(len(shapes))]
    if None in homes:
        raise ValueError("a shape fits no bucket")
    weight = sum(s.count for s in shapes)
    used = [b for b in buckets if b in homes]
    step = sum(s.count * shapes[h].step_ms for s, h in zip(shapes, homes, strict=True) if h is not None) / weight
    compile_s = sum(shapes[b].compile_s for b in used)
    members = {b: [(shapes[i].batch, shapes[i].seq) for i, h in enumerate(homes) if h == b] for b in used}
    real = sum(s.count * _area(s) for s in shapes)
    padded = sum(s.count * _area(shapes[h]) for s, h in zip(shapes, homes, strict=True) if h is not None)
    found = [Bucket(batch=shapes[b].batch, seq=shapes[b].seq, members=members[b]) for b in used]
    return Bucketing(
        buckets=sorted(found, key=lambda b: (b.batch, b.seq)),
        step_ms=step,
        compile_s=compile_s,
        total_s=steps * step / 1e3 + compile_s,
        padding=1 - real / padded,
        exact=exact,
    )


def _area(shape: Candidate) -> int:
    return shape.batch * max(shape.seq, 1)


def _home(shapes: Sequence[Candidate], index: int, buckets: Iterable[int]) -> int | None:
    fits = [b for b in buckets if covers(shapes[b], shapes[index])]
    return min(fits, key=lambda b: (shapes[b].step_ms, _area(shapes[b]), b), default=None)


def _cost(shapes: Sequence[Candidate], buckets: Sequence[int], steps: int) -> float:
    """Seconds of the run; infinite where a shape fits no bucket."""
    weight = sum(s.count for s in shapes)
    seconds = sum(shapes[b].compile_s for b in buckets)
    for index, shape in enumerate(shapes):
        home = _home(shapes, index, buckets)
        if home is None:
            return inf
        seconds += steps * shape.count / weight * shapes[home].step_ms / 1e3
    return seconds


def _best_subset(shapes: Sequence[Candidate], steps: int) -> tuple[int, ...]:
    every = range(len(shapes))
    subsets = (c for n in range(1, len(shapes) + 1) for c in combinations(every, n))
    return min(subsets, key=lambda c: _cost(shapes, c, steps))


def _descend(shapes: Sequence[Candidate], steps: int) -> tuple[int, ...]:
    current = tuple(range(len(shapes)))
    best = _cost(shapes, current, steps)
    while len(current) > 1:
        options = [(_cost(shapes, rest, steps), rest) for rest in combinations(current, len(current) - 1)]
        cost, rest = min(options)
        if cost >= best:
            break
        best, current = cost, rest
    return current

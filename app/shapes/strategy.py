"""The strategy table of a conditional-fusion design, claimed beside measured, and what to do about the shapes. Pure."""

from __future__ import annotations

import msgspec

from costlab.app.shapes.bucketing import Bucketing, Candidate, choose
from costlab.probes.shapes_spec import PathResult, ShapesResult


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table as it is often given, in words."""

    strategy: str
    path: str
    latency: str
    memory: str
    when: str


CLAIMS = (
    Claim(strategy="full fusion", path="static", latency="lowest", memory="medium", when="shapes stable and aligned"),
    Claim(
        strategy="JIT fallback", path="mark_dynamic", latency="medium to high", memory="low", when="rare dynamic shapes"
    ),
    Claim(strategy="op by op", path="eager", latency="highest", memory="lowest", when="emergency fallback"),
)


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A claim with what was measured; ranks count from 1 = lowest, over the paths that ran all shapes.

    `holds` is None where a path is missing or the ranges of its steps overlap another's: then nothing was shown.
    """

    claim: Claim
    step_ms: float | None
    of_fastest: float | None
    compile_s: float | None
    peak_bytes: int | None
    latency_rank: int | None
    memory_rank: int | None
    holds: bool | None  # whether latency and, where measured, memory are ranked as claimed


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One way through a whole run: its seconds are steps and compiles."""

    name: str
    step_ms: float
    compile_s: float
    total_s: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Plans for a run of `steps` steps, cheapest first, and the bucketing among them (None: static did not finish)."""

    steps: int
    plans: list[Plan]
    bucketing: Bucketing | None


def strategies(result: ShapesResult) -> list[StrategyRow]:
    """The three rows."""
    paths = {p.path: p for p in result.paths if _finished(p, result)}
    return [_row(claim, paths.get(claim.path), list(paths.values())) for claim in CLAIMS]  # type: ignore[call-overload]


_ORDER = {"static": (1, 3), "mark_dynamic": (2, 2), "eager": (3, 1)}  # claimed ranks of latency and memory


def _row(claim: Claim, path: PathResult | None, paths: list[PathResult]) -> StrategyRow:
    steps = sorted(p.step_ms for p in paths if p.step_ms is not None)
    peaks = sorted(p.peak_bytes for p in paths if p.peak_bytes is not None)
    step = None if path is None else path.step_ms
    peak = None if path is None else path.peak_bytes
    latency = None if step is None else 1 + steps.index(step)
    memory = None if peak is None else 1 + peaks.index(peak)
    claimed = _ORDER[claim.path]
    others = [p for p in paths if p is not path]
    compared = len(steps) == len(CLAIMS) and path is not None and not any(_overlap(path, p) for p in others)
    holds = latency == claimed[0] and (memory is None or memory == claimed[1]) if compared else None
    return StrategyRow(
        claim=claim,
        step_ms=step,
        of_fastest=step / steps[0] if step is not None else None,
        compile_s=None if path is None or claim.path == "eager" else path.compile_s,
        peak_bytes=peak,
        latency_rank=latency,
        memory_rank=memory,
        holds=holds,
    )


def _overlap(a: PathResult, b: PathResult) -> bool:
    """Whether two paths' fastest and slowest steps, weighted over the shapes, leave their order open."""
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    return low_a <= high_b and low_b <= high_a


def _range(path: PathResult) -> tuple[float, float]:
    weight = sum(s.count for s in path.shapes)
    low, high = (sum(getattr(s, f) * s.count for s in path.shapes) / weight for f in ("low_ms", "high_ms"))
    return low, high


def _finished(path: PathResult, result: ShapesResult) -> bool:
    return not path.problem and len(path.shapes) == len(result.shapes)


def advise(result: ShapesResult, steps: int) -> Advice:
    """What every way costs over `steps` steps: each shape compiled, buckets, dynamic shapes, eager."""
    plans: list[Plan] = []
    bucketing = None
    for path in (p for p in result.paths if _finished(p, result)):
        step = path.step_ms or 0.0
        compile_s = 0.0 if path.path == "eager" else sum(s.compile_s for s in path.shapes)
        plans.append(_plan(_NAMES[path.path], step, compile_s, steps))
        if path.path == "static":
            bucketing = choose(candidates(path), steps)
            plans.append(_plan("pad to buckets", bucketing.step_ms, bucketing.compile_s, steps))
    return Advice(steps=steps, plans=sorted(plans, key=lambda p: p.total_s), bucketing=bucketing)


_NAMES = {"static": "compile every shape", "mark_dynamic": "mark_dynamic", "eager": "eager"}


def candidates(path: PathResult) -> list[Candidate]:
    """The shapes of the static path as bucketing takes them."""
    return [
        Candidate(batch=s.batch, seq=s.seq, count=s.count, step_ms=s.step_ms, compile_s=s.compile_s)
        for s in path.shapes
    ]


def _plan(name: str, step_ms: float, compile_s: float, steps: int) -> Plan:
    return Plan(name=name, step_ms=step_ms, compile_s=compile_s, total_s=steps * step_ms / 1e3 + compile_s)

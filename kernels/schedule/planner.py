"""Chooses the schedule and the chunking of an all-reduce, and says why. Torch-free.

Candidates are timed by measured curves where there are any, by the simulator on fabrics of a few ranks, and by the
formulas of `cost.py` otherwise; each candidate says which. Measured candidates are only compared with measured ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from costlab.kernels.schedule.cost import CostModel, Library
from costlab.kernels.schedule.errors import FabricError
from costlab.kernels.schedule.plan import ALL_BUT_SYMMETRIC, OWN, SYMMETRIC, Plan, Schedule
from costlab.kernels.schedule.simulator import simulate
from costlab.kernels.schedule.topology import Fabric, chain_order

Source = Literal["measured", "simulated", "modelled"]
Curve = Sequence[tuple[int, float]]  # (bytes, seconds), ascending

LEAST_CHUNK = 4096  # bytes; below, a chunk is nothing but latency
MOST_CHUNKS = 512
SIMULATED_RANKS = 8
ALIKE = 0.03  # predictions this close are the same
MARGIN = 0.05  # by so much, and the noise, a measured schedule must beat the library's own all-reduce
SCRATCH = 32 << 20  # bytes a ring may hold to receive into
_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the all-reduce and its time."""

    plan: Plan
    seconds: float
    source: Source

    def describe(self) -> str:
        """For people: schedule, chunks and, for chains, the order of segments where it is not the layout's."""
        text: str = self.plan.schedule
        if self.plan.schedule != "backend" and self.plan.chunks > 1:
            text += f" in {self.plan.chunks} chunks"
        if self.plan.order and self.plan.order != tuple(range(len(self.plan.order))):
            shown = "-".join(map(str, self.plan.order[:8])) + ("-..." if len(self.plan.order) > 8 else "")
            text += f" over segments {shown}"
        return text


@dataclass(frozen=True, slots=True)
class Choice:
    """The planner's answer for one size.

    Attributes:
        best: the fastest candidate, or the library's own all-reduce where no measured one beats it by more than MARGIN
            and the noise.
        candidates: the best of each schedule, `best` first, then the fastest first.
        bound: seconds that no all-reduce without in-network reduction can beat.
        sentence: the reason, with numbers.
    """

    nbytes: int
    best: Candidate
    candidates: tuple[Candidate, ...]
    bound: float
    sentence: str

    @property
    def plan(self) -> Plan:
        """What to run."""
        return self.best.plan

    def seconds(self, schedule: Schedule) -> float | None:
        """Time of the best plan of one schedule; None if it is no candidate."""
        return next((c.seconds for c in self.candidates if c.plan.schedule == schedule), None)


class Planner:
    """Plans all-reduces on one fabric.

    Args:
        fabric: calibrated or nominal.
        library: what `backend` is.
        schedules: which may be used; all that the fabric allows if None. Symmetric memory must be asked for.
        measured: curves of plans measured on this very fabric.
        memory: bytes/s of a device copy, for the symmetric-memory schedules.
        simulated_ranks: up to so many ranks, candidates are simulated instead of reckoned.
        noise: of the measured curves by size, a share of their times (0.02: 2 %); bytes between two sizes have the
            larger noise of both.
        beside: curves of plans with compute beside them, until both are done. A plan that takes longer there than the
            library's all-reduce does is no candidate.
    """

    def __init__(
        self,
        fabric: Fabric,
        library: Library = "nccl",
        schedules: Sequence[Schedule] | None = None,
        measured: Mapping[Plan, Curve] | None = None,
        memory: float | None = None,
        simulated_ranks: int = SIMULATED_RANKS,
        noise: Mapping[int, float] | None = None,
        beside: Mapping[Plan, Curve] | None = None,
    ) -> None:
        self.fabric = fabric
        self.simulated_ranks = simulated_ranks
        self.model = CostModel(fabric, library, memory)
        self.schedules: Sequence[Schedule] = tuple(schedules) if schedules else ALL_BUT_SYMMETRIC
        self.measured = {plan: sorted(curve) for plan, curve in (measured or {}).items() if curve}
        self.noise = dict(sorted((noise or {}).items()))
        self.beside = {plan: sorted(curve) for plan, curve in (beside or {}).items() if curve}
        self._order = chain_order(fabric)

    def choose(self, nbytes: int) -> Choice:
        """The fastest candidate for a message of `nbytes`, with its reason."""
        rows = self._measured(nbytes) if self.measured else self._predicted(nbytes)
        ranked = _preferring_the_library(sorted(rows, key=lambda c: c.seconds), self.margin(nbytes))
        bound = self.model.bound(nbytes)
        return Choice(nbytes, ranked[0], ranked, bound, self._explain(nbytes, ranked, bound))

    def table(self, sizes: Sequence[int]) -> list[Choice]:
        """One choice a size."""
        return [self.choose(size) for size in sizes]

    def chunks(self, schedule: Schedule, nbytes: int) -> int:
        """The best number of chunks by the formulas ("auto")."""
        return _sparing([(self.model.seconds(p, nbytes), p) for p in self._plans(schedule, nbytes)])[1].chunks

    def margin(self, nbytes: int) -> float:
        """The share of its own time by which a measured schedule must beat the library's all-reduce."""
        sizes = list(self.noise)
        at = bisect_left(sizes, nbytes)
        exact = sizes[at : at + 1] == [nbytes]
        near = sizes[at : at + 1] if exact else sizes[max(0, at - 1) : at + 1]
        return MARGIN + max((self.noise[size] for size in near), default=0.0)

    # ------------------------------------------------------------------ candidates

    def _measured(self, nbytes: int) -> list[Candidate]:
        best: dict[str, Candidate] = {}
        covering = {p: c for p, c in self.measured.items() if c[0][0] <= nbytes <= c[-1][0]}
        for plan, curve in (covering or self.measured).items():
            if self._hinders(plan, nbytes):
                continue
            candidate = Candidate(plan, interpolate(curve, nbytes), "measured")
            if plan.schedule not in best or candidate.seconds < best[plan.schedule].seconds:
                best[plan.schedule] = candidate
        return list(best.values())

    def _hinders(self, plan: Plan, nbytes: int) -> bool:
        """Whether compute beside the plan was seen to end later than beside the library's all-reduce."""
        ours = self.beside.get(plan)
        library = next((curve for p, curve in self.beside.items() if p.schedule == "backend"), None)
        return ours is not None and library is not None and interpolate(ours, nbytes) > interpolate(library, nbytes)

    def _predicted(self, nbytes: int) -> list[Candidate]:
        plans = ((schedule, self._plans(schedule, nbytes)) for schedule in self.schedules)
        return [self._best(schedule, rows, nbytes) for schedule, rows in plans if rows]

    def _best(self, schedule: Schedule, plans: Sequence[Plan], nbytes: int) -> Candidate:
        timed = [(self.model.seconds(p, nbytes), p) for p in plans]
        small = 1 < self.fabric.world_size <= self.simulated_ranks
        if schedule not in OWN or not small or nbytes == 0:
            seconds, plan = _sparing(timed)
            return Candidate(plan, seconds, "modelled")
        near = [*sorted(timed, key=lambda row: row[0])[:4], _sparing(timed)]
        simulated = [(simulate(self.fabric, p, nbytes).seconds, p) for p in dict.fromkeys(p for _, p in near)]
        seconds, plan = _sparing(simulated)
        return Candidate(plan, seconds, "simulated")

    def _plans(self, schedule: Schedule, nbytes: int) -> list[Plan]:
        segments = len(self.fabric.segments)
        if schedule in SYMMETRIC:
            return [Plan(schedule)] if segments == 1 else []
        if schedule not in OWN:
            return [Plan(schedule)]
        if schedule == "hybrid" and segments == 1:
            return []  # the same steps as two-level: there is nothing between
        counts = [c for c in _CHUNKS if c == 1 or nbytes // c >= LEAST_CHUNK]
        if schedule == "ring":
            return self._rings(nbytes, counts)
        order = self._order if schedule in ("chain", "hybrid") and segments > 2 else ()
        return [Plan(schedule, chunks=c, order=order) for c in counts]

    def _rings(self, nbytes: int, counts: Sequence[int]) -> list[Plan]:
        """A channel per NIC, and chunks small enough for the scratch that a ring receives into."""
        channels = min(s.nics for s in self.fabric.segments) if len(self.fabric.segments) > 1 else 1
        needed = max(1, math.ceil(nbytes / self.fabric.world_size / SCRATCH))
        plain = Plan("ring", chunks=max(channels, needed), channels=min(channels, max(counts)))
        paired = Plan("ring", chunks=max(2 * channels, needed), channels=2 * channels)
        return [plain, paired] if nbytes // paired.chunks >= LEAST_CHUNK else [plain]

    # ------------------------------------------------------------------ words

    def _explain(self, nbytes: int, ranked: tuple[Candidate, ...], bound: float) -> str:
        best = ranked[0]
        text = f"{best.describe()}: {best.source} {time_text(best.seconds)} for {size_text(nbytes)}"
        if len(ranked) > 1:
            other = ranked[1]
            text += f", next {other.describe()} {time_text(other.seconds)} ({_ratio(other.seconds, best.seconds)})"
        ring = next((c for c in ranked[1:] if c.plan.schedule == "ring"), None)
        if ring is not None and ring is not ranked[1]:
            text += f", ring {time_text(ring.seconds)} ({_ratio(ring.seconds, best.seconds)})"
        if best.plan.schedule in OWN and self.fabric.world_size > 1:
            load = self.model.pipeline(best.plan).busiest
            text += f"; {resource_text(load.resource)} carries {load.bytes_per_byte:.2f} x the message"
        return f"{text}; the lower bound is {time_text(bound)}."


def _sparing(timed: Sequence[tuple[float, Plan]]) -> tuple[float, Plan]:
    """The plan with the fewest chunks among those within ALIKE of the fastest.

    Predictions are no more exact than that, and what every chunk costs on the host is what they know least.
    """
    limit = min(seconds for seconds, _ in timed) * (1 + ALIKE)
    return min((row for row in timed if row[0] <= limit), key=lambda row: (row[1].chunks, row[0]))


def _preferring_the_library(ranked: Sequence[Candidate], margin: float) -> tuple[Candidate, ...]:
    """A gain within the noise of its measurement is none; measured candidates only: a formula has no noise.

    A run's conditions differ a little from those of the measurement, and the library is never worse than itself.
    """
    limit = ranked[0].seconds * (1 + margin)
    own = [c for c in ranked if c.plan.schedule == "backend" and c.source == "measured" and c.seconds <= limit]
    return (*own, *(c for c in ranked if c not in own))


def _ratio(seconds: float, best: float) -> str:
    return f"{seconds / best:.2f}x" if best > 0 else "the same"


def interpolate(curve: Curve, nbytes: int) -> float:
    """Seconds at `nbytes` between measured points, linear in the logarithms; the ends keep their time or bandwidth."""
    if not curve:
        raise FabricError("a measured curve needs points")
    sizes = [size for size, _ in curve]
    at = bisect_left(sizes, nbytes)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1] * nbytes / curve[-1][0]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    share = math.log(nbytes / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def time_text(seconds: float) -> str:
    """Seconds in three significant digits and a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}" if seconds / scale < 1000 else f"{seconds / scale:.0f} {unit}"
    return "0 us"


def size_text(nbytes: int) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def resource_text(resource: object) -> str:
    """A fabric resource in words."""
    if not isinstance(resource, tuple):
        return "no link"
    kind, *where = resource
    words = {
        "out": "rank {0}'s port",
        "in": "rank {0}'s port",
        "tx": "NIC {1} of segment {0}",
        "rx": "NIC {1} of segment {0}",
        "up": "the uplink of leaf {0}",
        "down": "the uplink of leaf {0}",
        "cable": "the cable from segment {0} to {1}",
        "machine": "the one machine that emulates all hosts",
    }
    return words[kind].format(*where)

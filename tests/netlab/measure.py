"""Measures the schedules in a lab and compares them with the planner and the simulator on the calibrated fabric."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import netlab_ranks
from lab import Layout, lab
from rank_pool import RankPool

from costlab.kernels.schedule.plan import OWN, Plan
from costlab.kernels.schedule.planner import Choice, Planner
from costlab.kernels.schedule.simulator import simulate
from costlab.kernels.schedule.topology import Fabric, Link, Segment, Wiring

SMALL = 256
PROBE = 128 << 10


@dataclass(frozen=True)
class Cell:
    """One plan in one layout: measured seconds (the median over repeats of the slowest rank) and simulated ones."""

    layout: str
    plan: Plan
    nbytes: int
    measured: float
    simulated: float | None

    @property
    def error(self) -> float | None:
        return None if self.simulated is None else self.simulated / self.measured - 1


@dataclass(frozen=True)
class Result:
    """All cells of a layout, the planner's choice among them, and the calibrated fabric."""

    layout: Layout
    fabric: Fabric
    choice: Choice
    cells: tuple[Cell, ...]

    def seconds(self, schedule: str) -> float:
        """Fastest measured plan of a schedule."""
        return min(c.measured for c in self.cells if c.plan.schedule == schedule)

    def regret(self) -> float:
        """How much slower the planner's choice is than the fastest schedule, each with the planner's chunks."""
        return self._over([c.measured for c in self.cells if c.plan in self._planned()])

    def regret_over_chunks(self) -> float:
        """The same against every plan measured, also those with other chunk counts and orders."""
        return self._over([c.measured for c in self.cells])

    def _planned(self) -> set[Plan]:
        return {c.plan for c in self.choice.candidates}

    def _over(self, others: list[float]) -> float:
        chosen = next(c.measured for c in self.cells if c.plan == self.choice.plan)
        return chosen / min(others) - 1


def measure(layout: Layout, nbytes: int, repeats: int, others: bool = True) -> Result:
    """Build the lab, calibrate, plan, run every schedule's best plan and, if asked, some others."""
    with lab(layout) as namespaces:
        pool = RankPool(len(namespaces), namespaces)
        try:
            fabric = calibrate(pool, layout)
            choice = Planner(fabric, library="gloo").choose(nbytes)
            plans = [c.plan for c in choice.candidates] + (other_plans(choice, layout) if others else [])
            size = len(namespaces)
            timed = [pool.run(netlab_ranks.timed_plan, size, layout.segments(), p, nbytes, repeats) for p in plans]
        finally:
            pool.close()
    cells = []
    for plan, rows in zip(plans, timed, strict=True):
        slowest = [max(turn) for turn in zip(*rows, strict=True)]
        simulated = simulate(fabric, plan, nbytes).seconds if plan.schedule in OWN else None
        cells.append(Cell(layout.name, plan, nbytes, statistics.median(slowest), simulated))
    return Result(layout, fabric, choice, tuple(cells))


def other_plans(choice: Choice, layout: Layout) -> list[Plan]:
    """Plans that the planner did not pick: other chunk counts, and chains in the hosts' own order."""
    order = tuple(range(layout.hosts)) if layout.hosts > 2 else ()
    plans = [
        Plan("ring"),
        Plan("ring", chunks=4, channels=2),
        Plan("two-level"),
        Plan("two-level", chunks=4),
        Plan("hybrid", chunks=8, order=order),
        Plan("hybrid", chunks=16, order=order),
        Plan("chain", chunks=16, order=order),
    ]
    taken = {c.plan for c in choice.candidates}
    return [p for p in plans if p not in taken]


def calibrate(pool: RankPool, layout: Layout) -> Fabric:
    """Latency and bandwidth of the lab's links, from exchanges of small and large messages.

    Latencies are those of a step with all ranks busy, as in a schedule: eight processes share few cores here. A step's
    host time is what each further chunk of an all but empty chain all-reduce takes. Bandwidth is that of two hosts
    sending to each other at once, as the difference between two lengths, which is free of latency and of the burst
    that a token bucket lets pass at first.
    """
    segments, size = layout.segments(), layout.hosts * layout.ranks
    inside = [list(s) for s in segments]
    lanes = [list(lane) for lane in zip(*segments, strict=True)]
    few, many = (max(pool.run(netlab_ranks.tiny_chunks, size, segments, chunks)) for chunks in (16, 112))
    step = max(0.0, (many - few) / 96)
    once_in = max(pool.run(netlab_ranks.exchange, size, segments, inside, SMALL, 40))
    once_out = max(pool.run(netlab_ranks.exchange, size, segments, lanes, SMALL, 40))
    large = max(pool.run(netlab_ranks.exchange, size, segments, inside, 8 * PROBE, 8))
    near = Link(max(0.0, once_in - step), 8 * PROBE / max(large - once_in, 1e-6))
    edges = [
        (h, (h + 1) % layout.hosts) for h in range(layout.hosts if layout.wiring == "switch" else layout.hosts - 1)
    ]
    speed = dict.fromkeys(range(layout.hosts), 0.0)
    for a, b in edges:
        pair = [[segments[a][0], segments[b][0]]]
        short, long = (
            max(pool.run(netlab_ranks.exchange, size, segments, pair, pieces * PROBE, 1)) for pieces in (2, 6)
        )
        for host in (a, b):
            speed[host] = max(speed[host], 4 * PROBE / (long - short))
    rows = tuple(Segment(s, near, Link(max(0.0, once_out - step), speed[h])) for h, s in enumerate(segments))
    wiring: Wiring = "line" if layout.wiring == "line" else "switch"
    return Fabric(rows, wiring=wiring, step=step, sharing="fair", name=layout.name)

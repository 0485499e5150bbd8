"""The planner's answer as data: every schedule over message sizes, the choice for one size, the simulator beside it."""

from __future__ import annotations

import re

import msgspec

from costlab.app.plan.machine import Machine, PlanProblem, Shape, fabric
from costlab.kernels.schedule.cost import CostModel
from costlab.kernels.schedule.errors import ScheduleError
from costlab.kernels.schedule.plan import OWN, Plan
from costlab.kernels.schedule.planner import SIMULATED_RANKS, Choice, Planner
from costlab.kernels.schedule.seed_table import seed_table, verdict
from costlab.kernels.schedule.simulator import simulate
from costlab.kernels.schedule.topology import Fabric

CURVE = tuple(1 << e for e in range(16, 36))  # 64 KiB to 32 GiB
MESSAGES = 20_000  # a simulation of as many takes under half a second


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule's best plan for one size. `source` is how `seconds` was found: simulated or modelled."""

    schedule: str
    what: str
    chunks: int
    channels: int
    order: list[int]
    seconds: float
    source: str


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One message size: the schedules, the chosen first, and the time that no all-reduce can beat."""

    nbytes: int
    schedules: list[Timed]
    bound: float


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The discrete-event simulator against the formula for one plan; on fewer ranks where all would take too long."""

    schedule: str
    ranks: int
    chunks: int
    simulated: float
    modelled: float
    messages: int


class SeedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the article's table, and the link bandwidth it would need (bytes/s)."""

    schedule: str
    seconds: float
    needs: float
    possible: bool


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `costlab plan` prints. Times in seconds, sizes in bytes."""

    machine: Machine
    shape: Shape
    hosts: int
    chosen: Point
    sentence: str
    checks: list[Check]
    curve: list[Point]
    seed: list[SeedClaim]
    seed_verdict: str


def make_report(host: Machine, shape: Shape, nbytes: int) -> PlanReport:
    """Plan an all-reduce of `nbytes` and the curve over sizes.

    Raises:
        PlanProblem: ranks or sizes that cannot be planned.
    """
    if nbytes < 1:
        raise PlanProblem(f"--size must be above zero, got {nbytes}")
    wanted = fabric(host, shape)
    planner = Planner(wanted, host.library)
    few = wanted.world_size <= SIMULATED_RANKS  # the curve is reckoned all the same: it has twenty sizes
    formulas = Planner(wanted, host.library, simulated_ranks=0) if few else planner
    choice = planner.choose(nbytes)
    return PlanReport(
        machine=host,
        shape=shape,
        hosts=len(wanted.segments),
        chosen=_point(choice),
        sentence=re.sub(r"\bbackend\b", own_name(host), choice.sentence),
        checks=_checks(host, shape, wanted, choice),
        curve=[_point(row) for row in formulas.table(CURVE)],
        seed=[
            SeedClaim(schedule=r.schedule, seconds=r.seconds, needs=r.implied_peak, possible=r.possible)
            for r in seed_table()
        ],
        seed_verdict=verdict(),
    )


def own_name(host: Machine) -> str:
    """What people call the library's own all-reduce."""
    return "NCCL's own" if host.library == "nccl" else "gloo's own"


def _point(choice: Choice) -> Point:
    rows = [
        Timed(
            schedule=c.plan.schedule,
            what=c.describe(),
            chunks=c.plan.chunks,
            channels=c.plan.channels,
            order=list(c.plan.order),
            seconds=c.seconds,
            source=c.source,
        )
        for c in choice.candidates
    ]
    return Point(nbytes=choice.nbytes, schedules=rows, bound=choice.bound)


def _checks(host: Machine, shape: Shape, wanted: Fabric, choice: Choice) -> list[Check]:
    """Every own schedule's plan of this size, simulated: on all ranks, or on as many hosts as can be afforded."""
    rows = []
    for candidate in choice.candidates:
        if candidate.plan.schedule in OWN and wanted.world_size > 1:
            check = _check(host, shape, candidate.plan, choice.nbytes)
            if check is not None:
                rows.append(check)
    return rows


def _check(host: Machine, shape: Shape, plan: Plan, nbytes: int) -> Check | None:
    ranks = _affordable(host, shape.ranks, plan)
    if ranks < 2:
        return None
    slow = {h: part for h, part in shape.slow.items() if h < -(-ranks // host.ranks)}
    smaller = fabric(host, msgspec.structs.replace(shape, ranks=ranks, slow=slow))
    if ranks < shape.ranks:
        plan = Plan(plan.schedule, plan.chunks, plan.channels)
    try:
        found = simulate(smaller, plan, nbytes)
        modelled = CostModel(smaller, host.library).seconds(plan, nbytes)
    except ScheduleError:
        return None
    return Check(
        schedule=plan.schedule,
        ranks=ranks,
        chunks=plan.chunks,
        simulated=found.seconds,
        modelled=modelled,
        messages=found.messages,
    )


def _affordable(host: Machine, ranks: int, plan: Plan) -> int:
    """The most ranks, in whole hosts, whose programs send at most MESSAGES; a ring sends 2 n (n - 1) a chunk."""

    def messages(n: int) -> int:
        hosts, inside = -(-n // host.ranks), min(n, host.ranks)
        each = {
            "ring": 2 * n * (n - 1),
            "chain": 2 * (n - 1),
            "two-level": 2 * n * (inside - 1) + 2 * n * (hosts - 1),
            "hybrid": 2 * n * (inside - 1) + 2 * n,
        }[plan.schedule]
        return each * plan.chunks

    if messages(ranks) <= MESSAGES:
        return ranks
    hosts = ranks // host.ranks
    while hosts > 1 and messages(hosts * host.ranks) > MESSAGES:
        hosts = hosts * 3 // 4
    least = hosts * host.ranks
    return least if hosts and messages(least) <= 4 * MESSAGES else 0

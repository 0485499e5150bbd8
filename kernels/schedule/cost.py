"""Time of a schedule on a fabric by the alpha-beta model with ports. Torch-free, seconds and bytes.

The model (Hockney 1994; the port view as in Cho et al., BlueConnect, 2019): a message of b bytes takes alpha + b/B;
every directed resource (a rank's port, a NIC's transmit and receive side, a cable, an uplink) carries its bytes one
after the other. A schedule cut into c chunks of m bytes then takes

    T = fill(m) + (c - 1) * period(m)

fill is the first chunk's way through all stages, period the time by which the slowest stage or the busiest resource is
held for each further chunk. Per chunk and element the traffic is that of the classical algorithms: a ring moves
2(N-1)/N (Patarasuk & Yuan 2009), a chain sends 1 at its ends and 2 inside, a two-level ring 2(k-1)/k over the NICs of
k segments. The simulator (`simulator.py`) executes the same programs and is what these formulas are checked against.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from costlab.kernels.schedule.errors import ScheduleRefused
from costlab.kernels.schedule.plan import SYMMETRIC, Plan
from costlab.kernels.schedule.program import visit
from costlab.kernels.schedule.topology import Fabric, Route

Library = Literal["nccl", "gloo"]
_TREE_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)


class Affine(NamedTuple):
    """constant + slope * bytes, in seconds."""

    constant: float
    slope: float

    def at(self, nbytes: float) -> float:
        """Seconds for that many bytes."""
        return self.constant + self.slope * nbytes


class Load(NamedTuple):
    """The resource that a schedule keeps busiest: seconds and bytes through it for each byte of the message."""

    resource: Hashable
    seconds_per_byte: float
    bytes_per_byte: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Fill and period of a schedule, as functions of the bytes of one chunk.

    Attributes:
        fill: stages that the first chunk passes one after the other.
        first: alternatives for the stage between ranks or segments, of which the longest counts for the first chunk:
            the latency path, or the bytes that the lanes send over shared resources.
        stages: stages that a chunk of one channel holds; the slowest sets the channel's period.
        busiest: the resource shared by all channels that limits the whole.
        tail: latency after the last byte.
    """

    fill: Affine
    first: tuple[Affine, ...]
    stages: tuple[Affine, ...]
    busiest: Load
    tail: float = 0.0

    def seconds(self, nbytes: float, chunks: int, channels: int) -> float:
        """Time of the whole message."""
        m = nbytes / chunks
        rounds = -(-chunks // channels)
        period = max(stage.at(m) for stage in self.stages)
        shared = self.busiest.seconds_per_byte * m
        fill = self.fill.at(m) + max((row.at(m) for row in self.first), default=0.0)
        pipelined = fill + max((rounds - 1) * period, max(0, chunks - channels) * shared)
        return max(pipelined, self.busiest.seconds_per_byte * nbytes + self.tail)


class CostModel:
    """Predicts all-reduce times on one fabric.

    Args:
        fabric: segments, links and wiring.
        library: whose all-reduce `backend` stands for: NCCL takes the better of ring and tree, gloo rings only.
        memory: bytes/s of a device copy, for the symmetric-memory schedules' copy into the buffer; None leaves it out.
    """

    def __init__(self, fabric: Fabric, library: Library = "nccl", memory: float | None = None) -> None:
        self.fabric = fabric
        self.library = library
        self.memory = memory
        self._pipelines: dict[Plan, Pipeline] = {}
        self._trips: dict[tuple[Plan, int, bool], _Trip] = {}
        self._lanes = fabric.lanes

    def seconds(self, plan: Plan, nbytes: int) -> float:
        """Predicted seconds of an all-reduce of `nbytes` by `plan`.

        Raises:
            ScheduleRefused: the schedule cannot run on this fabric.
        """
        if self.fabric.world_size == 1 or nbytes == 0:
            return 0.0
        if plan.schedule in SYMMETRIC:
            return self._symmetric(plan, nbytes)
        if plan.schedule == "backend":
            return self._backend(nbytes)
        return self.pipeline(plan).seconds(nbytes, plan.chunks, plan.channels)

    def pipeline(self, plan: Plan) -> Pipeline:
        """Fill and period of an own schedule; independent of its number of chunks."""
        key = Plan(plan.schedule, channels=plan.channels, order=plan.order)
        if key not in self._pipelines:
            make: dict[str, Callable[[Plan], Pipeline]] = {
                "ring": self._ring,
                "chain": self._chain,
                "two-level": self._segmented,
                "hybrid": self._segmented,
            }
            self._pipelines[key] = make[plan.schedule](key)
        return self._pipelines[key]

    # ------------------------------------------------------------------ own schedules

    def _ring(self, plan: Plan, step: float | None = None) -> Pipeline:
        """2(N-1) steps of m/N: the latency path of one slice, or the busiest resource of all channels."""
        size = self.fabric.world_size
        host = self.fabric.step if step is None else step
        turns, share = 2 * (size - 1), 1 / size
        loads = _Loads()
        alternatives = []
        for channel, times in self._distinct(plan.channels).items():
            trip = self._trip(plan, channel, ring=True)
            loads.merge(trip.loads, turns * share * times / plan.channels)
            alternatives += [_ring_path(trip.ways, host, share), *_repeated(trip.ways, host, share, turns)]
        alpha = max(way.alpha for way in trip.ways)
        return Pipeline(_NOTHING, tuple(alternatives), tuple(alternatives), loads.busiest(), alpha + host)

    def _trip(self, plan: Plan, channel: int, *, ring: bool) -> _Trip:
        """A channel's way over all ranks: once around a ring, or up and down a chain."""
        key = (Plan("ring", order=plan.order), channel, ring)
        if key not in self._trips:
            order = visit(plan, self.fabric.layout(), channel)
            edges = list(pairwise([*order, order[0]] if ring else order))
            self._trips[key] = _travel(self.fabric.route(*e) for e in (edges if ring else _both(edges)))
        return self._trips[key]

    def _distinct(self, channels: int) -> dict[int, int]:
        """Channels that differ in their paths, and how many are alike: they repeat after a segment's length."""
        sizes = {len(s.ranks) for s in self.fabric.segments}
        period = sizes.pop() if len(sizes) == 1 else channels
        return Counter(c % period for c in range(channels))

    def _chain(self, plan: Plan) -> Pipeline:
        """Up and back down: fill over every link twice, then a piece per period of the busiest port."""
        host = self.fabric.step
        loads = _Loads()
        first: list[Affine] = []
        stages: list[Affine] = []
        for channel, times in self._distinct(plan.channels).items():
            trip = self._trip(plan, channel, ring=False)
            loads.merge(trip.loads, times / plan.channels)
            first.append(_sum(trip.ways, host, 1.0))
            stages += _repeated(trip.ways, host, 1.0, 1)
        return Pipeline(_NOTHING, tuple(first), tuple(stages), loads.busiest())

    def _segmented(self, plan: Plan) -> Pipeline:
        """Reduce-scatter inside, ring or chain between on every lane, all-gather inside."""
        loads = _Loads()
        inside = self._inside(loads)
        if len(self.fabric.segments) == 1:
            return Pipeline(_twice(inside), (), (inside,), loads.busiest())
        order = plan.order or tuple(range(len(self.fabric.segments)))
        ring = plan.schedule == "two-level"
        k, share = len(order), 1 / self._lanes
        between = _Loads()
        trips = [self._lane(lane, order, ring) for lane in range(self._lanes)]
        for trip in trips:
            between.merge(trip.loads, 2 * (k - 1) / k * share if ring else share)
        loads.merge(between)
        make = self._ring_between if ring else self._chain_between
        first, stages = make(trips[0].ways, between.busiest().seconds_per_byte, k, share)
        return Pipeline(_twice(inside), first, (inside, *stages), loads.busiest())

    def _inside(self, loads: _Loads) -> Affine:
        """A reduce-scatter, or an all-gather, in the slowest segment; adds both to the loads."""
        slowest = _NOTHING
        for segment in self.fabric.segments:
            size = len(segment.ranks)
            if size == 1:
                continue
            routes = [self.fabric.route(a, b) for a, b in pairwise([*segment.ranks, segment.ranks[0]])]
            for route in routes:
                loads.add(route, 2 * (size - 1) / size)
            hop = _hop(_way(routes[0]), self.fabric.step, 1 / self._lanes)
            slowest = _larger(slowest, Affine((size - 1) * hop.constant, (size - 1) * hop.slope))
        return slowest

    def _lane(self, lane: int, order: tuple[int, ...], ring: bool) -> _Trip:
        ranks = [self.fabric.segments[s].ranks[lane] for s in order]
        edges = list(pairwise([*ranks, ranks[0]] if ring else ranks))
        return _travel(self.fabric.route(*e) for e in (edges if ring else _both(edges)))

    def _ring_between(
        self, ways: _Ways, held: float, k: int, share: float
    ) -> tuple[tuple[Affine, ...], tuple[Affine, ...]]:
        """A lane's ring runs one chunk at a time: its latency path, or the bytes of all lanes over shared NICs."""
        host, turns = self.fabric.step, 2 * (k - 1)
        alpha = max(way.alpha for way in ways)
        rows = [_ring_path(ways, host, share / k), *_repeated(ways, host, share / k, turns)]
        alternatives = (*rows, Affine(host + alpha, held))
        return alternatives, alternatives

    def _chain_between(
        self, ways: _Ways, held: float, k: int, share: float
    ) -> tuple[tuple[Affine, ...], tuple[Affine, ...]]:
        """The first chunk passes every link twice, after the other lanes' where they share NICs."""
        path = _sum(ways, self.fabric.step, share)
        slowest = max(_hop(way, 0.0, share).slope for way in ways)
        waits = max(0.0, held - (1 if k == 2 or self.fabric.wiring == "line" else 2) * slowest)
        return (Affine(path.constant, path.slope + waits),), tuple(_repeated(ways, self.fabric.step, share, 1))

    # ------------------------------------------------------------------ others'

    def _backend(self, nbytes: int) -> float:
        """The library's fused kernel: no host time between steps, a channel per NIC."""
        nics = min(s.nics for s in self.fabric.segments)
        channels = max(1, nics) if len(self.fabric.segments) > 1 else min(len(self.fabric.segments[0].ranks), 8)
        ring = self._fused_ring(channels).seconds(nbytes, channels, channels)
        if self.library == "gloo" or len(self.fabric.segments) == 1:
            return ring
        return min(ring, *(self._tree(nbytes, c) for c in _TREE_CHUNKS))

    def _fused_ring(self, channels: int) -> Pipeline:
        if self.fabric.step == 0:
            return self.pipeline(Plan("ring", channels=channels))
        key = Plan("backend", channels=channels)
        if key not in self._pipelines:
            self._pipelines[key] = self._ring(Plan("ring", channels=channels), step=0.0)
        return self._pipelines[key]

    def _tree(self, nbytes: int, chunks: int) -> float:
        """NCCL's tree: chains inside segments, a double binary tree between (Sanders et al. 2009); a lower bound.

        It leaves out flow control, which costs up to a third more in simulation.
        """
        segments = self.fabric.segments
        k, g = len(segments), max(len(s.ranks) for s in segments)
        nics = min(s.nics for s in segments)
        inside = max((s.inside for s in segments), key=lambda link: 1 / link.bandwidth)
        port = max((s.port for s in segments), key=lambda link: 1 / link.bandwidth)
        piece = nbytes / (2 * nics * chunks)
        down = (g - 1) * (inside.alpha + piece / inside.bandwidth)
        across = math.ceil(math.log2(k)) * (port.alpha + piece / port.bandwidth)
        sent = (2 if k > 2 else 1) * nbytes / (nics * port.bandwidth)
        held = max(sent, 2 * (g - 1) / g * nbytes / inside.bandwidth)
        return 2 * (down + across) + (chunks - 1) / chunks * held

    def _symmetric(self, plan: Plan, nbytes: int) -> float:
        """Direct reads of the peers' buffers: (N-1) S (one-shot, one barrier) or 2(N-1)/N S (two-shot, two)."""
        if len(self.fabric.segments) > 1:
            raise ScheduleRefused("symmetric memory reaches the ranks of one segment only")
        size, link = self.fabric.world_size, self.fabric.segments[0].inside
        moved = (size - 1) * nbytes if plan.schedule == "one-shot" else 2 * (size - 1) / size * nbytes
        barriers = 1 if plan.schedule == "one-shot" else 2
        copies = 0.0 if self.memory is None else 2 * nbytes / self.memory
        return self.fabric.step + barriers * link.alpha + moved / link.bandwidth + copies

    def bound(self, nbytes: int) -> float:
        """No all-reduce without reduction inside the network is faster.

        Each of n parties must on average send 2(n-1)/n of the message (Patarasuk & Yuan 2009), ranks through their
        ports and segments through their NICs, and every single segment must send its part, S, at least once.
        """
        size, segments = self.fabric.world_size, self.fabric.segments
        if size == 1:
            return 0.0
        k = len(segments)
        if k == 1:
            return 2 * (size - 1) / size * nbytes / segments[0].inside.bandwidth
        leaving = [self._leaving(s) for s in range(k)]
        return max(nbytes / min(leaving), 2 * (k - 1) * nbytes / sum(leaving))

    def _leaving(self, s: int) -> float:
        """Bytes/s that can leave a segment."""
        fabric = self.fabric
        if fabric.wiring == "line":
            near = [left for left in (s - 1, s) if 0 <= left < len(fabric.segments) - 1]
            return sum(fabric.cable(left).bandwidth * fabric.cables(left) for left in near)
        return fabric.segments[s].port.bandwidth * fabric.segments[s].nics


class _Loads:
    """Seconds and bytes on every resource, for each byte of the message."""

    def __init__(self) -> None:
        self.rows: dict[Hashable, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, route: Route, moved: float) -> None:
        """A route carries `moved` bytes for each byte of the message."""
        for resource, bandwidth in route.hops:
            seconds, have = self.rows[resource]
            self.rows[resource] = (seconds + moved / bandwidth, have + moved)

    def merge(self, other: _Loads, times: float = 1.0) -> None:
        """Add another's loads, `times` as often."""
        for resource, (seconds, moved) in other.rows.items():
            have = self.rows[resource]
            self.rows[resource] = (have[0] + times * seconds, have[1] + times * moved)

    def busiest(self) -> Load:
        """The resource held longest; nothing moves without one."""
        if not self.rows:
            return Load(None, 0.0, 0.0)
        resource, (seconds, moved) = max(self.rows.items(), key=lambda row: row[1][0])
        return Load(resource, seconds, moved)


class _Way(NamedTuple):
    """What a message over a route takes: latency, and the bandwidth of the slowest resource."""

    alpha: float
    bandwidth: float


_Ways = Counter[_Way]  # thousands of edges differ in a few ways only


class _Trip(NamedTuple):
    ways: _Ways
    loads: _Loads  # of one byte carried over every edge


def _way(route: Route) -> _Way:
    return _Way(route.alpha, min([b for _, b in route.hops]))


def _travel(routes: Iterable[Route]) -> _Trip:
    trip = _Trip(Counter(), _Loads())
    for route in routes:
        trip.ways[_way(route)] += 1
        trip.loads.add(route, 1.0)
    return trip


def _both(edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*edges, *((b, a) for a, b in edges)]


def _hop(way: _Way, host: float, share: float) -> Affine:
    """One message of `share` of a chunk over a route."""
    return Affine(way.alpha + host, share / way.bandwidth)


def _ring_path(ways: _Ways, host: float, share: float) -> Affine:
    """One slice's way twice around the ring but for its cheapest edge."""
    cheapest = min(_hop(way, host, share) for way in ways)
    total = _sum(ways, host, share)
    return Affine(2 * (total.constant - cheapest.constant), 2 * (total.slope - cheapest.slope))


def _repeated(ways: _Ways, host: float, share: float, turns: int) -> list[Affine]:
    """`turns` messages in a row over each edge; latency hides behind the next message."""
    rows = {_hop(way._replace(alpha=0.0), host, share) for way in ways}
    return [Affine(turns * row.constant, turns * row.slope) for row in rows]


def _sum(ways: _Ways, host: float, share: float) -> Affine:
    """One message over every edge, one edge after the other."""
    rows = [(_hop(way, host, share), count) for way, count in ways.items()]
    return Affine(sum(row.constant * n for row, n in rows), sum(row.slope * n for row, n in rows))


def _twice(row: Affine) -> Affine:
    return Affine(2 * row.constant, 2 * row.slope)


def _larger(a: Affine, b: Affine) -> Affine:
    """An upper bound of both."""
    return Affine(max(a.constant, b.constant), max(a.slope, b.slope))


_NOTHING = Affine(0.0, 0.0)

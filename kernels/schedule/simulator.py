"""Discrete-event simulation of a plan on a fabric: every transfer of every rank's program, in order. Torch-free.

Rules: a step's transfers are posted `fabric.step` after the step may start. A message leaves when it is posted;
receives are posted a step ahead, so senders do not wait for them. On its route a message either takes the resources
first come first served and cut through (it queues for the next resource when it starts on the one before), or shares
them fairly with the other messages under way, as the fabric says; it is usable `alpha` after its last byte. A step
ends when its messages have; tracks run side by side. Not modelled: congestion control, the time to add, caches, and a
library's own protocol.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from costlab.kernels.schedule.errors import ScheduleError
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.program import Kind, Program, build
from costlab.kernels.schedule.topology import Fabric, Route

ELEMENT = 4  # bytes; plans cut a message between elements


@dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome: seconds until the last rank is done, messages, and for how long each resource was held."""

    seconds: float
    messages: int
    busy: dict[Hashable, float]

    def busiest(self) -> tuple[Hashable, float]:
        """The resource held longest, and the share of the time that it was held."""
        resource, held = max(self.busy.items(), key=lambda row: row[1])
        return resource, held / self.seconds


@dataclass(slots=True)
class _Message:
    route: Route
    nbytes: int
    sender: tuple[int, str, int] | None = None  # rank, track, step
    receiver: tuple[int, str, int] | None = None
    end: float = 0.0
    arrived: float | None = None


@dataclass(slots=True)
class _World:
    """State of the simulated ranks."""

    programs: list[Program]
    ended: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    started: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    open: dict[tuple[int, str, int], int] = field(default_factory=dict)  # messages a step still waits for
    posts: dict[tuple[str, int, int, bool], deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    free: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))


def simulate(fabric: Fabric, plan: Plan, nbytes: int) -> Simulation:
    """Run `plan` for a message of `nbytes` on `fabric`.

    Raises:
        ScheduleError: the plan has no program of its own, or its steps wait for each other for ever.
    """
    numel = -(-nbytes // ELEMENT)
    programs = [build(plan, fabric.layout(), numel, rank) for rank in range(fabric.world_size)]
    engine = _FairEngine(fabric, programs) if fabric.sharing == "fair" else _Engine(fabric, programs)
    return engine.run()


class _Engine:
    """The event loop. Events: a step is posted, a message reaches a resource, one side of a message is done."""

    def __init__(self, fabric: Fabric, programs: list[Program]) -> None:
        self.fabric = fabric
        self.world = _World(programs)
        self.heap: list[tuple[float, int, str, object]] = []
        self.routes: dict[tuple[int, int], Route] = {}
        self.number = 0
        self.messages = 0
        self.last = 0.0

    def run(self) -> Simulation:
        for rank in range(len(self.world.programs)):
            self._start_ready(rank, 0.0)
        while self.heap:
            now, _, what, item = heapq.heappop(self.heap)
            if what == "post":
                self._post(now, item)  # type: ignore[arg-type]
            elif what == "hop":
                self._hop(now, *item)  # type: ignore[misc]
            elif what == "share":
                self._share(now, item)  # type: ignore[arg-type]
            else:
                self._done(now, item)  # type: ignore[arg-type]
        left = sum(len(p[t]) - self.world.ended[r, t] for r, p in enumerate(self.world.programs) for t in p)
        if left:
            raise ScheduleError(f"{left} steps wait for each other for ever")
        return Simulation(self.last, self.messages, dict(self.world.busy))

    def _push(self, time: float, what: str, item: object) -> None:
        self.number += 1
        heapq.heappush(self.heap, (time, self.number, what, item))

    def _start_ready(self, rank: int, now: float) -> None:
        """Post every step of the rank that may start now."""
        world = self.world
        for track, steps in world.programs[rank].items():
            at = world.started[rank, track]
            if at == len(steps) or at > world.ended[rank, track]:
                continue
            if all(world.ended[rank, t] >= n for t, n in steps[at].after):
                world.started[rank, track] += 1
                self._push(now + self.fabric.step, "post", (rank, track, at))

    def _post(self, now: float, key: tuple[int, str, int]) -> None:
        rank, track, at = key
        ops = [op for op in self.world.programs[rank][track][at].ops if op.stop > op.start]
        self.world.open[key] = len(ops)
        if not ops:
            self._end(now, key)
        for op in ops:
            sending = op.kind == Kind.SEND
            ends = (rank, op.peer) if sending else (op.peer, rank)
            self._match(now, key, track, ends, (op.stop - op.start) * ELEMENT, sending)

    def _match(
        self, now: float, key: tuple[int, str, int], track: str, ends: tuple[int, int], size: int, sending: bool
    ) -> None:
        """Join the two sides of a message, in the order in which each side posts them."""
        waiting = self.world.posts[track, *ends, not sending]
        if waiting:
            message = waiting.popleft()
            if message.nbytes != size:
                raise ScheduleError(f"ranks {ends} disagree on a message's size on track {track}")
        else:
            message = _Message(self._route(*ends), size)
            self.world.posts[track, *ends, sending].append(message)
        if sending:
            message.sender = key
        else:
            message.receiver = key
        if message.arrived is not None:
            self._push(max(now, message.arrived), "done", key)
        elif sending:
            self._push(now, "hop", (message, 0))

    def _share(self, now: float, version: int) -> None:
        raise NotImplementedError  # only where flows share resources

    def _route(self, source: int, target: int) -> Route:
        if (source, target) not in self.routes:
            self.routes[source, target] = self.fabric.route(source, target)
        return self.routes[source, target]

    def _hop(self, now: float, message: _Message, hop: int) -> None:
        """First come, first served: hold the hop's resource, then deliver or queue for the next."""
        resource, bandwidth = message.route.hops[hop]
        held = message.nbytes / bandwidth
        start = max(now, self.world.free[resource])
        self.world.free[resource] = start + held
        self.world.busy[resource] += held
        message.end = max(message.end, start + held)
        if hop + 1 < len(message.route.hops):
            self._push(start, "hop", (message, hop + 1))
        else:
            self._deliver(message)

    def _deliver(self, message: _Message) -> None:
        self.messages += 1
        self._push(message.end, "done", message.sender)
        message.arrived = message.end + message.route.alpha
        if message.receiver is not None:
            self._push(message.arrived, "done", message.receiver)

    def _done(self, now: float, key: tuple[int, str, int]) -> None:
        self.world.open[key] -= 1
        if self.world.open[key] == 0:
            self._end(now, key)

    def _end(self, now: float, key: tuple[int, str, int]) -> None:
        self.world.ended[key[0], key[1]] += 1
        self.last = max(self.last, now)
        self._start_ready(key[0], now)


class _FairEngine(_Engine):
    """Messages under way share resources max-min fairly, as TCP flows do, instead of queueing for them.

    Rates change whenever a message starts or ends (progressive filling, Bertsekas & Gallager 1992, section 6.5.2).
    """

    def __init__(self, fabric: Fabric, programs: list[Program]) -> None:
        super().__init__(fabric, programs)
        self.left: dict[int, float] = {}  # bytes to go, by id
        self.flows: dict[int, _Message] = {}
        self.rates: dict[int, float] = {}
        self.version = 0
        self.since = 0.0

    def _hop(self, now: float, message: _Message, hop: int) -> None:
        self._advance(now)
        self.flows[id(message)] = message
        self.left[id(message)] = float(message.nbytes)
        for resource, bandwidth in message.route.hops[hop:]:
            self.world.busy[resource] += message.nbytes / bandwidth
        self._changed(now)

    def _changed(self, now: float) -> None:
        """Share anew once all that happens at this instant has happened."""
        self.version += 1
        self.rates = {}
        self._push(now, "share", self.version)

    def _advance(self, now: float) -> None:
        for flow, rate in self.rates.items():
            self.left[flow] -= rate * (now - self.since)
        self.since = now

    def _share(self, now: float, version: int) -> None:
        if version != self.version:
            return
        self._advance(now)
        ended = [flow for flow, left in self.left.items() if left <= 1e-6 * self.flows[flow].nbytes]
        for flow in ended:
            message = self.flows.pop(flow)
            self.left.pop(flow)
            message.end = now
            self._deliver(message)
        if ended:
            self._changed(now)
        elif self.flows:
            self.rates = max_min({flow: message.route for flow, message in self.flows.items()})
            self.version += 1
            soonest = min(self.left[flow] / rate for flow, rate in self.rates.items())
            self._push(now + soonest, "share", self.version)


def max_min(flows: Mapping[int, Route]) -> dict[int, float]:
    """Bytes/s of each flow: all grow alike until a resource of theirs is full; the others go on."""
    room: dict[Hashable, float] = {}
    users: dict[Hashable, set[int]] = defaultdict(set)
    for flow, route in flows.items():
        for resource, bandwidth in route.hops:
            room[resource] = bandwidth
            users[resource].add(flow)
    rates: dict[int, float] = {}
    while len(rates) < len(flows):
        full = min((r for r in users if users[r]), key=lambda r: room[r] / len(users[r]))
        share = room[full] / len(users[full])
        for flow in list(users[full]):
            rates[flow] = share
            for resource, _ in flows[flow].hops:
                room[resource] = max(0.0, room[resource] - share)
                users[resource].discard(flow)
    return rates

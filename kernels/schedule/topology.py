"""The fabric a collective runs on, as the planner and the simulator need it. Torch-free.

A fabric is a list of segments (a host, or an NVLink domain) of ranks. Ranks of a segment talk over ports of their own;
segments talk over NICs, either through a switch or along a line of cables. Every port and cable is full duplex and
carries `bandwidth` bytes per second and direction (GB is 1e9). `alpha` is the time from a message's last byte leaving
the sender to the receiver being able to use it, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from costlab.kernels.schedule.errors import FabricError

Wiring = Literal["switch", "line"]
Sharing = Literal["queue", "fair"]


@dataclass(frozen=True, slots=True)
class Link:
    """A port or cable: `alpha` in seconds, `bandwidth` in bytes per second and direction."""

    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise FabricError(f"link alpha must be a finite time in seconds, not {self.alpha}")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise FabricError(f"link bandwidth must be positive bytes per second, not {self.bandwidth}")


@dataclass(frozen=True, slots=True)
class Segment:
    """Ranks that share a host: `inside` is each rank's port, `port` one of the `nics` equal NICs."""

    ranks: tuple[int, ...]
    inside: Link
    port: Link
    nics: int = 1


class Route(NamedTuple):
    """The directed resources a message holds, each with its bandwidth in bytes/s, and its latency in seconds."""

    hops: tuple[tuple[Hashable, float], ...]
    alpha: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """Segments and how they are wired.

    Attributes:
        segments: in physical order (which matters on a line).
        wiring: `switch` reaches every segment from every other; `line` has cables between neighbours only, and
            farther traffic passes through the segments between.
        step: host time that one step of a schedule made of point-to-point calls costs a rank, in seconds.
        leaf: segments under one leaf switch, 0 for a single non-blocking switch; `uplink` is a leaf's bytes/s
            and direction towards the others.
        sharing: how messages that meet on a resource use it: `queue` one after the other (a DMA engine), or `fair`, all
            at once (TCP flows).
        machine: bytes/s that all ranks share because they are emulated on one computer; None for real hosts.
    """

    segments: tuple[Segment, ...]
    wiring: Wiring = "switch"
    step: float = 0.0
    leaf: int = 0
    uplink: float | None = None
    sharing: Sharing = "queue"
    machine: float | None = None
    name: str = ""
    _where: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.segments:
            raise FabricError("a fabric needs at least one segment")
        if self.wiring not in ("switch", "line"):
            raise FabricError(f"wiring must be switch or line, not {self.wiring!r}")
        if self.sharing not in ("queue", "fair"):
            raise FabricError(f"sharing must be queue or fair, not {self.sharing!r}")
        if (self.leaf > 0) != (self.uplink is not None):
            raise FabricError("leaf and uplink belong together")
        for s, segment in enumerate(self.segments):
            if not segment.ranks or segment.nics < 1:
                raise FabricError(f"segment {s} needs ranks and at least one NIC")
            for i, rank in enumerate(segment.ranks):
                if rank in self._where:
                    raise FabricError(f"rank {rank} is in two segments")
                self._where[rank] = (s, i)
        if sorted(self._where) != list(range(len(self._where))):
            raise FabricError("ranks must be 0..N-1, each once")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._where)

    @property
    def lanes(self) -> int:
        """Parallel paths between segments: one per rank of the smallest segment."""
        return min(len(s.ranks) for s in self.segments)

    def locate(self, rank: int) -> tuple[int, int]:
        """(segment, index in it) of a rank."""
        return self._where[rank]

    def layout(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by segment, as the schedules take it."""
        return tuple(s.ranks for s in self.segments)

    def route(self, source: int, target: int) -> Route:
        """Resources and latency of a message between two ranks."""
        (a, i), (b, j) = self._where[source], self._where[target]
        if a == b:
            link = self.segments[a].inside
            hops: list[tuple[Hashable, float]] = [
                (("out", source), link.bandwidth),
                (("in", target), link.bandwidth),
            ]
            alpha = link.alpha
        elif self.wiring == "line":
            hops, alpha = self._along_line(a, b, i)
        else:
            hops, alpha = self._across_switch(a, b, i, j)
        if self.machine is not None:
            hops.insert(0, (("machine",), self.machine))
        return Route(tuple(hops), alpha)

    def cable(self, left: int) -> Link:
        """The cable between segments `left` and `left` + 1 of a line: the slower of the two NICs."""
        one, other = self.segments[left].port, self.segments[left + 1].port
        return Link(max(one.alpha, other.alpha), min(one.bandwidth, other.bandwidth))

    def cables(self, left: int) -> int:
        """Parallel cables between segments `left` and `left` + 1 of a line."""
        return min(self.segments[left].nics, self.segments[left + 1].nics)

    def _along_line(self, a: int, b: int, lane: int) -> tuple[list[tuple[Hashable, float]], float]:
        step = 1 if b > a else -1
        hops: list[tuple[Hashable, float]] = []
        alpha = 0.0
        for x in range(a, b, step):
            left = min(x, x + step)
            link = self.cable(left)
            hops.append((("cable", x, x + step, lane % self.cables(left)), link.bandwidth))
            alpha += link.alpha
        return hops, alpha

    def _across_switch(self, a: int, b: int, i: int, j: int) -> tuple[list[tuple[Hashable, float]], float]:
        source, target = self.segments[a], self.segments[b]
        hops: list[tuple[Hashable, float]] = [(("tx", a, i % source.nics), source.port.bandwidth)]
        if self.uplink is not None and a // self.leaf != b // self.leaf:
            hops += [(("up", a // self.leaf), self.uplink), (("down", b // self.leaf), self.uplink)]
        hops.append((("rx", b, j % target.nics), target.port.bandwidth))
        return hops, max(source.port.alpha, target.port.alpha)


def uniform(
    segments: int,
    ranks: int,
    inside: Link,
    port: Link,
    *,
    nics: int = 1,
    slow: Mapping[int, float] | None = None,
    wiring: Wiring = "switch",
    step: float = 0.0,
    leaf: int = 0,
    uplink: float | None = None,
    name: str = "",
) -> Fabric:
    """A fabric of equal segments; `slow` maps a segment to the fraction of the NIC bandwidth that it has."""
    rows = []
    for s in range(segments):
        factor = (slow or {}).get(s, 1.0)
        nic = Link(port.alpha, port.bandwidth * factor)
        rows.append(Segment(tuple(range(s * ranks, (s + 1) * ranks)), inside, nic, nics))
    return Fabric(tuple(rows), wiring=wiring, step=step, leaf=leaf, uplink=uplink, name=name)


def chain_order(fabric: Fabric) -> tuple[int, ...]:
    """Segments in the order a chain should visit them.

    A line's order is its cabling. On a switch the NIC of an inner segment carries the forward and the return stream,
    an end's only one, so the slowest two segments become the ends. Under leaf switches the segments of a leaf stay
    together, so that each uplink is crossed once, and only the outermost segments are chosen.
    """
    count = len(fabric.segments)
    if fabric.wiring == "line" or count < 3:
        return tuple(range(count))

    def speed(s: int) -> tuple[float, int]:
        return fabric.segments[s].port.bandwidth * fabric.segments[s].nics, s

    if not fabric.leaf:
        first, last, *inner = sorted(range(count), key=speed)
        return (first, *sorted(inner), last)
    return _leaf_order(fabric, speed)


def _leaf_order(fabric: Fabric, speed: Callable[[int], tuple[float, int]]) -> tuple[int, ...]:
    """The leaves of the two slowest segments at the ends, each with its slow segment outermost."""
    leaves: dict[int, list[int]] = {}
    for s in range(len(fabric.segments)):
        leaves.setdefault(s // fabric.leaf, []).append(s)
    ranked = sorted(leaves.values(), key=lambda members: min(speed(s) for s in members))
    if len(ranked) == 1:
        first, *rest = sorted(ranked[0], key=speed)
        return (first, *rest[1:], rest[0])
    head, tail, *middle = ranked
    order = sorted(head, key=speed)
    for members in middle:
        order += members
    return (*order, *sorted(tail, key=speed, reverse=True))


def from_dict(data: Mapping[str, Any]) -> Fabric:
    """A fabric from its JSON form: {"segments": [{"ranks", "inside", "port", "nics"}], "wiring", "step", ...}.

    Links are {"alpha": seconds, "bandwidth": bytes/s}. Raises FabricError naming what is missing or wrong.
    """
    try:
        rows = tuple(
            Segment(
                tuple(int(r) for r in s["ranks"]),
                Link(float(s["inside"]["alpha"]), float(s["inside"]["bandwidth"])),
                Link(float(s["port"]["alpha"]), float(s["port"]["bandwidth"])),
                int(s.get("nics", 1)),
            )
            for s in data["segments"]
        )
        optional = {k: data[k] for k in ("wiring", "step", "leaf", "uplink", "sharing", "machine", "name") if k in data}
        return Fabric(rows, **optional)
    except FabricError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise FabricError(f"not a fabric description: {type(error).__name__} {error}") from error


def to_dict(fabric: Fabric) -> dict[str, Any]:
    """The JSON form that `from_dict` reads."""

    def link(item: Link) -> dict[str, float]:
        return {"alpha": item.alpha, "bandwidth": item.bandwidth}

    rows = [
        {"ranks": list(s.ranks), "inside": link(s.inside), "port": link(s.port), "nics": s.nics}
        for s in fabric.segments
    ]
    return {
        "segments": rows,
        "wiring": fabric.wiring,
        "step": fabric.step,
        "leaf": fabric.leaf,
        "uplink": fabric.uplink,
        "sharing": fabric.sharing,
        "machine": fabric.machine,
        "name": fabric.name,
    }

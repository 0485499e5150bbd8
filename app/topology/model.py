"""Nodes, directed links and what is known of them, each fact with its source. Encodes directly to the documented JSON.

Bandwidths are GB/s (1e9 bytes) in one direction. What a source does not say is None, never zero.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NodeKind = Literal["gpu", "cpu", "pci", "nvswitch", "nic", "network", "disk"]
LinkKind = Literal["pcie", "nvlink", "xgmi", "c2c", "numa", "network", "memory", "disk", "loopback", "ring", "tree"]

UNIT_GBPS = 64.0  # PCIe Gen5 x16, raw line rate: the unit of `weight`


class TopologyProblem(ValueError):
    """A file that cannot be taken as a topology: which one, at which line, and why."""

    def __init__(self, name: str, line: int | None, reason: str) -> None:
        self.name, self.line, self.reason = name, line, reason
        super().__init__(f"{name}:{line}: {reason}" if line else f"{name}: {reason}")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the immutable parts of a topology."""


class Fact(Part, frozen=True, kw_only=True):
    """Something a source says of a device or link, in the source's own words."""

    name: str
    value: str
    source: str


class Measure(Part, frozen=True, kw_only=True):
    """One calibration of a link: time = alpha + bytes / beta, fitted over a sweep of sizes."""

    what: str  # pinned copy | device copy | NCCL send/recv | TCP stream | gloo send/recv | direct read | direct write
    direction: Literal["one", "both", "all"]  # one way | both ways at once | all pairs at once
    gbps: float  # beta: bandwidth without the fixed cost
    largest_gbps: float  # bytes / time at the largest size
    largest_bytes: int
    alpha_ns: float | None  # fixed cost of one transfer; None where the fit does not determine it
    alpha_is: str  # what the fixed cost is a latency of
    residual: float  # root mean square of the fit's relative errors
    sizes: int
    repeats: int
    where: str = ""  # e.g. the NUMA node of the host memory
    date: str = ""  # ISO 8601


class Node(Part, frozen=True, kw_only=True):
    """A device. `parent` is what it hangs on in the PCIe tree; `numa` is None unless a source names a node."""

    id: str
    kind: NodeKind
    label: str
    parent: str = ""
    numa: int | None = None
    numa_source: str = ""
    busid: str = ""
    visible: bool = True  # False: known to be there only by what is connected to it
    facts: list[Fact] = []


class Link(Part, frozen=True, kw_only=True):
    """One direction of a connection.

    `efficiency` = measured / nominal; `weight` = measured (else nominal, as `weight_from` says) / 64 GB/s.
    """

    src: str
    dst: str
    kind: LinkKind
    label: str
    nominal_gbps: float | None = None  # line rate
    nominal_source: str = ""
    payload_gbps: float | None = None  # line rate after encoding
    nccl_gbps: float | None = None  # the constant NCCL's search takes for such a link
    measured_gbps: float | None = None
    measured_by: str = ""
    latency_ns: float | None = None
    latency_is: str = ""  # wire | one-sided copy | NCCL step | TCP message ...
    efficiency: float | None = None
    weight: float | None = None
    weight_from: Literal["measured", "nominal", ""] = ""
    facts: list[Fact] = []
    measures: list[Measure] = []

    @property
    def capacity(self) -> float | None:
        """Bandwidth to reckon with: measured if it was, else nominal."""
        return self.measured_gbps if self.measured_gbps is not None else self.nominal_gbps


class Pair(Part, frozen=True, kw_only=True):
    """What a source says of two devices together: a path class (`topo -m`), a peer-to-peer status."""

    a: str
    b: str
    name: str  # path | p2p read | p2p write | ...
    value: str
    source: str


class Schedule(Part, frozen=True, kw_only=True):
    """One of NCCL's graphs: per channel, the devices in order; speeds are GB/s of one channel."""

    id: int
    name: str  # ring | tree | collnet | nvls | collnet direct
    pattern: str
    channels: list[list[str]]
    speed_intra: float | None = None
    speed_inter: float | None = None
    type_intra: str = ""
    type_inter: str = ""
    source: str = ""


class Doubt(Part, frozen=True, kw_only=True):
    """Sources that disagree, or a value that cannot be right: all that was said, and what was taken."""

    device: str
    what: str
    said: list[Fact]
    taken: str


class Topology(Part, frozen=True, kw_only=True):
    """A machine's devices and links."""

    source: str
    nodes: list[Node] = []
    links: list[Link] = []
    pairs: list[Pair] = []
    schedules: list[Schedule] = []
    doubts: list[Doubt] = []
    notes: list[str] = []

    def node(self, id: str) -> Node | None:
        """The node with this id."""
        return next((n for n in self.nodes if n.id == id), None)

    def of_kind(self, *kinds: NodeKind) -> list[Node]:
        """Nodes of these kinds, in order."""
        return [n for n in self.nodes if n.kind in kinds]

    @property
    def gpus(self) -> list[Node]:
        """The GPUs."""
        return self.of_kind("gpu")

"""A host as the schedule planner needs it, from a topology: ranks, the port between them, NICs; all with their source.

Bandwidths are GB/s (1e9 bytes) in one direction, latencies microseconds. What the topology does not say is assumed,
and every assumption is a sentence in `notes`. NCCL's constants are those of its tuner (src/graph/tuning.cc, 2.30).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from costlab.app.topology.graph import path
from costlab.app.topology.model import Link, Topology
from costlab.kernels.schedule.topology import Fabric, Segment
from costlab.kernels.schedule.topology import Link as Port

PORTS = frozenset({"nvlink", "xgmi", "c2c"})
# us for one step of a ring with the Simple protocol
_NVLINK_US, _PCIE_US, _NETWORK_US = 3.4, 5.7, 14.0
_NVLINK_EACH = 20.0  # GB/s that NCCL takes for a link of generation 2 or 3
_PCIE_GUESS = 12.0  # NCCL's constant for PCIe 3 x16, which it takes where no speed is stated
_NETWORK_GUESS = 12.5  # 100 Gbit/s
_STEP_US = 10.0  # host time of one torch.distributed point-to-point step, measured at 8 to 12 us


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A bandwidth and a latency with where they come from."""

    gbps: float
    alpha_us: float
    source: str

    def port(self) -> Port:
        """In the planner's units."""
        return Port(self.alpha_us * 1e-6, self.gbps * 1e9)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host. `shared` marks ranks that are processes on one CPU, which all use the same memory."""

    source: str
    ranks: int
    inside: Rate
    nics: int
    network: Rate
    step_us: float
    library: Literal["nccl", "gloo"]
    shared: bool
    notes: list[str] = []


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the user states himself, before anything that the topology says; None leaves it to the topology."""

    per_host: int | None = None
    inside_gbps: float | None = None
    nics: int | None = None
    network_gbps: float | None = None
    step_us: float | None = None


def machine(topology: Topology, wanted: Wanted | None = None) -> Machine:
    """The host that a topology describes."""
    own = wanted or Wanted()
    notes: list[str] = []
    gpus = [n.id for n in topology.gpus]
    inside = _inside(topology, gpus, notes)
    if own.inside_gbps is not None:
        inside = Rate(gbps=own.inside_gbps, alpha_us=inside.alpha_us, source="--inside")
    nics, network = _network(topology, own, notes)
    return Machine(
        source=topology.source,
        ranks=own.per_host or len(gpus) or 2,
        inside=inside,
        nics=nics,
        network=network,
        step_us=_STEP_US if own.step_us is None else own.step_us,
        library="nccl" if gpus else "gloo",
        shared=not gpus,
        notes=notes,
    )


def _inside(topology: Topology, gpus: Sequence[str], notes: list[str]) -> Rate:
    """A rank's port to the others of its host: NVLink or xGMI, else PCIe, else NCCL's own ring, else the CPU."""
    if not gpus:
        return _processes(topology, notes)
    if len(gpus) > 1:
        for find in (_ports, _rings, _pcie):
            rate = find(topology, gpus, notes)
            if rate is not None:
                return rate
        notes.append(f"no rate between the GPUs is known: {_PCIE_GUESS:g} GB/s assumed, as NCCL does; --inside sets it")
    return Rate(gbps=_PCIE_GUESS, alpha_us=_PCIE_US, source="assumed")


def _ports(topology: Topology, gpus: Sequence[str], notes: list[str]) -> Rate | None:
    """The slowest GPU's NVLink or xGMI, all its links together."""
    out = {g: [x for x in topology.links if x.src == g and x.kind in PORTS] for g in gpus}
    if not all(out.values()):
        return None
    measured = [_measured(x) for links in out.values() for x in links]
    if all(m is not None for m in measured):
        total = min(sum(x.measured_gbps or 0.0 for x in links) for links in out.values())
        alphas = [m for m in measured if m]
        return Rate(gbps=total, alpha_us=median(alphas) if alphas else _NVLINK_US, source="measured")
    rates = {g: [_nominal(x) for x in links] for g, links in out.items()}
    if all(r is not None for row in rates.values() for r in row):
        total = min(sum(r for r in row if r is not None) for row in rates.values())
        return Rate(gbps=total, alpha_us=_NVLINK_US, source=_nominal_source([x for row in out.values() for x in row]))
    count = min(sum(_count(x) for x in links) for links in out.values())
    notes.append(f"the NVLink generation is not stated: {_NVLINK_EACH:g} GB/s for each of {count} links, as NCCL takes")
    return Rate(gbps=_NVLINK_EACH * count, alpha_us=_NVLINK_US, source="assumed")


def _measured(link: Link) -> float | None:
    """Microseconds of a measured link's transfer, 0 where the fit left it open; None for a link not measured."""
    if link.measured_gbps is None:
        return None
    alphas = [m.alpha_ns for m in link.measures if m.alpha_ns is not None and m.direction == "one"]
    return median(alphas) / 1e3 if alphas else 0.0


def _nominal(link: Link) -> float | None:
    return link.nccl_gbps if link.nccl_gbps is not None else link.payload_gbps or link.nominal_gbps


def _nominal_source(links: Sequence[Link]) -> str:
    return "NCCL's constant" if all(x.nccl_gbps is not None for x in links) else "line rate"


def _count(link: Link) -> int:
    return next((int(f.value) for f in link.facts if f.name == "count" and f.value.isdigit()), _label_count(link.label))


def _label_count(label: str) -> int:
    tail = label.rpartition(" x")[2]
    return int(tail) if tail.isdigit() and 0 < int(tail) < 100 else 1


def _rings(topology: Topology, _gpus: Sequence[str], notes: list[str]) -> Rate | None:
    """What NCCL's graph says of its ring, if that is all there is."""
    speeds = [x.nccl_gbps for x in topology.links if x.kind == "ring" and x.nccl_gbps]
    if not speeds or any(x.kind in ("pcie", *PORTS) for x in topology.links):
        return None
    notes.append("only NCCL's ring is known, so its bandwidth stands for every GPU's port")
    wire = any("NVL" in x.label for x in topology.links if x.kind == "ring")
    return Rate(gbps=min(speeds), alpha_us=_NVLINK_US if wire else _PCIE_US, source="NCCL's graph")


def _pcie(topology: Topology, gpus: Sequence[str], notes: list[str]) -> Rate | None:
    """The slowest way between neighbours of a ring in order of rank, over PCIe switches and sockets."""
    ways = [path(topology, a, b) for a, b in pairwise([*gpus, gpus[0]])]
    links = [x for way in ways if way is not None for x in way.links]
    if not links or any(way is None for way in ways):
        return None
    measured = [x.measured_gbps for x in links]
    known = [r for x in links if (r := x.measured_gbps or _nominal(x)) is not None]
    if not known:
        return None
    if len(known) < len(links):
        notes.append("some links between the GPUs have no stated rate and are taken not to limit")
    source = "measured" if all(m is not None for m in measured) else "NCCL's constant"
    return Rate(gbps=min(known), alpha_us=_PCIE_US, source=source)


def _processes(topology: Topology, notes: list[str]) -> Rate:
    """Processes on one CPU: its loopback as calibrated, else its memory, else a guess."""
    for kind, divisor in (("loopback", 1.0), ("memory", 2.0)):
        links = [x for x in topology.links if x.kind == kind and x.measured_gbps is not None]
        if links:
            alphas = [a for x in links if (a := _measured(x))]
            rate = min(x.measured_gbps or 0.0 for x in links) / divisor
            return Rate(gbps=rate, alpha_us=median(alphas) if alphas else 50.0, source=f"measured ({kind})")
    notes.append("no GPUs and no calibration: 2 GB/s and 50 us between processes assumed; `costlab topo --calibrate`")
    return Rate(gbps=2.0, alpha_us=50.0, source="assumed")


def _network(topology: Topology, own: Wanted, notes: list[str]) -> tuple[int, Rate]:
    cables = [x for x in topology.links if x.kind == "network" and x.dst == "network"]
    rates = [r for x in cables if (r := x.capacity) is not None]
    count = own.nics or (len(cables) or len(topology.of_kind("nic")) or 1)
    if own.network_gbps is not None:
        return count, Rate(gbps=own.network_gbps, alpha_us=_NETWORK_US, source="--network")
    if not rates:
        notes.append(
            f"the topology states no network rate: {count} NIC{'s' if count > 1 else ''} of {_NETWORK_GUESS:g} GB/s"
            " (100 Gbit/s) assumed; --nics and --network set them"
        )
        return count, Rate(gbps=_NETWORK_GUESS, alpha_us=_NETWORK_US, source="assumed")
    if max(rates) > 2 * min(rates):
        notes.append(f"the NICs differ ({min(rates):g} to {max(rates):g} GB/s): all are taken to be the slowest")
    measured = all(x.measured_gbps is not None for x in cables)
    return count, Rate(gbps=min(rates), alpha_us=_NETWORK_US, source="measured" if measured else "line rate")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many such hosts there are and how they are wired. `leaf` hosts share an uplink `oversubscribed` times too
    small; `slow` maps a host to the fraction of its NICs' bandwidth that it has."""

    ranks: int
    wiring: Literal["switch", "line"] = "switch"
    leaf: int = 0
    oversubscribed: float = 1.0
    slow: dict[int, float] = {}


class PlanProblem(ValueError):
    """A request that cannot be planned; the text says what and what to do."""


def fabric(host: Machine, shape: Shape) -> Fabric:
    """Hosts enough for `shape.ranks`, the last one smaller where they do not divide.

    Raises:
        PlanProblem: no ranks, or a slow host that does not exist.
    """
    if shape.ranks < 1:
        raise PlanProblem(f"--ranks must be at least 1, got {shape.ranks}")
    hosts = -(-shape.ranks // host.ranks)
    wrong = [h for h, part in shape.slow.items() if not 0 <= h < hosts or not 0 < part <= 1]
    if wrong:
        raise PlanProblem(f"--slow {wrong[0]}:{shape.slow[wrong[0]]:g}: hosts are 0 to {hosts - 1}, fractions above 0")
    port = host.network.port()
    segments = tuple(
        Segment(
            tuple(range(h * host.ranks, min((h + 1) * host.ranks, shape.ranks))),
            host.inside.port(),
            Port(port.alpha, port.bandwidth * shape.slow.get(h, 1.0)),
            host.nics,
        )
        for h in range(hosts)
    )
    leaf = shape.leaf if 0 < shape.leaf < hosts and shape.wiring == "switch" else 0
    uplink = port.bandwidth * host.nics * leaf / shape.oversubscribed if leaf else None
    return Fabric(
        segments,
        wiring=shape.wiring,
        step=host.step_us * 1e-6,
        leaf=leaf,
        uplink=uplink,
        sharing="fair" if host.shared else "queue",
        machine=host.inside.gbps * 1e9 if host.shared else None,
        name=host.source,
    )

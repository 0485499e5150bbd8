"""Questions to the graph: how two devices reach each other, what limits them, and how much a set can send to another.

Devices relay only where hardware does: CPUs, PCIe switches and NVSwitches pass traffic on, GPUs, NICs and disks do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from costlab.app.topology.model import Link, Node, Topology

if TYPE_CHECKING:
    import networkx as nx

RELAYS = frozenset({"cpu", "pci", "nvswitch"})
# Hops are preferred in this order whatever their number: peers use NVLink where there is one, PCIe before the sockets.
_COST = {"nvlink": 1, "xgmi": 1, "c2c": 1, "pcie": 100, "numa": 10_000, "network": 1_000_000}
_SPLITS = 130  # as many max-flows as are solved in about a second
FABRIC = frozenset({"nvlink", "xgmi", "c2c"})


@dataclass(frozen=True)
class Path:
    """A way from one device to another and what limits it."""

    nodes: list[str]
    links: list[Link]
    bottleneck: Link | None  # the slowest link of known bandwidth
    unknown: int  # links whose bandwidth is not known

    @property
    def gbps(self) -> float | None:
        """Bandwidth of the bottleneck; at most this much where `unknown` is not zero."""
        return self.bottleneck.capacity if self.bottleneck else None


@dataclass(frozen=True)
class Flow:
    """How much a set of devices can send to another at once."""

    gbps: float | None
    exact: bool  # False: an upper bound over the splits tried, or links without a figure were left out
    left: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    note: str = ""


def multigraph(topology: Topology) -> nx.MultiDiGraph:
    """All nodes and links as a directed multigraph: node attribute `node`, edge attributes `link`, `gbps`, `weight`."""
    import networkx as nx

    graph = nx.MultiDiGraph(source=topology.source)
    for node in topology.nodes:
        graph.add_node(node.id, node=node)
    for link in topology.links:
        graph.add_edge(link.src, link.dst, link=link, kind=link.kind, gbps=link.capacity, weight=link.weight)
    return graph


def path(topology: Topology, src: str, dst: str) -> Path | None:
    """The way traffic takes from `src` to `dst`: NVLink before PCIe, PCIe before the sockets; None for none."""
    import networkx as nx

    best: dict[tuple[str, str], Link] = {}
    graph = nx.DiGraph()
    relays = {n.id for n in topology.nodes if n.kind in RELAYS} | {src, dst}
    for link in topology.links:
        if link.kind in _COST and link.src in relays and link.dst in relays and link.src != link.dst:
            key = (link.src, link.dst)
            if key not in best or _rank(link) < _rank(best[key]):
                best[key] = link
                graph.add_edge(*key, cost=_COST[link.kind])
    if src not in graph or dst not in graph or src == dst:
        return None
    try:
        nodes: list[str] = nx.shortest_path(graph, src, dst, weight="cost")
    except nx.NetworkXNoPath:
        return None
    links = [best[hop] for hop in pairwise(nodes)]
    known = [x for x in links if x.capacity is not None]
    return Path(nodes, links, min(known, key=lambda x: x.capacity or 0.0, default=None), len(links) - len(known))


def _rank(link: Link) -> tuple[int, float]:
    return _COST[link.kind], -(link.capacity or 0.0)


def path_class(topology: Topology, a: str, b: str) -> str:
    """The pair's class as `nvidia-smi topo -m` names it; a source's own word goes before one found in the graph."""
    said = next((p.value for p in topology.pairs if p.name == "path" and {p.a, p.b} == {a, b}), "")
    if said:
        return said
    way = path(topology, a, b)
    if way is None:
        return ""
    kinds = {x.kind for x in way.links}
    if kinds <= FABRIC:
        count = sum_of_counts(topology, a) if len(way.links) > 1 else sum_of_counts(topology, a, b)
        return f"{'XG' if 'xgmi' in kinds else 'NV'}{count or ''}"
    by_id = {n.id: n for n in topology.nodes}
    middle = [by_id[n].kind for n in way.nodes[1:-1]]
    if "numa" in kinds:
        return "SYS"
    if "network" in kinds:
        return "NET"
    if "cpu" in middle:
        return "PHB" if middle.count("cpu") == 1 else "SYS"
    return "PIX" if len(middle) <= 1 else "PXB"


def sum_of_counts(topology: Topology, gpu: str, to: str | None = None) -> int:
    """NVLink or xGMI links of a GPU, to one device or to all."""
    counts = [
        next((int(f.value) for f in x.facts if f.name == "count" and f.value.isdigit()), 1)
        for x in topology.links
        if x.src == gpu and x.kind in ("nvlink", "xgmi") and to in (None, x.dst)
    ]
    return sum(counts)


def max_flow(topology: Topology, left: Iterable[str], right: Iterable[str]) -> Flow:
    """Most that `left` can send to `right` at once over all links of known bandwidth; others are left out and said."""
    import networkx as nx

    sources, sinks = list(left), list(right)
    graph = _capacities(topology, {*sources, *sinks})
    for id in sources:
        graph.add_edge("\0source", id)  # without a capacity: unlimited
    for id in sinks:
        graph.add_edge(id, "\0sink")
    if not graph.has_node("\0source") or not graph.has_node("\0sink"):
        return Flow(None, exact=False, note="an empty set")
    value = float(nx.maximum_flow_value(graph, "\0source", "\0sink"))
    unknown = sum(1 for x in topology.links if x.kind in _COST and x.capacity is None)
    notes = [f"{unknown} links of unknown bandwidth left out"] if unknown else []
    if any(n.kind == "nvswitch" and not n.visible for n in topology.nodes):
        notes.append("the NVSwitch, which is not visible, is taken to pass everything its ports bring")
    return Flow(value if value > 0 else None, not notes, sources, sinks, "; ".join(notes))


def _capacities(topology: Topology, ends: set[str]) -> Any:
    """Parallel links added up; only relays and the ends themselves take part."""
    import networkx as nx

    allowed = {n.id for n in topology.nodes if n.kind in RELAYS} | ends
    graph = nx.DiGraph()
    for link in topology.links:
        if link.kind not in _COST or link.capacity is None or link.src == link.dst:
            continue
        if link.src in allowed and link.dst in allowed:
            before = graph.get_edge_data(link.src, link.dst, {"capacity": 0.0})["capacity"]
            graph.add_edge(link.src, link.dst, capacity=before + link.capacity)
    return graph


def bisection(topology: Topology) -> Flow | None:
    """The least that one half of the GPUs can send to the other; None with fewer than two GPUs.

    All halvings are tried up to ten GPUs, beyond that those along NUMA nodes and the order of the GPUs.
    """
    gpus = [n.id for n in topology.gpus]
    if len(gpus) < 2:
        return None
    halves, complete = _halves(topology, gpus)
    flows = [max_flow(topology, half, [g for g in gpus if g not in half]) for half in halves]
    known = [f for f in flows if f.gbps is not None]
    if not known:
        return Flow(None, exact=False, note="no link between the halves has a known bandwidth")
    least = min(known, key=lambda f: f.gbps or 0.0)
    said = "" if complete else f"the least of {len(flows)} halvings tried, an upper bound"
    notes = "; ".join(n for n in (least.note, said) if n)
    return Flow(least.gbps, least.exact and complete, least.left, least.right, notes)


def _halves(topology: Topology, gpus: Sequence[str]) -> tuple[list[tuple[str, ...]], bool]:
    size = len(gpus) // 2
    if len(gpus) <= 10:
        every = list(combinations(gpus, size))
        return (every[: len(every) // 2] if len(gpus) % 2 == 0 else every), True
    by_numa = sorted(gpus, key=lambda g: (_numa(topology, g), gpus.index(g)))
    orders = [list(gpus), by_numa, by_numa[::2] + by_numa[1::2]]
    turned = [order[k:] + order[:k] for order in orders for k in range(size)]
    return list(dict.fromkeys(tuple(sorted(order[:size])) for order in turned))[:_SPLITS], False


def _numa(topology: Topology, id: str) -> int:
    node = topology.node(id)
    return node.numa if node is not None and node.numa is not None else -1


@dataclass(frozen=True)
class Route:
    """Where a collective travels: its links, how often a ring uses each, and the slowest of them."""

    links: dict[tuple[str, str], Link]
    order: list[str]
    how: str
    bottleneck: Link | None
    unknown: int

    def share(self, busbw_gbps: float | None) -> float | None:
        """Part of the bottleneck's ceiling that a measured busbw reached: the busiest link of a ring carries busbw."""
        ceiling = self.bottleneck.capacity if self.bottleneck else None
        return busbw_gbps / ceiling if busbw_gbps is not None and ceiling else None


def route(topology: Topology, ranks: Sequence[int]) -> Route | None:
    """The ring over the GPUs of `ranks`: in NCCL's own order where its graph is known, else in order of rank."""
    present = {n.id for n in topology.gpus}
    wanted = [f"gpu{r}" for r in ranks]
    if len(wanted) < 2 or not set(wanted) <= present:
        return None
    ring = next((s for s in topology.schedules if s.name == "ring" and s.channels), None)
    if ring is not None and set(ring.channels[0]) == set(wanted):
        order, how = ring.channels[0], f"order of the first of {len(ring.channels)} ring channels in {ring.source}"
    else:
        order, how = wanted, "assumed: a ring in order of rank, rank n on GPU n"
    ways = [path(topology, a, b) for a, b in pairwise([*order, order[0]])]
    if any(w is None for w in ways):
        return None
    links = {(x.src, x.dst): x for w in ways if w is not None for x in w.links}
    known = [x for x in links.values() if x.capacity is not None]
    slowest = min(known, key=lambda x: x.capacity or 0.0, default=None)
    return Route(links, order, how, slowest, len(links) - len(known))


def children(topology: Topology, id: str) -> list[Node]:
    """What hangs on a node in the PCIe tree."""
    return [n for n in topology.nodes if n.parent == id]

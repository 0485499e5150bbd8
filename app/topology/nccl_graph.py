"""NCCL's graph dump (NCCL_GRAPH_DUMP_FILE): which devices each channel of each algorithm visits, in order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from costlab.app.topology.builder import Builder
from costlab.app.topology.model import LinkKind, Schedule, Topology, TopologyProblem
from costlab.app.topology.rates import Rate
from costlab.app.topology.xmlread import Element, number, whole

NAMES = {0: "ring", 1: "tree", 2: "collnet", 3: "nvls", 4: "collnet direct"}
PATTERNS = {1: "balanced tree", 2: "split tree", 3: "tree", 4: "ring", 5: "nvls", 6: "collnet direct"}
PATHS = {
    "LOC": "the device itself", "NVL": "NVLink", "NVB": "NVLink through another GPU", "C2C": "NVLink-C2C",
    "PIX": "one PCIe switch", "PXB": "several PCIe switches", "P2C": "C2C and PCIe", "PXN": "another GPU's NIC",
    "PHB": "the CPU's PCIe root", "SYS": "between NUMA nodes", "NET": "the network", "DIS": "no path",
}  # fmt: skip


def read_graphs(root: Element, name: str) -> Topology:
    """GPUs and schedules of a parsed `<graphs>`; links are the hops of its ring (else tree) with NCCL's own speed."""
    builder = Builder(f"NCCL graph XML {name}")
    for graph in root.all("graph"):
        builder.schedules.append(_schedule(graph, name, builder.source))
    if not builder.schedules:
        raise TopologyProblem(name, root.line, "<graphs> has no <graph>")
    for id in sorted({d for s in builder.schedules for c in s.channels for d in c}, key=_order):
        kind, _, number_of = id.partition(":")
        if kind == "net":
            builder.node(id, "nic", f"NIC {number_of}")
        else:
            builder.node(id, "gpu", f"GPU{id.removeprefix('gpu')}")
    if not builder.nodes:
        builder.notes.append("no graph of the file has a channel: NCCL found no algorithm for these devices")
    _hops(builder)
    return builder.topology()


def _order(id: str) -> tuple[str, int, str]:
    digits = "".join(c for c in id if c.isdigit())
    return id.rstrip("0123456789"), int(digits or 0), id


def _schedule(graph: Element, name: str, source: str) -> Schedule:
    id, pattern = whole(graph, "id", name), whole(graph, "pattern", name)
    if id is None:
        raise TopologyProblem(name, graph.line, "<graph> without id")
    declared = whole(graph, "nchannels", name)
    channels = [_channel(c, name) for c in graph.all("channel")]
    if declared is not None and declared != len(channels):
        raise TopologyProblem(name, graph.line, f"<graph> says {declared} channels and has {len(channels)}: cut off?")
    return Schedule(
        id=id,
        name=NAMES.get(id, f"graph {id}"),
        pattern=PATTERNS.get(pattern, str(pattern)) if pattern is not None else "",
        channels=channels,
        speed_intra=number(graph, "speedintra", name),
        speed_inter=number(graph, "speedinter", name),
        type_intra=graph.get("typeintra"),
        type_inter=graph.get("typeinter"),
        source=source,
    )


def _channel(channel: Element, name: str) -> list[str]:
    devices = []
    for element in channel.children:
        if element.tag not in ("gpu", "net"):
            raise TopologyProblem(name, element.line, f"<{element.tag}> in a channel: only gpu and net belong there")
        if not element.get("dev"):
            raise TopologyProblem(name, element.line, f"<{element.tag}> without dev")
        devices.append(f"gpu{_index(element, name)}" if element.tag == "gpu" else f"net:{element.get('dev').lower()}")
    return devices


def _index(element: Element, name: str) -> int:
    index = whole(element, "dev", name)
    if index is None or index < 0:
        raise TopologyProblem(name, element.line, f'<gpu dev="{element.get("dev")}">: not a device number')
    return index


def _hops(builder: Builder) -> None:
    chosen = next((s for s in builder.schedules if s.name in ("ring", "tree") and s.channels), None)
    if chosen is None:
        return
    kind: LinkKind = "ring" if chosen.name == "ring" else "tree"
    hops: Counter[tuple[str, str]] = Counter()
    for channel in chosen.channels:
        closed = [*channel, channel[0]] if kind == "ring" and len(channel) > 1 else channel
        hops.update(pairwise(closed))
        if kind == "tree":
            hops.update((b, a) for a, b in pairwise(channel))
    for (a, b), count in hops.items():
        speed = chosen.speed_intra if a.startswith("gpu") and b.startswith("gpu") else chosen.speed_inter
        rate = Rate(f"{kind}, {count} channels, {chosen.type_intra}", None, None, speed * count if speed else None)
        builder.link(a, b, kind, rate)

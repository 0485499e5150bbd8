"""Collects nodes, links and doubts while a source is read, and finishes them into a Topology."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from costlab.app.topology.model import (
    UNIT_GBPS,
    Doubt,
    Fact,
    Link,
    LinkKind,
    Node,
    NodeKind,
    Pair,
    Schedule,
    Topology,
)
from costlab.app.topology.rates import Rate


class Builder:
    """`source` names where all of it comes from unless a fact says otherwise."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes: dict[str, Node] = {}
        self.links: list[Link] = []
        self.pairs: list[Pair] = []
        self.schedules: list[Schedule] = []
        self.doubts: list[Doubt] = []
        self.notes: list[str] = []

    def fact(self, name: str, value: object, source: str = "") -> Fact:
        """A fact of this source."""
        return Fact(name=name, value=str(value), source=source or self.source)

    def node(
        self,
        id: str,
        kind: NodeKind,
        label: str,
        *,
        parent: str = "",
        numa: int | None = None,
        busid: str = "",
        visible: bool = True,
        facts: Iterable[Fact] = (),
        numa_source: str = "",
    ) -> str:
        """Add a node and return its id; a second node of the same id gets a number and a doubt."""
        unique, n = id, 2
        while unique in self.nodes:
            unique, n = f"{id}#{n}", n + 1
        if unique != id:
            self.doubt(id, "the same device twice", [], f"kept both, the second as {unique}")
        self.nodes[unique] = Node(
            id=unique, kind=kind, label=label, parent=parent, numa=numa, busid=busid, visible=visible,
            facts=[f for f in facts if f.value != ""],
            numa_source=(numa_source or self.source) if numa is not None else "",
        )  # fmt: skip
        return unique

    def change(self, id: str, **fields: object) -> None:
        """Replace fields of a node."""
        self.nodes[id] = msgspec.structs.replace(self.nodes[id], **fields)

    def link(
        self, src: str, dst: str, kind: LinkKind, rate: Rate, *, how: str = "", facts: Iterable[Fact] = ()
    ) -> None:
        """Add one direction; `how` says where the nominal rate comes from."""
        self.links.append(
            Link(
                src=src,
                dst=dst,
                kind=kind,
                label=rate.label,
                nominal_gbps=rate.line,
                payload_gbps=rate.payload,
                nccl_gbps=rate.nccl,
                facts=[f for f in facts if f.value != ""],
                nominal_source=(how or self.source) if rate.line is not None else "",
            )
        )

    def both(self, a: str, b: str, kind: LinkKind, rate: Rate, *, how: str = "", facts: Iterable[Fact] = ()) -> None:
        """Add both directions."""
        known = list(facts)
        self.link(a, b, kind, rate, how=how, facts=known)
        self.link(b, a, kind, rate, how=how, facts=known)

    def pair(self, a: str, b: str, name: str, value: str, source: str = "") -> None:
        """Record what is said of two devices together."""
        self.pairs.append(Pair(a=a, b=b, name=name, value=value, source=source or self.source))

    def doubt(self, device: str, what: str, said: Iterable[Fact], taken: str) -> None:
        """Record a disagreement or an impossible value."""
        self.doubts.append(Doubt(device=device, what=what, said=list(said), taken=taken))

    def network(self) -> str:
        """The one node that stands for everything beyond the network ports."""
        if "network" not in self.nodes:
            self.node("network", "network", "network")
        return "network"

    def interconnect(self, constant: float | None) -> None:
        """Join all NUMA nodes pairwise; bandwidth is known by measuring only, `constant` is NCCL's."""
        cpus = [n.id for n in self.nodes.values() if n.kind == "cpu" and n.numa is not None]
        for i, a in enumerate(cpus):
            for b in cpus[i + 1 :]:
                self.both(a, b, "numa", Rate("between NUMA nodes", None, None, constant))

    def topology(self) -> Topology:
        """What was collected, links with their weights."""
        return Topology(
            source=self.source,
            nodes=list(self.nodes.values()),
            links=[weighed(link) for link in self.links],
            pairs=self.pairs,
            schedules=self.schedules,
            doubts=self.doubts,
            notes=self.notes,
        )


def weighed(link: Link) -> Link:
    """The link with efficiency and weight from its bandwidths."""
    capacity, nominal, measured = link.capacity, link.nominal_gbps, link.measured_gbps
    return msgspec.structs.replace(
        link,
        efficiency=measured / nominal if measured is not None and nominal else None,
        weight=None if capacity is None else capacity / UNIT_GBPS,
        weight_from="" if capacity is None else "measured" if measured is not None else "nominal",
    )

"""Where the collectives of a run travel, and what part of the slowest link's ceiling they reached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from costlab.app.analysis.views import CollectiveView
from costlab.app.topology.draw import Key
from costlab.app.topology.graph import Route, route
from costlab.app.topology.model import Topology


@dataclass(frozen=True)
class Use:
    """One line of the collectives table on the graph; `share` is busbw / ceiling, None where either is unknown."""

    row: CollectiveView
    route: Route
    share: float | None
    ideal_ms: float | None  # transfer of one call at the bottleneck's ceiling


def uses(topology: Topology, rows: Sequence[CollectiveView]) -> list[Use]:
    """The collectives whose group names ranks of this machine."""
    found = []
    for row in rows:
        way = route(topology, ranks_of(row.group))
        if way is not None:
            found.append(Use(row, way, way.share(row.busbw_gbps), _ideal(row, way)))
    return found


def ranks_of(group: str) -> list[int]:
    """Ranks of "0,1"; none for a text that stands for several groups."""
    return [int(r) for r in group.split(",")] if re.fullmatch(r"\d{1,6}(,\d{1,6})*", group) else []


def _ideal(row: CollectiveView, way: Route) -> float | None:
    """Bytes x busbw factor / ceiling, by the ratio of the measured bandwidths; no latency in it."""
    ceiling = way.bottleneck.capacity if way.bottleneck else None
    size = max((b for b in (row.bytes_in, row.bytes_out) if b is not None), default=None)
    if not ceiling or size is None or not row.algbw_gbps or row.busbw_gbps is None:
        return None
    return size * (row.busbw_gbps / row.algbw_gbps) / ceiling / 1e6


def hot(found: Sequence[Use]) -> dict[Key, float]:
    """Largest share of its ceiling that each link reached."""
    shares: dict[Key, float] = {}
    for use in found:
        busbw = use.row.busbw_gbps
        for key, link in use.route.links.items():
            if busbw is not None and link.capacity:
                shares[key] = max(shares.get(key, 0.0), busbw / link.capacity)
    return shares

"""Where the collectives of a run travel, and what part of the slowest link's ceiling they reached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from costlab.app.analysis.collectives import bus_factor
from costlab.app.analysis.views import CollectiveView
from costlab.app.figures import number
from costlab.app.topology.draw import Key
from costlab.app.topology.graph import Route, route
from costlab.app.topology.model import Topology


@dataclass(frozen=True)
class Use:
    """One line of the collectives table on the graph; `share` is busbw / ceiling, None where either is unknown."""

    row: CollectiveView
    route: Route
    share: float | None
    ideal_ms: float | None  # one call: the bottleneck's latency once, and the bytes that it must carry at its ceiling


def uses(topology: Topology, rows: Sequence[CollectiveView], *, cpu: bool = False) -> list[Use]:
    """The collectives whose group names ranks of this machine; `cpu`: its ranks had no GPU and talked over loopback."""
    found = []
    for row in rows:
        ranks = ranks_of(row.group)
        way = loopback_route(topology, ranks) if cpu else route(topology, ranks)
        if way is not None:
            found.append(Use(row, way, way.share(row.busbw_gbps), _ideal(row, way)))
    return found


def ranks_of(group: str) -> list[int]:
    """Ranks of "0,1"; none for a text that stands for several groups."""
    return [int(r) for r in group.split(",")] if re.fullmatch(r"\d{1,6}(,\d{1,6})*", group) else []


def loopback_route(topology: Topology, ranks: Sequence[int]) -> Route | None:
    """The calibrated loopback link for ranks without GPUs; None where it was not measured."""
    link = next((x for x in topology.links if x.kind == "loopback" and x.capacity is not None), None)
    if link is None or len(ranks) < 2:
        return None
    how = "assumed: all ranks on this host, over loopback"
    return Route({(link.src, link.dst): link}, [f"rank {r}" for r in ranks], how, link, 0)


def _ideal(row: CollectiveView, way: Route) -> float | None:
    size = max((b for b in (row.bytes_in, row.bytes_out) if b is not None), default=None)
    return None if size is None else ideal_ms(row.kind, row.group_size, size, way)


def ideal_ms(kind: str, group_size: int, size: int, way: Route) -> float | None:
    """A call's least time in ms: latency of one transfer + `size` x busbw factor / bandwidth of the slowest link.

    A bound and not a prediction: no schedule moves less or in fewer than one transfer. None where the link's bandwidth
    or the factor is unknown.
    """
    link, factor = way.bottleneck, bus_factor(kind, group_size)
    if link is None or not link.capacity or factor is None:
        return None
    return (link.latency_ns or 0.0) / 1e6 + size * factor / link.capacity / 1e6


def with_ideals(rows: Sequence[CollectiveView], found: Sequence[Use]) -> list[CollectiveView]:
    """The rows with their ideal time and the ratio ideal / transfer of one call."""
    known = {id(use.row): use for use in found}
    return [_with_ideal(row, known[id(row)]) if id(row) in known else row for row in rows]


def _with_ideal(row: CollectiveView, use: Use) -> CollectiveView:
    link, call = use.route.bottleneck, row.transfer_ms
    if use.ideal_ms is None or link is None:
        return row
    each = call / row.calls if call is not None and row.calls else None
    known = "measured" if link.measured_gbps is not None else "line rate, not calibrated"
    how = f"{link.label} {link.src} → {link.dst}, {number(link.capacity)} GB/s ({known}); {use.route.how}"
    return msgspec.structs.replace(
        row, ideal_ms=use.ideal_ms, ideal_ratio=use.ideal_ms / each if each else None, ideal_how=how
    )


def hot(found: Sequence[Use]) -> dict[Key, float]:
    """Largest share of its ceiling that each link reached."""
    shares: dict[Key, float] = {}
    for use in found:
        busbw = use.row.busbw_gbps
        for key, link in use.route.links.items():
            if busbw is not None and link.capacity:
                shares[key] = max(shares.get(key, 0.0), busbw / link.capacity)
    return shares

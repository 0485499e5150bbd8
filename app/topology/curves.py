"""Bandwidth over message size to lay a run's collectives on: of `costlab bench collectives` as kept for a machine, and
what the slowest link of a calibrated graph allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from costlab.app.analysis.collectives import bus_factor
from costlab.app.analysis.views import CollectiveView, CurveView
from costlab.app.topology.graph import Route
from costlab.app.topology.use import Use, ideal_ms
from costlab.probes.collective_spec import BenchResult

FOLDER = "collectives"
MOST_KINDS = 3  # curves of more kinds cannot be told apart
SMALLEST, LARGEST = 1 << 10, 1 << 30
SPAN = 4  # an ideal curve goes this many doublings beyond the run's own sizes


def keep_bench(result: BenchResult, fingerprint: str, home: Path) -> None:
    """Keep a benchmark's rows for this machine, one file for each operation, ranks and backend; raises OSError."""
    from costlab.probes.tables import write_bytes

    folder = home / FOLDER / fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    for op in dict.fromkeys(row.op for row in result.rows):
        rows = [row for row in result.rows if row.op == op]
        kept = msgspec.structs.replace(result, rows=rows, skipped=[])
        write_bytes(folder / f"{op}-{result.ranks}-{result.backend}.json", msgspec.json.encode(kept))


def bench_curves(rows: Sequence[CollectiveView], fingerprint: str, home: Path, backend: str) -> list[CurveView]:
    """Curves of kept benchmarks with a run's kinds and group sizes; a damaged file is left out."""
    curves = []
    for kind, size in _kinds(rows):
        op = "send_recv" if kind in ("send", "recv") else kind
        if not re.fullmatch(r"[a-z_]{1,32}", op):
            continue
        found = _read(home / FOLDER / fingerprint / f"{op}-{size}-{backend}.json")
        factor = bus_factor(kind, size)
        if found is None or factor is None:
            continue
        low, high = _window([r for r in rows if (r.kind, r.group_size) == (kind, size)])
        inside = [r for r in found.rows if r.time_us > 0 and low <= r.size <= high]
        points = [(r.size, r.size / r.time_us / 1e3 * factor) for r in inside]
        if points:
            curves.append(
                CurveView(
                    name=f"{kind}, benchmark",
                    source=f"costlab bench collectives, {found.ranks} ranks, {found.backend}, {found.date}",
                    bytes=[b for b, _ in points],
                    busbw_gbps=[g for _, g in points],
                )
            )
    return curves


def _kinds(rows: Sequence[CollectiveView]) -> list[tuple[str, int]]:
    """Kinds and group sizes that take most of the time."""
    spent: dict[tuple[str, int], float] = {}
    for row in rows:
        spent[row.kind, row.group_size] = spent.get((row.kind, row.group_size), 0.0) + row.ms
    return sorted(spent, key=lambda k: -spent[k])[:MOST_KINDS]


def _read(path: Path) -> BenchResult | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, msgspec.MsgspecError):
        return None


def ideal_curves(found: Sequence[Use]) -> list[CurveView]:
    """What the slowest link of each kind's way allows, where a calibration measured it; like kinds share one."""
    curves: dict[tuple[tuple[int, float], ...], tuple[list[str], str]] = {}
    for kind, size in _kinds([use.row for use in found]):
        alike = [u for u in found if (u.row.kind, u.row.group_size) == (kind, size)]
        link = alike[0].route.bottleneck
        if link is None or link.measured_gbps is None:
            continue
        points = tuple(_ideal_points(kind, size, alike[0].route, [u.row for u in found]))
        source = f"{link.label} {link.src} → {link.dst}: {link.measured_by}"
        if points:
            curves.setdefault(points, ([], source))[0].append(kind)
    return [
        CurveView(
            name=f"{', '.join(kinds)}, ideal", source=source, bytes=[b for b, _ in points],
            busbw_gbps=[g for _, g in points],
        )
        for points, (kinds, source) in curves.items()
    ]  # fmt: skip


def _window(rows: Sequence[CollectiveView]) -> tuple[int, int]:
    """Sizes worth showing beside the run's own: some doublings beyond them."""
    own = [b for r in rows for b in (max(r.bytes_in or 0, r.bytes_out or 0),) if b > 0]
    low, high = min(own, default=SMALLEST), max(own, default=LARGEST)
    return max(low >> SPAN, SMALLEST), min(high << SPAN, LARGEST)


def _ideal_points(kind: str, size: int, way: Route, rows: Sequence[CollectiveView]) -> list[tuple[int, float]]:
    low, high = _window(rows)
    points, factor, at = [], bus_factor(kind, size) or 0.0, low
    while at <= high:
        took = ideal_ms(kind, size, at, way)
        if took:
            points.append((at, at * factor / took / 1e6))
        at *= 2
    return points

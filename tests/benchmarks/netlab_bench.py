"""Schedules between emulated hosts at full size: hybrid against ring, planner and simulator against the measurement.

Needs root and iproute2; about eight minutes. Writes tests/benchmarks/results/netlab.json.

    python tests/benchmarks/netlab_bench.py [--mbit 50] [--mib 4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there under PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels" / "schedule"))
sys.path.insert(0, str(Path(__file__).parent.parent / "netlab"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import RESULTS, result, save
from lab import layouts, refusal
from measure import Cell, Result, measure

WITHIN = 0.15


def against_ring(name: str, measured: Result, n: int) -> dict[str, Any]:
    """Fastest hybrid against the fastest flat ring, ours or gloo's, in one layout; a ratio above 1 is a gain."""
    ours, ring = measured.seconds("hybrid"), min(measured.seconds("ring"), measured.seconds("backend"))
    return result(
        name, ours * 1e3, "ms", peer="flat ring (gloo's or ours)", peer_value=ring * 1e3, ratio=ring / ours, n=n
    )


def cell_row(cell: Cell) -> dict[str, Any]:
    """One measurement, for the record."""
    return {
        "layout": cell.layout,
        "schedule": cell.plan.schedule,
        "chunks": cell.plan.chunks,
        "channels": cell.plan.channels,
        "order": list(cell.plan.order),
        "measured_ms": cell.measured * 1e3,
        "simulated_ms": None if cell.simulated is None else cell.simulated * 1e3,
    }


def summary(results: list[Result], n: int) -> list[dict[str, Any]]:
    """The named metrics; the simulator's carries all cells."""
    by_name = {r.layout.name: r for r in results}
    cells = [c for r in results for c in r.cells]
    errors = [abs(c.error) for c in cells if c.error is not None]
    close = sum(e <= WITHIN for e in errors) / len(errors)
    worst = max(results, key=Result.regret)
    over = f"worst of {len(results)} layouts"
    return [
        against_ring("netlab_hybrid_daisy_vs_ring", by_name["4x2 daisy chain"], n),
        against_ring("netlab_hybrid_slow_end_vs_ring", by_name["4x2 slow host at the end"], n),
        against_ring("netlab_hybrid_slow_middle_vs_ring", by_name["4x2 slow host in the middle"], n),
        result("netlab_planner_regret", worst.regret(), over, n=n, layout=worst.layout.name),
        result(
            "netlab_planner_regret_over_chunks",
            max(r.regret_over_chunks() for r in results),
            f"{over}, all chunk counts",
            n=n,
        ),
        result(
            "simulator_cells_within_15pct",
            close,
            f"share of {len(errors)} cells",
            n=n,
            cells=[cell_row(c) for c in cells],
            plans={r.layout.name: r.choice.sentence for r in results},
        ),
    ]


def main() -> int:
    """Measure all layouts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0, help="rate of a host's NIC")
    parser.add_argument("--mib", type=float, default=4.0, help="message size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for netlab.json")
    options = parser.parse_args()
    if reason := refusal():
        print(f"cannot measure: {reason}", file=sys.stderr)
        return 2
    results = []
    for layout in layouts(options.mbit):
        measured = measure(layout, int(options.mib * (1 << 20)), options.repeats)
        results.append(measured)
        print(f"{layout.name}: {measured.choice.sentence} regret {measured.regret():.3f}", flush=True)
    rows = summary(results, options.repeats)
    for row in rows:
        print(f"{row['metric']:34} {row['value']:10.3f} {row['unit']:12} ratio {row['ratio']}")
    print(save("netlab", environment(options), rows, options.output))
    return 0


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What it ran on."""
    return {
        "cpu": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}, hosts are network namespaces",
        "torch": version("torch"),
        "python": platform.python_version(),
        "backend": "gloo over TCP",
        "load_average": list(os.getloadavg()),
        "mbit": options.mbit,
        "message_bytes": int(options.mib * (1 << 20)),
    }


if __name__ == "__main__":
    raise SystemExit(main())

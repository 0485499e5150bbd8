"""How long `costlab plan` takes for the curves of all schedules over sizes, from an imported host: no GPU needed.

    python tests/benchmarks/plan_bench.py [--repeats 5] [--out FOLDER]

Each run is a process of its own, as a user calls it, imports included.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there under PYTHONSAFEPATH
from common import RESULTS, result, save

HOST = Path(__file__).parents[1] / "app" / "topology" / "data" / "azure-ndv4-topo.xml"
RANKS = (64, 1024, 16384)
BOUND_S = 10.0


def seconds(ranks: int) -> float:
    """Wall time of one call; raises CalledProcessError where it fails."""
    command = [sys.executable, "-P", "-m", "costlab.app", "plan", "--topology", str(HOST), "--ranks", str(ranks)]
    began = time.perf_counter()
    subprocess.run([*command, "--size", "1GiB", "-f", "json"], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure and save `plan.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for ranks in RANKS:
        taken = [seconds(ranks) for _ in range(args.repeats)]
        rows.append(
            result(
                f"plan_curves_{ranks}_gpus", statistics.median(taken), "s",
                peer="allowed at most", peer_value=BOUND_S, n=args.repeats, slowest=max(taken),
            )
        )  # fmt: skip
        print(f"{ranks:6} GPUs: {statistics.median(taken):.2f} s, slowest {max(taken):.2f} s", flush=True)
    environment = {
        "cpu": f"{os.cpu_count()} CPUs {platform.machine()}", "python": platform.python_version(),
        "torch": version("torch"), "backend": "none",
        "notes": ["Hosts of 8 GPUs as NCCL described an Azure NDv4; all schedules over 20 sizes."],
    }  # fmt: skip
    print(save("plan", environment, rows, args.out))


if __name__ == "__main__":
    main()

"""Is a calibrated link what an independent copy finds? PCIe both ways and device memory on one GPU; loopback on CPU.

    python tests/benchmarks/topology_bench.py [RESULTS_FOLDER]

The peer is a loop of torch copies with a clock around it (GPU), or two processes and a socket (CPU), run before and
after the calibration; its better run counts, since what else a machine does can only slow it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from costlab.app.topology.calibration import calibrated, run_calibration
from costlab.app.topology.discovery import HERE, from_rows
from costlab.app.topology.model import Link, Topology
from costlab.probes.environment import environment
from costlab.probes.links import DEVICE_SIZES, MEMORY_SIZES, CalibrationSpec
from costlab.probes.topology import machine_rows

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, result, save

COPIES = 20
PLAIN = Path(__file__).resolve().parents[1] / "probes" / "plain_socket.py"
MESSAGE = 64 << 20


def gbps(into: torch.Tensor, data: torch.Tensor, moved: int) -> float:
    """1e9 bytes a second of copies one after the other, by the wall clock."""
    for _ in range(3):
        into.copy_(data, non_blocking=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(COPIES):
        into.copy_(data, non_blocking=True)
    torch.cuda.synchronize()
    return moved * COPIES / (time.perf_counter() - start) / 1e9


def gpu_peers() -> dict[str, float]:
    """Pinned host to device, device to host, and device to device."""
    size = DEVICE_SIZES[-1]
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.ones(size, dtype=torch.uint8, device="cuda")
    found = {"host_to_device": gbps(device, host, size), "device_to_host": gbps(host, device, size)}
    del host, device
    data = torch.ones(MEMORY_SIZES[-1], dtype=torch.uint8, device="cuda")
    into = torch.empty_like(data)
    found["device_memory"] = gbps(into, data, 2 * data.numel())
    del data, into
    torch.cuda.empty_cache()
    return found


def socket_peer() -> dict[str, float]:
    """A plain socket there and back, half the best time."""
    command = [sys.executable, str(PLAIN), str(MESSAGE), "15"]
    times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"loopback": MESSAGE / min(times) / 1e9}


def link(topology: Topology, src: str, dst: str, kind: str) -> Link:
    """The one link with these ends; kinds cpu and gpu stand for the first node of each."""
    ends = {"cpu": topology.of_kind("cpu"), "gpu": topology.gpus}
    a, b = (ends[name][0].id for name in (src, dst))
    found = [x for x in topology.links if x.kind == kind and (a, b) == (x.src, x.dst)]
    if not found:  # below bridges the GPU's own link begins at the nearest of them
        found = [x for x in topology.links if x.kind == kind and (x.dst == b if dst == "gpu" else x.src == a)]
    return found[0]


def own_figures(topology: Topology, cuda: bool) -> dict[str, float | None]:
    """costlab's calibrated figures by the peers' names."""
    if not cuda:
        loop = next(x for x in topology.links if x.kind == "loopback")
        return {"loopback": loop.measured_gbps}
    return {
        "host_to_device": link(topology, "cpu", "gpu", "pcie").measured_gbps,
        "device_to_host": link(topology, "gpu", "cpu", "pcie").measured_gbps,
        "device_memory": link(topology, "gpu", "gpu", "memory").measured_gbps,
    }


def graph_results(topology: Topology) -> list[dict[str, Any]]:
    """What the graph must have on the GPU machine: PCIe at its maximum, no NUMA claim from -1."""
    uplink = link(topology, "cpu", "gpu", "pcie")
    claims = [g for g in topology.gpus if g.numa is not None and g.numa_source == ""]
    return [
        result("pcie_line_rate", uplink.nominal_gbps or 0.0, "GB/s", peer="PCIe Gen5 x16", peer_value=64.0, n=1),
        result("numa_claims_without_a_source", len(claims), "GPUs", n=len(topology.gpus)),
    ]


def main() -> None:
    """Compare and save `topology.json`."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    started, cuda = time.monotonic(), torch.cuda.is_available()
    peers = gpu_peers if cuda else socket_peer
    before = peers()
    calibration = run_calibration(CalibrationSpec(seconds=1.0), lambda _: None, ranks=1 if cuda else 2)
    after = peers()
    topology = calibrated(from_rows(machine_rows(), HERE), calibration)
    own = own_figures(topology, cuda)
    what = "torch copies by the wall clock" if cuda else "plain socket, best of 15"
    lines = []
    for name, value in own.items():
        if value is None:
            raise SystemExit(f"{name} was not measured: {calibration.skipped}")
        peer = max(before[name], after[name])
        lines.append(
            result(
                name, value, "GB/s", peer=what, peer_value=peer, n=COPIES, bound=f"ratio within {5 if cuda else 10} %"
            )
        )
    lines += graph_results(topology) if cuda else []
    lines.append(result("seconds", time.monotonic() - started, "s", peer="bound", peer_value=90.0, n=1))
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    facts = msgspec.to_builtins(environment(device, "nccl" if cuda else "gloo"))
    print(save("topology" if cuda else "topology_cpu", facts, lines, folder).read_text())


if __name__ == "__main__":
    main()

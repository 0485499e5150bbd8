"""Is a calibrated link what an independent copy finds, and is the graph of this machine right?

    python tests/benchmarks/topology_bench.py [--out FILE.json] [--device auto|cuda|cpu] [--rounds 5]

On GPUs: PCIe both ways, device memory, and NVLink where there are two, against the CUDA driver's own copies
(`topology_peers.py`) before and after the calibration; the graph against nvidia-smi and sysfs, and against the XML that
NCCL writes. On CPU: loopback against a plain socket, in turn, medians. About 60 s on one GPU, 90 on two, 120 on CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from costlab.app.topology import rates
from costlab.app.topology.calibration import calibrated, run_calibration
from costlab.app.topology.discovery import HERE, from_rows
from costlab.app.topology.graph import path, sum_of_counts
from costlab.app.topology.load import load_file
from costlab.app.topology.model import Link, Node, Topology
from costlab.probes import calibrate_host
from costlab.probes.environment import environment
from costlab.probes.links import DEVICE_SIZES, MEMORY_SIZES, Calibration, CalibrationSpec
from costlab.probes.topology import machine_rows

sys.path.insert(0, str(Path(__file__).resolve().parent))
import topology_peers
from common import RESULTS, result, save

PEERS = Path(topology_peers.__file__)
PLAIN = Path(__file__).resolve().parents[1] / "probes" / "plain_socket.py"
MESSAGE = 64 << 20
DRIVER = "CUDA driver copies by the wall clock, medians, the better of before and after"
Lines = list[dict[str, Any]]


class Report:
    """Collects rows and writes the file after every section, so that one that fails costs only itself."""

    def __init__(self, out: Path, device: torch.device) -> None:
        self.out, self.lines = out, list[dict[str, Any]]()
        self.facts = msgspec.to_builtins(environment(device, "nccl" if device.type == "cuda" else "gloo"))

    def section(self, name: str, work: Callable[[], Lines]) -> None:
        """Run one; what it raises becomes a row of its own."""
        started = time.monotonic()
        try:
            self.lines += work()
        except Exception as error:  # the other sections are still worth having
            text = f"{type(error).__name__}: {error}"[:300]
            self.lines.append(result(f"{name}_failed", 1.0, "sections", n=1, ok=False, note=text))
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        save(self.out.stem, self.facts, self.lines, self.out.parent)

    def table(self) -> str:
        """One line a metric."""
        rows = []
        for r in self.lines:
            peer = "" if r["peer_value"] is None else f"{r['peer_value']:.4g}"
            ratio = "" if r["ratio"] is None else f"{r['ratio']:.3f}"
            verdict = {True: "ok", False: "MISSED", None: ""}[r.get("ok")]
            rows.append(f"{r['metric']:<34}{r['value']:>10.4g} {r['unit']:<12}{peer:>10}{ratio:>8}  {verdict}")
            rows += [f"    {r['note']}"] if r.get("note") else []
        return "\n".join(rows)


def compared(metric: str, value: float, peer: str, peer_value: float, within: float, n: int) -> dict[str, Any]:
    """A bandwidth beside its peer's, which it must meet within a share."""
    ok = abs(value / peer_value - 1) <= within
    bound = f"ratio within {100 * within:g} %"
    return result(metric, value, "GB/s", peer=peer, peer_value=peer_value, n=n, bound=bound, ok=ok)


def held(metric: str, failed: Iterable[str], n: int) -> dict[str, Any]:
    """A count of what is wrong, with what it is; none is right."""
    texts = list(failed)
    return result(metric, float(len(texts)), "wrong", n=n, ok=not texts and n > 0, note="; ".join(texts)[:600])


# --- GPUs


def driver_copies() -> dict[str, float]:
    """The peer in a process of its own, so that it holds no memory while the calibration runs."""
    command = [sys.executable, str(PEERS), str(DEVICE_SIZES[-1]), str(MEMORY_SIZES[-1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"peer: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def visible_gpus(topology: Topology) -> list[Node]:
    """GPU nodes in CUDA's order; those that CUDA does not show are left out."""
    order = {next((f.value for f in g.facts if f.name == "cuda_index"), ""): g for g in topology.gpus}
    return [order[str(i)] for i in range(torch.cuda.device_count()) if str(i) in order]


def links_of(topology: Topology) -> dict[str, Link]:
    """costlab's links by the peers' names."""
    gpus = visible_gpus(topology)
    first = gpus[0].id
    found = {
        "pcie_host_to_device": next(x for x in topology.links if x.kind == "pcie" and x.dst == first),
        "pcie_device_to_host": next(x for x in topology.links if x.kind == "pcie" and x.src == first),
        "device_memory": next(x for x in topology.links if x.kind == "memory" and x.src == first),
    }
    for a, b in ((0, 1), (1, 0)) if len(gpus) > 1 else ():
        way = path(topology, gpus[a].id, gpus[b].id)
        if way is not None:
            found[f"nvlink_gpu{a}_to_gpu{b}"] = way.links[0]
    return found


def calibration_rows(topology: Topology, before: dict[str, float], after: dict[str, float]) -> Lines:
    """Every calibrated link that the peer measured too."""
    lines = []
    for name, own in links_of(topology).items():
        if name not in before:
            continue
        if own.measured_gbps is None:
            lines.append(result(name, 0.0, "GB/s", n=0, ok=False, note="not measured: " + "; ".join(topology.notes)))
            continue
        repeats = max((m.repeats for m in own.measures), default=0)
        lines.append(compared(name, own.measured_gbps, DRIVER, max(before[name], after[name]), 0.05, repeats))
    return lines


def graph_rows(topology: Topology) -> Lines:
    """The graph against nvidia-smi and sysfs."""
    told, mine = topology_peers.gpu_facts(), {g.busid: g for g in topology.gpus}
    if not told:
        raise RuntimeError("nvidia-smi told nothing of the GPUs, so there is nothing to hold the graph against")
    missing = [t["bus"] for t in told if t["bus"] not in mine]
    known = [(t, mine[t["bus"]]) for t in told if t["bus"] in mine]
    pcie, switches, numa = [], [], []
    for fact, gpu in known:
        uplink = next(x for x in topology.links if x.kind == "pcie" and x.dst == gpu.id)
        line = rates.pcie(fact["generation"], fact["width"]).line
        if uplink.nominal_gbps != line:
            pcie.append(f"{gpu.id}: {uplink.label}, nvidia-smi Gen{fact['generation']} x{fact['width']}")
        if sum_of_counts(topology, gpu.id) != fact["nvlinks"]:
            switches.append(f"{gpu.id}: {sum_of_counts(topology, gpu.id)} NVLinks, nvidia-smi {fact['nvlinks']}")
        if fact["numa"] in (None, -1) and gpu.numa is not None and "NVML" not in gpu.numa_source:
            numa.append(f"{gpu.id}: node {gpu.numa} by {gpu.numa_source or 'nobody'}, the kernel says {fact['numa']}")
        elif fact["numa"] is not None and fact["numa"] >= 0 and gpu.numa != fact["numa"]:
            numa.append(f"{gpu.id}: node {gpu.numa}, the kernel says {fact['numa']}")
    lines = [
        held("graph_gpus_missing", missing, len(told)),
        held("graph_pcie_not_at_maximum", pcie, len(known)),
        held("graph_nvlink_counts", switches, len(known)),
        held("graph_unseen_nvswitch_claims", unseen(topology), len(known)),
        held("graph_numa_claims_unfounded", numa, len(known)),
    ]
    for fact, gpu in known[:1]:
        uplink = next(x for x in topology.links if x.kind == "pcie" and x.dst == gpu.id)
        said = f"nvidia-smi: Gen{fact['generation']} x{fact['width']} at most"
        ceiling = rates.pcie(fact["generation"], fact["width"]).line
        lines.append(result("pcie_line_rate", uplink.nominal_gbps or 0.0, "GB/s", peer=said, peer_value=ceiling, n=1))
    return lines


def unseen(topology: Topology) -> list[str]:
    """NVSwitches in the graph that the PCI bus does not show must say so, and one doubt must name it."""
    found, shown = topology.of_kind("nvswitch"), topology_peers.nvswitches()
    claimed = [n.id for n in found if n.visible]
    wrong = [f"{len(claimed)} switches claimed, the bus shows {shown}"] if len(claimed) != shown else []
    silent = [n.id for n in found if not n.visible and not any(d.device == n.id for d in topology.doubts)]
    return [*wrong, *(f"{id}: not visible, but no doubt says so" for id in silent)]


def nccl_rows(topology: Topology, dump: Path) -> Lines:
    """The graph against the XML of NCCL's own detection, written while the calibration ran."""
    if not dump.is_file():
        if torch.cuda.device_count() == 1:
            return [result("nccl_xml_gpus", 0.0, "wrong", n=0, note="one rank: NCCL made no communicator to dump")]
        raise RuntimeError("NCCL wrote no topology (NCCL_TOPO_DUMP_FILE)")
    theirs = load_file(dump)
    mine = {g.busid: g for g in topology.gpus}
    gpus = [f"{g.busid} is not in ours" for g in theirs.gpus if g.busid not in mine]
    pairs = [(g, mine[g.busid]) for g in theirs.gpus if g.busid in mine]
    counts = [(a.id, sum_of_counts(theirs, a.id), sum_of_counts(topology, b.id)) for a, b in pairs]
    links = [f"{id}: NCCL {n}, ours {own}" for id, n, own in counts if n != own]
    numa = [
        f"{a.id}: NCCL {a.numa}, ours {b.numa}" for a, b in pairs if None not in (a.numa, b.numa) and a.numa != b.numa
    ]
    rate = [
        f"{a.id}: NCCL {generation(theirs, a)}, ours {generation(topology, b)}"
        for a, b in pairs
        if generation(theirs, a) and generation(theirs, a) != generation(topology, b)
    ]
    return [
        held("nccl_xml_gpus", gpus, len(theirs.gpus)),
        held("nccl_xml_nvlinks", links, len(pairs)),
        held("nccl_xml_pcie_generation", rate, len(pairs)),
        held("nccl_xml_numa", numa, len(pairs)),
    ]


def generation(topology: Topology, gpu: Node) -> str:
    """ "5" of the GPU's link "PCIe 5 x16" or "PCIe Gen5, width unknown"."""
    uplink = next((x for x in topology.links if x.kind == "pcie" and x.dst == gpu.id), None)
    words = uplink.label.replace("Gen", "").replace(",", "").split() if uplink is not None else []
    return words[1] if len(words) > 1 and words[1].isdigit() else ""


def on_gpus(report: Report, seconds: float) -> None:
    """All sections of the GPU machine, in one run."""
    made: dict[str, Any] = {}
    dump = Path(tempfile.mkdtemp(prefix="costlab-bench-")) / "nccl-topo.xml"
    os.environ["NCCL_TOPO_DUMP_FILE"] = str(dump)

    def calibrate() -> Lines:
        ranks = min(torch.cuda.device_count(), 2)
        made["topology"] = from_rows(machine_rows(), HERE)
        before = driver_copies()
        found: Calibration = run_calibration(CalibrationSpec(seconds=seconds), lambda _: None, ranks=ranks)
        after = driver_copies()
        made["topology"] = calibrated(made["topology"], found)
        return calibration_rows(made["topology"], before, after)

    report.section("calibration", calibrate)
    report.section("graph", lambda: graph_rows(made["topology"]))
    report.section("nccl_xml", lambda: nccl_rows(made["topology"], dump))


# --- CPU


def plain_socket() -> float:
    """GB/s of a plain socket there and back, median."""
    command = [sys.executable, str(PLAIN), str(MESSAGE), "15"]
    times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return MESSAGE / float(statistics.median(times)) / 1e9


def loopback(rounds: int, seconds: float) -> Lines:
    """Calibrations and socket tests in turn; each calibration is compared with the tests before and after it."""
    plain, own = [plain_socket()], list[float]()
    for _ in range(rounds):
        found = run_calibration(CalibrationSpec(seconds=seconds), lambda _: None, ranks=2, device="cpu")
        stream = next(s for s in found.sweeps if s.what == "TCP stream")
        own.append(next(p.gbps for p in stream.points if p.bytes == MESSAGE))
        plain.append(plain_socket())
    ratios = [value / ((a + b) / 2) for value, a, b in zip(own, plain, plain[1:], strict=False)]
    ratio = statistics.median(ratios)
    return [
        result(
            "loopback", statistics.median(own), "GB/s", peer="plain socket, in turn, medians",
            peer_value=statistics.median(plain), ratio=ratio, n=rounds, bound="ratio within 10 %",
            ok=abs(ratio - 1) <= 0.1, ratios=ratios,
        )
    ]  # fmt: skip


def in_turn(rounds: int = 60) -> Lines:
    """costlab's message and a plain one in turn over one connection, so that what else runs here meets both alike."""
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    link = server.accept()[0] if child else socket.create_connection(server.getsockname())
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, back = memoryview(bytearray(b"x" * MESSAGE)), memoryview(bytearray(MESSAGE))
    ours, times = calibrate_host.ping(link, first=bool(child))(MESSAGE), list[tuple[float, float]]()
    for _ in range(rounds + 2):
        start = time.perf_counter()
        for turn in (True, False) if child else (False, True):
            if turn:
                link.sendall(out)
            else:
                plain_read(link, back)
        times.append(((time.perf_counter() - start) / 2, ours()))
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    plain, own = (statistics.median(pair[k] for pair in times[2:]) for k in (0, 1))
    ratio = statistics.median(a / b for a, b in times[2:])
    return [
        result(
            "loopback_in_turn", MESSAGE / own / 1e9, "GB/s", peer="plain socket, same connection, in turn",
            peer_value=MESSAGE / plain / 1e9, ratio=ratio, n=rounds, bound="ratio within 10 %",
            ok=abs(ratio - 1) <= 0.1,
        )
    ]  # fmt: skip


def plain_read(link: socket.socket, into: memoryview) -> None:
    """Fill `into`."""
    got = 0
    while got < len(into):
        got += link.recv_into(into[got:])


def main() -> int:
    """Run, save, print; 1 where something was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seconds", type=float, default=1.0, help="for one link and way")
    parser.add_argument("--rounds", type=int, default=5, help="CPU: calibrations")
    given = parser.parse_args()
    cuda = given.device != "cpu" and torch.cuda.is_available()
    if given.device == "cuda" and not cuda:
        parser.error("no CUDA device here")
    started = time.monotonic()
    report = Report(
        given.out or RESULTS / ("topology.json" if cuda else "topology_cpu.json"),
        torch.device("cuda", 0) if cuda else torch.device("cpu"),
    )
    if cuda:
        on_gpus(report, given.seconds)
    else:
        report.section("loopback_in_turn", in_turn)
        report.section("loopback", lambda: loopback(given.rounds, given.seconds))
    seconds, bound = time.monotonic() - started, 90.0 if cuda and torch.cuda.device_count() == 1 else 180.0
    report.lines.append(result("seconds", seconds, "s", peer="bound", peer_value=bound, n=1, ok=seconds <= bound))
    save(report.out.stem, report.facts, report.lines, report.out.parent)
    print(report.table())
    return 1 if any(r.get("ok") is False for r in report.lines) else 0


if __name__ == "__main__":
    sys.exit(main())

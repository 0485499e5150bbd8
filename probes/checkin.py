"""Check-in: where this worker's GPU sits, which NICs are near, and the worker bound there before CUDA and NCCL start.

A NUMA node is taken from PCI, else from NVML's memory affinity, else from NCCL's topology file; -1 is no node, and on
any doubt nothing is bound. NCCL's threads inherit the binding, unless NCCL rebinds them (NCCL_IGNORE_CPU_AFFINITY=1).
Torch-free but for `cuda_bus_id` and `pinned_gbps`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from costlab.probes import numa
from costlab.probes.nvml import Nvml, visible
from costlab.probes.records import LinkRow
from costlab.probes.sysfs import (
    ROOT,
    NumaNode,
    PciDevice,
    address,
    allowed,
    cpulist,
    nics,
    numa_nodes,
    packages,
    pci_device,
    shown,
)
from costlab.probes.topology import bus_id, memory_affinity

if TYPE_CHECKING:
    import torch

Mode = Literal["off", "report", "bind"]
Fact = tuple[str, str, str]  # name, value, source

NOTHING_TO_GAIN = "one NUMA node: nothing to gain"
UNTOLD = "the system does not say where the GPU sits (numa_node is -1): nothing is bound"
MOST_ELSEWHERE = 0.05  # share of fresh pages on other nodes from which a memory binding has not worked
LARGEST_FILE = 8 << 20
_COPIED = 64 << 20


@dataclass
class Placement:
    """What was found and done. `node` is where the GPU sits; `cpus` is set only if the worker may be bound there."""

    mode: Mode
    gpu: str = ""  # bus id
    node: int | None = None
    source: str = ""
    cpus: frozenset[int] = frozenset()
    why: str = ""  # why nothing is to be bound, "" when it can be
    facts: list[Fact] = field(default_factory=list)
    bound_cpus: bool = False
    bound_memory: bool = False
    before: dict[int, set[int]] = field(default_factory=dict)  # thread -> CPUs before binding

    def say(self, name: str, value: object, source: str = "check-in") -> None:
        """Add a fact."""
        self.facts.append((name, str(value), source))

    def rows(self, rank: int) -> list[LinkRow]:
        """The facts as rows of the table `links`."""
        return [
            LinkRow(rank=rank, device=f"rank{rank}", kind="check-in", fact=name, value=value, source=source)
            for name, value, source in self.facts
        ]

    @property
    def sentence(self) -> str:
        """What happened, in one line for the log."""
        if self.mode == "off":
            return "check-in is off"
        if self.bound_cpus:
            memory = f"memory on node {self.node}" if self.bound_memory else "memory not bound"
            return f"bound to NUMA node {self.node}: CPUs {shown(self.cpus)}, {memory}"
        if self.why:
            return self.why
        return f"GPU on NUMA node {self.node}, CPUs {shown(self.cpus)}; not bound (report only)"


def check_in(
    mode: Mode, local_rank: int, *, nvml: Nvml | None = None, root: Path = ROOT, topo_file: str | None = None
) -> Placement:
    """Find this worker's place and, in mode `bind`, go there. Call before CUDA and NCCL are initialised."""
    if mode == "off":
        return Placement("off")
    session = nvml or Nvml()
    gpu, near = _gpu(session, local_rank)
    if nvml is None:
        session.close()
    placement = plan(
        mode, gpu, near, root, topo_file if topo_file is not None else os.environ.get("NCCL_TOPO_FILE", "")
    )
    if not placement.why:
        _fresh(placement, "fresh pages elsewhere, unbound", root)
    if mode == "bind" and not placement.why:
        bind(placement, root)
    placement.say("result", placement.sentence)
    return placement


def _gpu(nvml: Nvml, local_rank: int) -> tuple[str, str]:
    """Bus id and NVML's near nodes of the GPU that CUDA will call `local_rank`; "" where there is none."""
    handles = visible(nvml.handles(), nvml)
    if local_rank >= len(handles):
        return "", ""
    handle = handles[local_rank][1]
    return address(bus_id(nvml, handle)), memory_affinity(nvml, handle)


def plan(mode: Mode, gpu: str, near: str, root: Path = ROOT, topo_file: str = "") -> Placement:
    """Where to bind a worker whose GPU has bus id `gpu` and is near nodes `near` by NVML; `why` where not to."""
    placement = Placement(mode, gpu)
    nodes = numa_nodes(root)
    pci = pci_device(gpu, root) if gpu else None
    placement.say("gpu", gpu or "none", "NVML")
    placement.say("NUMA nodes", len(nodes), "sysfs")
    _sub_numa(placement, nodes, root)
    claims = _claims(pci, near, nccl_node(topo_file, gpu), len(nodes))
    placement.facts += claims.said
    placement.node, placement.source = claims.node, claims.source
    _nics(placement, pci, root)
    placement.why = _no_place(nodes) or ("no GPU: nothing to bind to" if not gpu else "") or claims.doubt
    if not placement.why:
        placement.why = _usable(placement, pci, nodes, root)
    return placement


@dataclass
class _Claims:
    node: int | None
    source: str
    doubt: str
    said: list[Fact]


def _claims(pci: PciDevice | None, near: str, nccl: int | None, count: int) -> _Claims:
    """The first source that names one node; a later one that names another one is a doubt."""
    mask = cpulist(near) or frozenset()
    by_nvml = next(iter(mask)) if len(mask) == 1 else None
    by_pci = pci.numa if pci is not None else None
    said = [("numa_node", "" if by_pci is None else str(by_pci), "sysfs"), ("memory_affinity", near, "NVML")]
    said.append(("numaid", "" if nccl is None else str(nccl), "NCCL topology file"))
    found = [
        (n, s)
        for n, s in ((by_pci, "sysfs"), (by_nvml, "NVML"), (nccl, "NCCL topology file"))
        if n is not None and n >= 0
    ]
    kept = [f for f in said if f[1] != ""]
    if not found:
        if by_pci == -1:
            return _Claims(None, "", UNTOLD, kept)
        reason = f"no source names one of {count} NUMA nodes for the GPU: nothing is bound"
        return _Claims(None, "", reason, kept)
    node, source = found[0]
    others = [f"{s} says {n}" for n, s in found[1:] if n != node]
    doubt = f"{source} puts the GPU on node {node}, {' and '.join(others)}: nothing is bound" if others else ""
    return _Claims(node, source, doubt, kept)


def nccl_node(topo_file: str, gpu: str) -> int | None:
    """numaid of the `<cpu>` that holds the GPU in a file of NCCL_TOPO_FILE; None for no or an unreadable file."""
    if not topo_file or not gpu:
        return None
    from xml.etree.ElementTree import ParseError

    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        path = Path(topo_file)
        if path.stat().st_size > LARGEST_FILE:
            return None
        root = fromstring(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ParseError, DefusedXmlException):
        return None
    for cpu in root.iter("cpu"):
        if any(address(pci.get("busid", "")) == gpu for pci in cpu.iter("pci")):
            text = cpu.get("numaid", "")
            return int(text) if text.isdigit() else None
    return None


def _sub_numa(placement: Placement, nodes: Sequence[NumaNode], root: Path) -> None:
    """Several nodes in a package (sub-NUMA clustering, NPS): told, since a node is then less than a socket."""
    sockets = packages(root)
    shared = max((sum(1 for n in nodes if n.cpus and n.cpus & cpus) for cpus in sockets.values()), default=0)
    if shared > 1:
        placement.say("nodes per package", shared, "sysfs")


def _nics(placement: Placement, pci: PciDevice | None, root: Path) -> None:
    """NICs under the same bridge first, then those of the GPU's node."""
    found = [(nic.name, pci_device(nic.address, root)) for nic in nics(root) if nic.address]
    if pci is not None and pci.chain:
        near = [name for name, device in found if device is not None and set(device.chain) & set(pci.chain)]
        if near:
            placement.say("NICs under a common bridge", ", ".join(near), "sysfs")
    if placement.node is not None:
        local = [name for name, device in found if device is not None and device.numa == placement.node]
        placement.say("NICs of the node", ", ".join(local) or "none", "sysfs")


def _no_place(nodes: Sequence[NumaNode]) -> str:
    if not nodes:
        return "the kernel shows no NUMA nodes: nothing is bound"
    return NOTHING_TO_GAIN if len(nodes) == 1 else ""


def _usable(placement: Placement, pci: PciDevice | None, nodes: Sequence[NumaNode], root: Path) -> str:
    """Fill in the CPUs to bind to, or say why there are none."""
    name = f"NUMA node {placement.node}"
    node = next((n for n in nodes if n.index == placement.node), None)
    if node is None:
        return f"the GPU's {name} is not online: nothing is bound"
    if node.cpus is None:
        return f"the CPUs of {name} cannot be read: nothing is bound"
    if not node.cpus:
        return f"{name} has no CPU that is online: nothing is bound"
    if pci is not None and pci.local_cpus and not pci.local_cpus & node.cpus:
        return f"the GPU's local CPUs ({shown(pci.local_cpus)}) are not those of its {name}: nothing is bound"
    permitted, memory = allowed("Cpus_allowed_list", root), allowed("Mems_allowed_list", root)
    if permitted is None:
        return "the CPUs this process may use cannot be read: nothing is bound"
    cpus = node.cpus & permitted
    placement.say("CPUs of the node", shown(node.cpus), "sysfs")
    if not cpus:
        return f"the cpuset leaves this process no CPU of {name} (it has {shown(permitted)}): nothing is bound"
    if memory is not None and placement.node not in memory:
        return f"the cpuset leaves this process no memory of {name}: nothing is bound"
    if node.memory == 0:
        return f"{name} has no memory: nothing is bound"
    placement.cpus = cpus
    return ""


def bind(placement: Placement, root: Path = ROOT) -> None:
    """Bind all threads' CPUs and this thread's memory; undone where it fails or where fresh pages go elsewhere."""
    assert placement.node is not None
    placement.before = {}
    try:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
                original = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, placement.cpus)
                placement.before[thread] = original
    except OSError as error:
        release(placement)
        placement.why = f"the kernel refuses to bind CPUs ({error.strerror}): nothing is bound"
        return
    placement.bound_cpus = True
    try:
        numa.set_policy(numa.MPOL_PREFERRED, placement.node)
    except numa.NumaRefused as error:
        placement.say("memory", f"not bound: {error}")
        return
    placement.bound_memory = True
    elsewhere = _fresh(placement, "fresh pages elsewhere", root)
    if elsewhere is not None and elsewhere > MOST_ELSEWHERE:
        release(placement)
        placement.why = f"{100 * elsewhere:.0f} % of fresh pages went to other nodes than {placement.node}: undone"


def _fresh(placement: Placement, name: str, root: Path) -> float | None:
    """Touch some memory and tell what part of it lies on other nodes than the GPU's."""
    assert placement.node is not None
    elsewhere = numa.share_elsewhere(numa.probe_pages(root), placement.node)
    placement.say(name, "not known" if elsewhere is None else f"{100 * elsewhere:.1f} %", "numa_maps")
    return elsewhere


def compare_host_memory(placement: Placement, gbps: Callable[[int], float], root: Path = ROOT) -> None:
    """Tell what the GPU's copies from its own node's memory and from the other nodes' reach, as `gbps` measures them.

    Nothing on one node, on doubt about the GPU's, or where the kernel refuses to place memory (which is told).
    """
    permitted = allowed("Mems_allowed_list", root)
    nodes = [n.index for n in numa_nodes(root) if n.memory and (permitted is None or n.index in permitted)]
    if placement.node not in nodes or len(nodes) < 2 or placement.mode == "off":
        return
    for node in nodes:
        where = "own" if node == placement.node else "another"
        try:
            with numa.memory_on(node):
                placement.say(f"host to device from {where} node {node}", f"{gbps(node):.1f} GB/s", "pinned copy")
        except numa.NumaRefused as error:
            placement.say("host to device by node", f"not measured: {error}")
            return


def pinned_gbps(device: torch.device) -> float:
    """Median of five copies of 64 MiB of pinned memory, which lies where the thread's policy says, to the device."""
    import statistics

    import torch

    host = torch.ones(_COPIED, dtype=torch.uint8).pin_memory()
    into = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        into.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(_COPIED / statistics.median(times[1:]) / 1e9)


def _threads() -> list[int]:
    try:
        return sorted(int(p.name) for p in Path("/proc/self/task").iterdir())
    except OSError:
        return [0]


def release(placement: Placement) -> None:
    """Undo a binding: CPUs as they were, memory by the default policy."""
    for thread, cpus in placement.before.items():
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:
            continue
        except OSError as error:
            placement.say("not undone", f"CPUs of thread {thread}: {error.strerror}")
    if placement.bound_memory:
        try:
            numa.set_policy(numa.MPOL_DEFAULT)
        except numa.NumaRefused as error:
            placement.say("not undone", error)
    placement.before = {}
    placement.bound_cpus = placement.bound_memory = False


def confirm(placement: Placement, bus: str) -> None:
    """CUDA's device has bus id `bus`: if it is another GPU than expected, undo the binding and say so."""
    if not placement.gpu or not bus or address(bus) == placement.gpu:
        return
    was_bound = placement.bound_cpus
    release(placement)
    placement.why = f"CUDA's GPU is {address(bus)}, not {placement.gpu}: " + (
        "the binding was undone" if was_bound else "the place found is another GPU's"
    )
    placement.say("result", placement.why)


def cuda_bus_id(device: torch.device) -> str:
    """Bus id of a CUDA device by CUDA, for `confirm`; "" where this torch does not tell it. Initialises CUDA."""
    import torch

    found = torch.cuda.get_device_properties(device)
    parts = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(p, int) for p in parts):
        return ""
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def closing_rows(placement: Placement, rank: int, root: Path = ROOT) -> list[LinkRow]:
    """At the end of a run: where this process's pages lie, and what part of them is on other nodes than its GPU."""
    if placement.mode == "off":
        return []
    pages = numa.pages_by_node(root)
    facts: list[Fact] = []
    if pages is not None:
        facts.append(("pages by node", ", ".join(f"{n}: {c}" for n, c in sorted(pages.items())), "numa_maps"))
    elsewhere = None if placement.node is None else numa.share_elsewhere(pages, placement.node)
    if elsewhere is not None:
        facts.append(("pages elsewhere", f"{100 * elsewhere:.1f} %", "numa_maps"))
    return [
        LinkRow(rank=rank, device=f"rank{rank}", kind="check-in", fact=name, value=value, source=source)
        for name, value, source in facts
    ]

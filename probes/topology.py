"""What this machine says of its devices and links, one fact a row, each with its source. Torch-free.

Nothing is decided here: NVML's present PCIe generation stands beside its maximum, `numa_node = -1` stays -1. The graph
is made of these rows elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costlab.probes.nvml import Nvml, visible
from costlab.probes.records import LinkRow
from costlab.probes.sysfs import (
    ROOT,
    Nic,
    PciDevice,
    address,
    nics,
    numa_nodes,
    packages,
    pci_device,
    pci_devices,
    read,
    shown,
)

MAX_NVLINKS = 18
ANCESTORS = {0: "LOC", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML's levels as `topo -m` has them
P2P = {0: "OK", 1: "chipset does not support it", 2: "GPU does not support it", 3: "topology does not support it",
       4: "disabled by a setting", 5: "not supported", 6: "unknown"}  # fmt: skip
REMOTE = {0: "gpu", 1: "cpu", 2: "switch"}
HIDDEN_BUS = "ffff:ff:ff.0"
_MEMORY_CLOCK = 2
_NVLINK_SPEED_FIELD = 90
_WORDS = 16  # 64-bit words of an affinity mask: 1024 CPUs or nodes

Fact = tuple[str, str, str]  # name, value, source


def machine_rows(rank: int = 0, *, nvml: Nvml | None = None, root: Path = ROOT) -> list[LinkRow]:
    """Every fact of this machine's CPUs, NUMA nodes, GPUs, bridges, NICs and disks."""
    session = nvml or Nvml()
    rows = [
        LinkRow(rank=rank, device=device, kind=kind, fact=fact, value=value, source=source)
        for device, kind, facts in _devices(session, root)
        for fact, value, source in facts
        if value != ""
    ]
    if nvml is None:
        session.close()
    return rows


def _devices(nvml: Nvml, root: Path) -> Iterator[tuple[str, str, list[Fact]]]:
    yield "machine", "machine", _machine(nvml, root)
    for node in numa_nodes(root):
        facts = [
            ("cpus", shown(node.cpus) if node.cpus is not None else "", "sysfs"),
            ("memory_bytes", str(node.memory or ""), "sysfs"),
            ("distances", ",".join(f"{k}:{v}" for k, v in node.distances.items()), "sysfs"),
        ]
        yield f"numa{node.index}", "numa", facts
    bridges: dict[str, None] = {}
    for device, kind, facts, pci in _endpoints(nvml, root):
        bridges.update(dict.fromkeys(pci.chain if pci else ()))
        yield device, kind, [*facts, *_pci_facts(pci)]
    for name in bridges:
        yield name, "pci", _pci_facts(pci_device(name, root))


def _endpoints(nvml: Nvml, root: Path) -> Iterator[tuple[str, str, list[Fact], PciDevice | None]]:
    handles = nvml.handles()
    seen = {index: order for order, (index, _) in enumerate(visible(handles, nvml))}
    taken = set()
    for index, handle in handles:
        bus = bus_id(nvml, handle)
        taken.add(address(bus))
        facts = [*_gpu(nvml, index, handle, seen), *_peers(nvml, index, handle, handles), *_nvlinks(nvml, handle)]
        yield f"gpu{index}", "gpu", facts, pci_device(bus, root) if bus else None
    for nic in nics(root):
        yield nic.name, "nic", _nic(nic), pci_device(nic.address, root) if nic.address else None
    for pci in pci_devices(root):
        if pci.code.startswith("0x0108"):
            yield _disk_name(pci, root), "disk", [], pci
        elif pci.code.startswith("0x0680") and pci.vendor == "0x10de":
            yield pci.address, "nvswitch", [], pci
        elif pci.code.startswith(("0x0302", "0x1200")) and pci.address not in taken:
            yield pci.address, "accelerator", [("driver", "not seen by NVML", "sysfs")], pci


def _machine(nvml: Nvml, root: Path) -> list[Fact]:
    """CPU vendor, family and model, by which NCCL takes its constant; packages; and how NVML answered."""
    names = {"vendor_id": "cpu_vendor", "cpu family": "cpu_family", "model": "cpu_model"}
    found: dict[str, str] = {}
    for line in (read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(names.get(key.strip(), ""), value.strip())
        if not line.strip() and len(found) > 1:
            break
    facts = [(name, found.get(name, ""), "procfs") for name in names.values()]
    facts.append(("packages", str(len(packages(root)) or ""), "sysfs"))
    facts.append(("nvml", "" if nvml.available else nvml.reason, "NVML"))
    return facts


def bus_id(nvml: Nvml, handle: Any) -> str:
    """A GPU's bus id as NVML writes it, "" where it is refused."""
    info = nvml.call("nvmlDeviceGetPciInfo", handle)
    raw = getattr(info, "busId", "")
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def _gpu(nvml: Nvml, index: int, handle: Any, seen: dict[int, int]) -> list[Fact]:
    capability = nvml.call("nvmlDeviceGetCudaComputeCapability", handle)
    clock = nvml.call("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK)
    facts = {
        "name": nvml.text("nvmlDeviceGetName", handle),
        "busid": address(bus_id(nvml, handle)),
        "sm": f"{capability[0]}{capability[1]}" if capability else "",
        "cuda_index": seen.get(index, "not visible"),
        "pcie_generation_now": nvml.call("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "pcie_width_now": nvml.call("nvmlDeviceGetCurrPcieLinkWidth", handle),
        "pcie_generation_max": nvml.call("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width_max": nvml.call("nvmlDeviceGetMaxPcieLinkWidth", handle),
        "memory_bus_bits": nvml.call("nvmlDeviceGetMemoryBusWidth", handle),
        "memory_clock_mhz": clock,
        "numa_node": nvml.call("nvmlDeviceGetNumaNodeId", handle),
        "memory_affinity": _mask(nvml.call("nvmlDeviceGetMemoryAffinity", handle, _WORDS, 0)),
        "cpu_affinity": _mask(nvml.call("nvmlDeviceGetCpuAffinity", handle, _WORDS)),
    }
    return [(name, "" if value is None else str(value), "NVML") for name, value in facts.items()]


def _mask(words: Any) -> str:
    """A list of the bits of 64-bit words, least significant word first; "" for none."""
    if words is None:
        return ""
    return shown({64 * i + bit for i, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1})


def memory_affinity(nvml: Nvml, handle: Any) -> str:
    """NUMA nodes near the GPU by NVML, as a list; "" where it does not say."""
    return _mask(nvml.call("nvmlDeviceGetMemoryAffinity", handle, _WORDS, 0))


def _peers(nvml: Nvml, index: int, handle: Any, handles: list[tuple[int, Any]]) -> Iterator[Fact]:
    for other, peer in handles:
        if other == index:
            continue
        level = nvml.call("nvmlDeviceGetTopologyCommonAncestor", handle, peer)
        yield f"ancestor gpu{other}", "" if level is None else ANCESTORS.get(int(level), str(level)), "NVML"
        for name, kind in (("p2p read", 0), ("p2p write", 1)):
            status = nvml.call("nvmlDeviceGetP2PStatus", handle, peer, kind)
            yield f"{name} gpu{other}", "" if status is None else P2P.get(int(status), str(status)), "NVML"


def _nvlinks(nvml: Nvml, handle: Any) -> Iterator[Fact]:
    """Active links counted by their other end: a bus id, or what kind of device it is where that is hidden."""
    ends: Counter[str] = Counter()
    for link in range(MAX_NVLINKS):
        if nvml.call("nvmlDeviceGetNvLinkState", handle, link):
            ends[_remote(nvml, handle, link)] += 1
    for end, count in ends.items():
        yield f"nvlink {end}", str(count), "NVML"
    if ends:
        version = nvml.call("nvmlDeviceGetNvLinkVersion", handle, 0)
        yield "nvlink_version_code", "" if version is None else str(version), "NVML"
        values = nvml.call("nvmlDeviceGetFieldValues", handle, [_NVLINK_SPEED_FIELD])
        speed = _field(values[0]) if values else None
        yield "nvlink_speed_mbps", "" if not speed else str(speed), "NVML"


def _remote(nvml: Nvml, handle: Any, link: int) -> str:
    kind = nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    info = nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    raw = getattr(info, "busId", "")
    bus = address(raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw))
    name = REMOTE.get(int(kind), "unknown") if kind is not None else "unknown"
    return f"{name} hidden" if not bus or bus.endswith(HIDDEN_BUS) else f"{name} {bus}"


def _field(value: Any) -> int | None:
    """An NVML field value of integral type that was returned without an error."""
    if getattr(value, "nvmlReturn", 1) != 0:
        return None
    number = getattr(getattr(value, "value", None), "uiVal", None)
    return None if number is None else int(number)


def _nic(nic: Nic) -> list[Fact]:
    facts = {"kind": nic.kind, "mbps": "" if nic.mbps is None else f"{nic.mbps:g}", "busid": nic.address, **nic.facts}
    return [(name, value, "sysfs") for name, value in facts.items()]


def _disk_name(pci: PciDevice, root: Path) -> str:
    names = sorted(p.name for p in (root / "sys/bus/pci/devices" / pci.address).glob("nvme/nvme*"))
    return names[0] if names else f"storage {pci.address}"


def _pci_facts(pci: PciDevice | None) -> list[Fact]:
    if pci is None:
        return []
    facts = {
        "address": pci.address,
        "numa_node": "" if pci.numa is None else str(pci.numa),
        "local_cpus": "" if pci.local_cpus is None else shown(pci.local_cpus),
        "speed_now": pci.speed, "width_now": pci.width, "speed_max": pci.max_speed, "width_max": pci.max_width,
        "chain": " ".join(pci.chain),
        "class": pci.code,
    }  # fmt: skip
    return [(name, value, "sysfs") for name, value in facts.items()]

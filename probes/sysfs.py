"""What the kernel tells of NUMA nodes, CPUs and PCI devices, read below `root` so that a copied tree can be tried.

Torch-free. Nothing here guesses: an absent or unreadable file is None, -1 stays -1.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
NODES = "sys/devices/system/node"
PCI = "sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read(path: Path) -> str | None:
    """A file's text without surrounding blanks, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cpulist(text: str | None) -> frozenset[int] | None:
    """CPUs of "0-3,8"; the empty list is an empty set; None for None or a text that is no list."""
    if text is None:
        return None
    found: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            return None
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def shown(cpus: frozenset[int] | set[int]) -> str:
    """ "0-3,8" of a set."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its CPUs that are online, memory in bytes, distances by node."""

    index: int
    cpus: frozenset[int] | None
    memory: int | None
    distances: dict[int, int] = field(default_factory=dict)


def numa_nodes(root: Path = ROOT) -> list[NumaNode]:
    """The online nodes in order; empty where the kernel shows none."""
    indices = sorted(int(p.name[4:]) for p in (root / NODES).glob("node[0-9]*") if p.name[4:].isdigit())
    online = cpulist(read(root / NODES / "online"))
    return [_node(root, i, indices) for i in indices if online is None or i in online]


def _node(root: Path, index: int, indices: list[int]) -> NumaNode:
    folder = root / NODES / f"node{index}"
    cpus, up = cpulist(read(folder / "cpulist")), online_cpus(root)
    match = re.search(r"MemTotal:\s*(\d+) kB", read(folder / "meminfo") or "")
    distances = (read(folder / "distance") or "").split()
    known = len(distances) == len(indices) and all(d.isdigit() for d in distances)
    return NumaNode(
        index=index,
        cpus=cpus & up if cpus is not None and up is not None else cpus,
        memory=int(match[1]) * 1024 if match else None,
        distances=dict(zip(indices, map(int, distances), strict=True)) if known else {},
    )


def online_cpus(root: Path = ROOT) -> frozenset[int] | None:
    """CPUs that are online, None where the kernel does not say."""
    return cpulist(read(root / "sys/devices/system/cpu/online"))


def allowed(field_name: str, root: Path = ROOT) -> frozenset[int] | None:
    """Cpus_allowed_list or Mems_allowed_list of this process, which carry the cgroup's cpuset; None if not told."""
    for line in (read(root / "proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == field_name:
            return cpulist(value.strip())
    return None


def packages(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Physical package -> its online CPUs; empty where the kernel does not say."""
    found: dict[int, set[int]] = {}
    for cpu in online_cpus(root) or ():
        text = read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        if text is not None and text.isdigit():
            found.setdefault(int(text), set()).add(cpu)
    return {package: frozenset(cpus) for package, cpus in found.items()}


def address(bus_id: str) -> str:
    """sysfs' form of a bus id: NVML writes an eight-digit domain in capitals, sysfs four digits where they suffice."""
    text = bus_id.strip().lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if _ADDRESS.fullmatch(text) else text


@dataclass(frozen=True)
class PciDevice:
    """A PCI device: `chain` are the bridges above it, nearest first; `numa` is what the kernel says, -1 included."""

    address: str
    numa: int | None
    local_cpus: frozenset[int] | None
    code: str  # class, "0x030200"
    vendor: str
    device: str
    speed: str  # "32.0 GT/s PCIe"
    width: str
    max_speed: str
    max_width: str
    chain: tuple[str, ...]


def pci_device(bus_id: str, root: Path = ROOT) -> PciDevice | None:
    """What sysfs has of a device, None where it has nothing."""
    name = address(bus_id)
    folder = root / PCI / name
    if not folder.is_dir():
        return None
    numa = read(folder / "numa_node")

    def text(file: str) -> str:
        return read(folder / file) or ""

    return PciDevice(
        address=name,
        numa=int(numa) if numa is not None and re.fullmatch(r"-?\d{1,6}", numa) else None,
        local_cpus=cpulist(read(folder / "local_cpulist")),
        code=text("class"), vendor=text("vendor"), device=text("device"), speed=text("current_link_speed"),
        width=text("current_link_width"), max_speed=text("max_link_speed"), max_width=text("max_link_width"),
        chain=_chain(folder),
    )  # fmt: skip


def _chain(folder: Path) -> tuple[str, ...]:
    """Addresses of the bridges above: the parts of the real path that are bus ids."""
    parts = Path(os.path.realpath(folder)).parts[:-1]
    return tuple(p for p in reversed(parts) if _ADDRESS.fullmatch(p))


def pci_devices(root: Path = ROOT) -> list[PciDevice]:
    """All PCI devices in order of address."""
    try:
        names = sorted(p.name for p in (root / PCI).iterdir())
    except OSError:
        return []
    return [d for d in (pci_device(n, root) for n in names) if d is not None]


@dataclass(frozen=True)
class Nic:
    """A network interface or RDMA port of a physical device; virtual ones have no `address`."""

    name: str
    address: str
    kind: str  # ethernet | rdma
    mbps: float | None
    facts: dict[str, str] = field(default_factory=dict)


def nics(root: Path = ROOT) -> list[Nic]:
    """Physical network interfaces and RDMA devices; interfaces without a device behind them are left out."""
    found = [_ethernet(p) for p in sorted((root / "sys/class/net").glob("*")) if (p / "device").exists()]
    found += [_rdma(p) for p in sorted((root / "sys/class/infiniband").glob("*"))]
    return found


def _device_address(folder: Path) -> str:
    """The bus id of the nearest PCI device at or above `folder`/device ("virtio0" hangs below one)."""
    parts = Path(os.path.realpath(folder / "device")).parts
    return next((p for p in reversed(parts) if _ADDRESS.fullmatch(p)), "")


def _ethernet(folder: Path) -> Nic:
    speed = read(folder / "speed")
    mbps = float(speed) if speed is not None and re.fullmatch(r"\d{1,9}", speed) and speed != "0" else None
    return Nic(folder.name, _device_address(folder), "ethernet", mbps, {"state": read(folder / "operstate") or ""})


def _rdma(folder: Path) -> Nic:
    ports = sorted((folder / "ports").glob("*"))
    rates = [re.match(r"(\d+(?:\.\d+)?) Gb/sec", read(p / "rate") or "") for p in ports]
    known = [float(m[1]) * 1000 for m in rates if m]
    facts = {"link_layer": ", ".join(filter(None, (read(p / "link_layer") for p in ports)))}
    facts["state"] = ", ".join(filter(None, (read(p / "state") for p in ports)))
    return Nic(folder.name, _device_address(folder), "rdma", max(known) if known else None, facts)

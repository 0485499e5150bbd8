"""From the facts a machine tells (`probes.topology`, or the table `links` of a run) to its topology.

Rules: PCIe links at their maximum, with the present state beside it; the NUMA node of a device is PCI's, else NVML's,
and none where both are silent, -1 or name every node.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from costlab.app.topology import rates
from costlab.app.topology.builder import Builder
from costlab.app.topology.model import Fact, NodeKind, Topology
from costlab.probes.records import LinkRow
from costlab.probes.sysfs import ROOT, cpulist

HERE = "this machine"
_PCIE_FACTS = ("pcie_generation_now", "pcie_generation_max", "pcie_width_now", "pcie_width_max", "speed_now",
               "speed_max", "width_now", "width_max")  # fmt: skip


def discover(root: Path = ROOT) -> Topology:
    """The machine this process runs on."""
    from costlab.probes.topology import machine_rows

    return from_rows(machine_rows(root=root), HERE)


def fingerprint(rows: Iterable[LinkRow]) -> str:
    """A short hash of the devices and where they sit, so that a calibration is used on the machine it was made on."""
    lasting = {"name", "busid", "sm", "cpu_model", "cpu_family", "cpu_vendor", "memory_bytes", "cpus", "chain"}
    text = "\n".join(sorted(f"{r.device} {r.fact} {r.value}" for r in rows if r.fact in lasting))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_rows(rows: Iterable[LinkRow], source: str) -> Topology:
    """The topology of facts; rows of other kinds (check-in) are left out."""
    reader = _Reader(source)
    for row in rows:
        reader.take(row)
    return reader.build()


class _Device:
    """All facts of one device, by name and source."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.facts: list[Fact] = []

    def get(self, name: str, source: str = "") -> str:
        return next((f.value for f in self.facts if f.name == name and source in ("", f.source)), "")

    def all(self, name: str) -> list[Fact]:
        return [f for f in self.facts if f.name == name]

    def number(self, name: str, source: str = "") -> int | None:
        text = self.get(name, source)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None


class _Reader:
    def __init__(self, source: str) -> None:
        self.builder = Builder(source)
        self.devices: dict[tuple[str, str], _Device] = {}

    def take(self, row: LinkRow) -> None:
        device = self.devices.setdefault((row.kind, row.device), _Device(row.device, row.kind))
        device.facts.append(Fact(name=row.fact, value=row.value, source=row.source))

    def kind(self, *kinds: str) -> list[_Device]:
        return [d for (kind, _), d in self.devices.items() if kind in kinds]

    def build(self) -> Topology:
        self._cpus()
        endpoints = self.kind("gpu", "nvswitch", "nic", "disk", "accelerator")
        self._bridges(endpoints)
        for device in endpoints:
            self._endpoint(device)
        for gpu in self.kind("gpu"):
            self._memory(gpu)
            self._nvlinks(gpu)
            self._pairs(gpu)
        machine = next(iter(self.kind("machine")), None)
        if machine is not None:
            vendor, family, model = machine.get("cpu_vendor"), machine.number("cpu_family"), machine.number("cpu_model")
            self.builder.interconnect(rates.socket_link("x86_64" if vendor else "", vendor, family, model))
            if machine.get("nvml"):
                self.builder.notes.append(f"no NVIDIA GPU facts: {machine.get('nvml')}")
        return self.builder.topology()

    def _cpus(self) -> None:
        nodes = [d for d in self.kind("numa") if _index(d.name, "numa") is not None]
        for device in nodes:
            index, cpus = _index(device.name, "numa"), device.get("cpus")
            label = f"NUMA {index} ─ CPU {cpus}" if cpus else f"NUMA {index} (memory only)"
            self.builder.node(device.name, "cpu", label, numa=index, facts=device.facts)
        for device in nodes:
            for entry in filter(None, device.get("distances").split(",")):
                other, _, distance = entry.partition(":")
                if f"numa{other}" > device.name and f"numa{other}" in self.builder.nodes:
                    self.builder.pair(device.name, f"numa{other}", "NUMA distance", distance, "sysfs")

    def _numa(self, device: _Device) -> tuple[int | None, str]:
        """PCI's node, else NVML's where it names one of several; a claim about every node is none."""
        nodes = {n.numa for n in self.builder.nodes.values() if n.kind == "cpu" and n.numa is not None}
        pci, nvml = device.number("numa_node", "sysfs"), cpulist(device.get("memory_affinity"))
        said = [*device.all("numa_node"), *device.all("memory_affinity")]
        near = next(iter(nvml)) if nvml and len(nvml) == 1 and len(nodes) > 1 else None
        if pci is not None and pci >= 0:
            if near is not None and near != pci:
                self.builder.doubt(device.name, "NUMA node", said, f"{pci}, PCI's word")
            return pci, "sysfs numa_node"
        if near is not None:
            self.builder.doubt(device.name, "NUMA node", said, f"{near}, by NVML's memory affinity")
            return near, "NVML memory affinity"
        if pci is not None:
            taken = "no node: -1 says that the kernel was not told"
            self.builder.doubt(device.name, "NUMA node", said, taken)
        return None, ""

    def _root(self, numa: int | None) -> str:
        if numa is not None and f"numa{numa}" in self.builder.nodes:
            return f"numa{numa}"
        only = [n for n in self.builder.nodes.values() if n.kind == "cpu"]
        if len(only) == 1:
            if numa is None and "not stated" not in only[0].label and only[0].id != "cpu":
                label = f"{only[0].label} (the only node shown; devices' own not stated)"
                self.builder.change(only[0].id, label=label)
            return only[0].id
        if "cpu" not in self.builder.nodes:
            self.builder.node("cpu", "cpu", "CPU, NUMA node not stated")
        return "cpu"

    def _bridges(self, endpoints: list[_Device]) -> None:
        """Bridges that something of interest hangs on, the topmost first."""
        known = {d.name: d for d in self.kind("pci")}
        for device in endpoints:
            chain = device.get("chain").split()
            numa, source = self._numa(device) if device.name not in self.builder.nodes else (None, "")
            above = ""
            for address in reversed(chain):
                id = f"pci:{address}"
                if id not in self.builder.nodes:
                    bridge = known.get(address, _Device(address, "pci"))
                    own, own_source = self._bridge_numa(bridge)
                    place, word = (own, own_source) if own is not None else (numa, source)
                    parent = above or self._root(place)
                    self.builder.node(
                        id, "pci", f"PCIe bridge {address}", parent=parent, numa=place, numa_source=word,
                        busid=address, facts=bridge.facts,
                    )  # fmt: skip
                    self._uplink(bridge, id, parent)
                above = id

    @staticmethod
    def _bridge_numa(bridge: _Device) -> tuple[int | None, str]:
        value = bridge.number("numa_node", "sysfs")
        return (value, "sysfs numa_node") if value is not None and value >= 0 else (None, "")

    def _endpoint(self, device: _Device) -> None:
        numa, source = self._quiet_numa(device)
        chain = device.get("chain").split()
        parent = f"pci:{chain[0]}" if chain else self._root(numa)
        kind, label = self._named(device)
        id = self.builder.node(
            device.name if kind in ("gpu",) else f"{kind}:{device.name}", kind, label, parent=parent, numa=numa,
            numa_source=source, busid=device.get("address") or device.get("busid"), facts=device.facts,
        )  # fmt: skip
        self._uplink(device, id, parent)
        if kind == "nic":
            mbps = _number(device.get("mbps"))
            self.builder.both(id, self.builder.network(), "network", rates.network(mbps), how="sysfs")

    def _quiet_numa(self, device: _Device) -> tuple[int | None, str]:
        """Like `_numa`, whose doubts were recorded when the bridges were made."""
        before = len(self.builder.doubts)
        found = self._numa(device)
        del self.builder.doubts[before:]
        return found

    @staticmethod
    def _named(device: _Device) -> tuple[NodeKind, str]:
        if device.kind == "gpu":
            index = _index(device.name, "gpu")
            return "gpu", device.name if index is None else f"GPU{index}"
        if device.kind == "nvswitch":
            return "nvswitch", f"NVSwitch {device.name}"
        if device.kind == "nic":
            return "nic", device.name
        return ("disk", device.name) if device.kind == "disk" else ("pci", f"accelerator {device.name}")

    def _uplink(self, device: _Device, id: str, parent: str) -> None:
        """The link above a device at its maximum, as NVML or else sysfs has it; another present state is a doubt."""
        nvml = device.number("pcie_generation_max"), device.number("pcie_width_max")
        sysfs = rates.pcie_generation(device.get("speed_max")), device.number("width_max")
        now = device.number("pcie_generation_now"), device.number("pcie_width_now")
        generation, width = (nvml if None not in nvml else sysfs)  # fmt: skip
        width = width if width and width < 255 else None
        rate = rates.pcie(generation, width)
        said = [f for n in _PCIE_FACTS for f in device.all(n)]
        if rate.line is None and not said:
            rate = rates.Rate("PCIe, rate not told", None, None, rate.nccl)
        if None not in nvml and None not in now and nvml != now:
            self.builder.doubt(id, "PCIe link", said, "the maximum; an idle GPU lowers its generation")
        elif None not in nvml and sysfs[0] is not None and sysfs[1] and sysfs != nvml:
            self.builder.doubt(id, "PCIe link", said, "NVML's maximum")
        how = "NVML, maximum of the link" if None not in nvml else "sysfs, maximum of the device"
        self.builder.both(parent, id, "pcie", rate, how=how, facts=said)

    def _memory(self, gpu: _Device) -> None:
        """Device memory as a link of the GPU to itself; line rate = bus width x clock x 2 (double data rate)."""
        bits, clock = gpu.number("memory_bus_bits"), gpu.number("memory_clock_mhz")
        line = bits / 8 * clock * 2 / 1000 if bits and clock else None
        facts = [*gpu.all("memory_bus_bits"), *gpu.all("memory_clock_mhz")]
        how = "NVML: bus width x maximum memory clock x 2"
        self.builder.link(
            gpu.name, gpu.name, "memory", rates.Rate("device memory", line, line, None), how=how, facts=facts
        )

    def _nvlinks(self, gpu: _Device) -> None:
        sm = gpu.number("sm")
        by_bus = {d.get("address") or d.get("busid"): d.name for d in self.kind("gpu")}
        by_bus |= {d.get("address"): f"nvswitch:{d.name}" for d in self.kind("nvswitch")}
        speed = gpu.number("nvlink_speed_mbps")
        for fact in gpu.facts:
            if not fact.name.startswith("nvlink ") or not re.fullmatch(r"\d{1,6}", fact.value, re.ASCII):
                continue
            kind, _, bus = fact.name.removeprefix("nvlink ").partition(" ")
            other = by_bus.get(bus) or self._far_end(kind, bus)
            how = f"NVML count x rate of a link from sm {sm}" + (f" (NVML: {speed} MB/s raw)" if speed else "")
            count = Fact(name="count", value=fact.value, source=fact.source)
            rate = rates.nvlink(sm, int(fact.value))
            self.builder.link(gpu.name, other, "nvlink", rate, how=how, facts=[count])
            if self.builder.nodes[other].kind != "gpu":
                self.builder.link(other, gpu.name, "nvlink", rate, how=how, facts=[count])

    def _far_end(self, kind: str, bus: str) -> str:
        """A node for the other end of NVLinks that no device of this machine is known by."""
        known = kind == "switch" and bus != "hidden"
        id = f"nvswitch:{bus}" if known else "nvswitch"
        if id not in self.builder.nodes:
            label = f"NVSwitch {bus}" if known else "NVSwitch (not visible)"
            if kind != "switch":
                label = "other end of NVLink (not visible)"
            self.builder.node(id, "nvswitch", label, visible=known, busid=bus if known else "")
            if not known:
                said = [self.builder.fact("nvlink remote", f"{kind} {bus}", "NVML")]
                self.builder.doubt(id, "NVLink's other end", said, "one unknown device: what and how many is not told")
        return id

    def _pairs(self, gpu: _Device) -> None:
        words: dict[str, str] = defaultdict(str, {"ancestor": "PCIe path", "p2p": "p2p"})
        for fact in gpu.facts:
            head, _, rest = fact.name.partition(" ")
            other = rest.split()[-1] if rest.split() else ""
            here, there = _index(gpu.name, "gpu"), _index(other, "gpu")
            if head in words and here is not None and there is not None and there > here:
                name = words[head] if head == "ancestor" else f"p2p {rest.split()[0]}"
                self.builder.pair(gpu.name, other, name, fact.value, fact.source)


def _index(name: str, prefix: str) -> int | None:
    """The number of "gpu3" or "numa0"; rows of a run are data, and a name may be anything."""
    match = re.fullmatch(rf"{prefix}(\d{{1,6}})", name, re.ASCII)
    return int(match[1]) if match else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text, re.ASCII) else None

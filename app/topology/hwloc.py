"""hwloc's XML (`lstopo file.xml`), versions 1 to 3: packages, NUMA nodes, the PCIe tree and NVLink bandwidths."""

from __future__ import annotations

import re

from costlab.app.topology import rates
from costlab.app.topology.builder import Builder
from costlab.app.topology.cpus import bits, listed
from costlab.app.topology.model import NodeKind, Topology, TopologyProblem
from costlab.app.topology.xmlread import Element, number, whole

VENDORS = {"10de": "NVIDIA", "1002": "AMD", "8086": "Intel"}
GPU_BACKENDS = {"NVML", "CUDA", "RSMI", "LevelZero", "OpenCL"}
_IO = {"Bridge", "PCIDev", "OSDev"}
_TYPE = re.compile(r"(?P<kind>[0-9a-f]{4})\s+\[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\]", re.IGNORECASE)


def read_hwloc(root: Element, name: str) -> Topology:
    """The topology of a parsed `<topology>`; TopologyProblem with the line for what cannot be read."""
    reader = _Reader(root, name)
    reader.read()
    return reader.builder.topology()


class _Reader:
    def __init__(self, root: Element, name: str) -> None:
        self.root, self.name = root, name
        version = root.get("version")
        self.builder = Builder(f"hwloc XML {name}{f', version {version}' if version else ''}")
        self.by_gp: dict[str, str] = {}  # gp_index -> node id
        self.by_os: dict[int, str] = {}  # NUMA os_index -> node id
        self.gpus = 0

    def read(self) -> None:
        machines = self.root.all("object")
        if not machines:
            raise TopologyProblem(self.name, self.root.line, "<topology> has no <object>")
        for numa in (e for m in machines for e in m.walk() if e.get("type") == "NUMANode"):
            self._numa(numa)
        if not self.by_os:
            cpu = self.builder.node("cpu", "cpu", "CPU, NUMA node not stated")
            self.builder.notes.append("the file has no NUMA node")
            self.by_os[-1] = cpu
        for machine in machines:
            self._objects(machine, None)
        self._distances()
        self.builder.interconnect(None)

    def _numa(self, element: Element) -> None:
        index = whole(element, "os_index", self.name)
        if index is None:
            raise TopologyProblem(self.name, element.line, "NUMANode without os_index")
        mask = self._cpuset(element)
        memory = whole(element, "local_memory", self.name)
        facts = [self.builder.fact("cpus", mask), self.builder.fact("memory", memory or "")]
        label = f"NUMA {index} ─ CPU {mask}" if mask else f"NUMA {index}"
        id = self.builder.node(f"numa{index}", "cpu", label, numa=index, facts=facts)
        self.by_os[index] = id
        if element.get("gp_index"):
            self.by_gp[element.get("gp_index")] = id

    def _cpuset(self, element: Element) -> str:
        """ "0-3" of "0x0000000f" or of comma-separated 32-bit words, "" for none or an infinite set."""
        text = element.get("cpuset")
        if not text or "f...f" in text:
            return ""
        words = text.split(",")
        if not all(re.fullmatch(r"(0x)?[0-9a-fA-F]{0,8}", w) for w in words):
            raise TopologyProblem(self.name, element.line, f'cpuset="{text[:40]}": not a mask')
        value = 0
        for word in words:
            value = (value << 32) | int(word or "0", 16)
        return listed(bits(value))

    def _objects(self, element: Element, numa: int | None) -> None:
        """Walk the machine down to its I/O objects, remembering which single NUMA node they are local to."""
        here = self._locality(element)
        numa = here if here is not None else numa
        for child in element.all("object"):
            if child.get("type") in _IO:
                self._io(child, self._root_of(numa), numa)
            else:
                self._objects(child, numa)

    def _locality(self, element: Element) -> int | None:
        """The NUMA node of an object: itself (version 1), or its nodeset where that names one (version 2 and 3)."""
        if element.get("type") == "NUMANode":
            return whole(element, "os_index", self.name)
        text = element.get("nodeset")
        if not re.fullmatch(r"0x[0-9a-fA-F]{1,8}(,0x[0-9a-fA-F]{1,8}|,)*", text):
            return None
        value = 0
        for word in text.split(","):
            value = (value << 32) | int(word or "0", 16)
        nodes = bits(value)
        return nodes[0] if len(nodes) == 1 and nodes[0] in self.by_os else None

    def _root_of(self, numa: int | None) -> str:
        if numa is not None and numa in self.by_os:
            return self.by_os[numa]
        if len(self.by_os) == 1:
            return next(iter(self.by_os.values()))
        if "cpu" not in self.builder.nodes:
            self.builder.node("cpu", "cpu", "CPU, NUMA node not stated")
        return "cpu"

    def _io(self, element: Element, parent: str, numa: int | None) -> None:
        if element.get("type") == "OSDev":
            return
        node = parent if element.get("bridge_type").startswith("0-") else self._device(element, parent, numa)
        if element.get("gp_index"):
            self.by_gp[element.get("gp_index")] = node
        for child in element.all("object"):
            if child.get("type") == "OSDev" and child.get("gp_index"):
                self.by_gp[child.get("gp_index")] = node
            self._io(child, node, numa)

    def _device(self, element: Element, parent: str, numa: int | None) -> str:
        bus = element.get("pci_busid").lower()
        kind, label, id = self._identify(element, bus)
        facts = [self.builder.fact(a, element.get(a)) for a in ("pci_type", "pci_link_speed")]
        facts += [self.builder.fact(i.get("name"), i.get("value")) for i in self._infos(element) if _public(i)]
        id = self.builder.node(id, kind, label, parent=parent, numa=numa, busid=bus, facts=facts)
        rate = self._rate(element, id)
        how = f"{self.builder.source}: pci_link_speed with the encoding undone"
        self.builder.both(parent, id, "pcie", rate, how=how, facts=facts[1:2])
        return id

    @staticmethod
    def _infos(element: Element) -> list[Element]:
        return [i for o in element.all("object") if o.get("type") == "OSDev" for i in o.all("info")]

    def _identify(self, element: Element, bus: str) -> tuple[NodeKind, str, str]:
        """Kind, label and id by PCI class, vendor and the software devices on it."""
        match = _TYPE.match(element.get("pci_type"))
        code, vendor = (match["kind"].lower(), match["vendor"].lower()) if match else ("", "")
        backends = {i.get("value") for i in self._infos(element) if i.get("name") == "Backend"}
        names = [o.get("name") for o in element.all("object") if o.get("type") == "OSDev" and o.get("name")]
        if element.get("subtype") == "NVSwitch":
            return "nvswitch", f"NVSwitch {bus}", f"nvswitch:{bus}"
        if backends & GPU_BACKENDS or code in ("0302", "1200") or (code == "0300" and vendor in ("10de", "1002")):
            self.gpus += 1
            return "gpu", f"GPU{self.gpus - 1}", f"gpu{self.gpus - 1}"
        if code.startswith("02"):
            return "nic", ", ".join(names) or f"NIC {bus}", f"nic:{bus}"
        if code.startswith("01"):
            return "disk", ", ".join(names) or f"storage {bus}", f"disk:{bus}"
        kind = "PCIe switch" if element.get("type") == "Bridge" else "PCI device"
        return "pci", f"{kind} {bus}", f"pci:{bus}"

    def _rate(self, element: Element, id: str) -> rates.Rate:
        """hwloc tells GB/s after encoding, generation and width multiplied: the line rate is found again from it."""
        payload = number(element, "pci_link_speed", self.name)
        if not payload:
            return rates.Rate("PCIe, rate not told", None, None, None)
        fits = [
            (g, w)
            for g in rates.PCIE_GTS
            for w in (16, 12, 8, 4, 2, 1)
            if abs(rates.PCIE_GTS[g] * w / 8 * rates.encoding(g) - payload) < 0.002 * payload
        ]
        if not fits:
            said = [self.builder.fact("pci_link_speed", element.get("pci_link_speed"))]
            self.builder.doubt(id, "PCIe speed", said, "none: no generation and width give it")
            return rates.Rate("PCIe, rate unclear", None, None, None)
        if len({rates.pcie(g, w).line for g, w in fits}) == 1 and len(fits) == 1:
            return rates.pcie(*fits[0])
        widest = max(fits, key=lambda f: f[1])
        rate = rates.pcie(*widest)
        names = " or ".join(f"{g} x{w}" for g, w in fits)
        return rates.Rate(f"PCIe {names}", rate.line, rate.payload, rate.nccl)

    def _distances(self) -> None:
        for element in self.root.children:
            if element.tag in ("distances2", "distances2hetero"):
                self._matrix(element)

    def _matrix(self, element: Element) -> None:
        title = element.get("name")
        size = whole(element, "nbobjs", self.name)
        indexes = " ".join(c.text for c in element.all("indexes")).split()
        values = " ".join(c.text for c in element.all("u64values")).split()
        if size is None or len(indexes) != size or len(values) != size * size:
            have = f"{len(indexes)} indexes and {len(values)} values for {size} objects"
            raise TopologyProblem(self.name, element.line, f"matrix {title[:40]}: {have}")
        if not all(re.fullmatch(r"\d{1,19}", v) for v in values):
            raise TopologyProblem(self.name, element.line, f"matrix {title[:40]}: a value is not a number")
        nodes = [self._indexed(i, element.get("indexing")) for i in indexes]
        for i, a in enumerate(nodes):
            for j, b in enumerate(nodes):
                value = int(values[i * size + j])
                if a is None or b is None or a == b:
                    continue
                if title == "NVLinkBandwidth" and value:
                    self._nvlink(a, b, value)
                elif title == "NUMALatency" and i < j:
                    self.builder.pair(a, b, "NUMA distance", str(value))

    def _indexed(self, index: str, indexing: str) -> str | None:
        """The node an index stands for: "OSDev:802" and plain gp indexes, or NUMA os indexes."""
        bare = index.rpartition(":")[2]
        if indexing == "os":
            return self.by_os.get(int(bare)) if bare.isdigit() else None
        return self.by_gp.get(bare)

    def _nvlink(self, a: str, b: str, mbps: int) -> None:
        line = mbps / 1000
        facts = [self.builder.fact("NVLinkBandwidth", f"{mbps} MB/s")]
        self.builder.link(a, b, "nvlink", rates.Rate("NVLink", line, line, None), facts=facts)


def _public(info: Element) -> bool:
    """Serial numbers and UUIDs name one machine; they are of no use here."""
    return info.get("name") not in ("NVIDIASerial", "NVIDIAUUID", "AMDSerial", "AMDUUID")

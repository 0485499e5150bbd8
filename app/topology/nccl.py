"""NCCL's and RCCL's topology dump (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE) as a topology.

Format: `<system>` of `<cpu>` with nested `<pci>`; in them `<gpu>` with `<nvlink>`, `<xgmi>`, `<c2c>`, and `<nic>` with
`<net>`. A file meant as input has bare `<pci>` elements, whose class says what they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from costlab.app.topology import cpus, rates
from costlab.app.topology.builder import Builder
from costlab.app.topology.model import Fact, Topology, TopologyProblem
from costlab.app.topology.xmlread import Element, number, whole

GPU_CLASSES = ("0x0302", "0x0300", "0x1200")  # 3D controller, VGA, processing accelerator
NIC_CLASSES = ("0x02",)
BRIDGE_CLASSES = ("0x0604",)
SWITCH_CLASS = "0x0680"
HIDDEN = "fffffff:ff:ff.0"
NVLINK_SWITCH = "0x068000"
_PCI_FACTS = ("class", "vendor", "device", "subsystem_vendor", "subsystem_device", "link_speed", "link_width")
_GPU_FACTS = ("sm", "gcn", "arch", "rank", "gdr", "mlopart")
_NET_FACTS = ("name", "dev", "port", "speed", "latency", "guid", "maxconn", "gdr", "coll", "rail", "plane")
_KNOWN = {"cpu", "pci", "gpu", "nic", "net", "nvlink", "xgmi", "c2c", "pcilink", "numa", "nvs"}


def read_system(root: Element, name: str) -> Topology:
    """The topology of a parsed `<system>`; TopologyProblem with the line for what cannot be read."""
    reader = _Reader(root, name)
    reader.read()
    return reader.builder.topology()


class _Reader:
    def __init__(self, root: Element, name: str) -> None:
        self.root, self.name = root, name
        self.builder = Builder(f"{'RCCL' if root.get('version') == '2' else 'NCCL'} topology XML {name}")
        self.gpus: list[tuple[str, Element, str]] = []  # node id, <gpu> element, bus id
        self.hosts: list[str] = []
        self.by_bus: dict[tuple[str, str], str] = {}  # (host, bus id) -> node id
        self.peers: list[tuple[str, str, Element]] = []  # host, node id, <pcilink>

    def read(self) -> None:
        cpus_found = self.root.all("cpu")
        if not cpus_found:
            raise TopologyProblem(self.name, self.root.line, "<system> has no <cpu>")
        hashes = [c.get("host_hash") for c in cpus_found]
        self.hosts = list(dict.fromkeys(hashes))
        for element in cpus_found:
            self._cpu(element)
        for gpu, element, _ in self.gpus:
            self._gpu_links(gpu, element)
        for host, node, element in self.peers:
            self._peer(host, node, element)
        self._sockets(cpus_found)
        unknown = sorted({e.tag for e in self.root.walk() if e is not self.root} - _KNOWN)
        if unknown:
            line = next(e.line for e in self.root.walk() if e.tag == unknown[0])
            self.builder.notes.append(f"elements not understood and left out: {', '.join(unknown)} (line {line})")

    def _prefix(self, host: str) -> str:
        """ "" on one host, "host1/" and so on where the file joins several."""
        return f"host{self.hosts.index(host)}/" if len(self.hosts) > 1 else ""

    def _cpu(self, element: Element) -> None:
        host, numa = element.get("host_hash"), whole(element, "numaid", self.name)
        known = numa is not None and numa >= 0
        mask = self._affinity(element)
        text = f"NUMA {numa}" if known else "CPU, NUMA node not stated"
        facts = [self.builder.fact(a, element.get(a)) for a in ("arch", "vendor", "familyid", "modelid")]
        facts.append(self.builder.fact("cpus", mask))
        id = self.builder.node(
            f"{self._prefix(host)}numa{numa}" if known else f"{self._prefix(host)}cpu",
            "cpu", f"{text} ─ CPU {mask}" if mask else text, numa=numa if known else None, facts=facts,
        )  # fmt: skip
        if not known and numa is not None:
            said = [self.builder.fact("numaid", numa)]
            self.builder.doubt(id, "NUMA node", said, "no node: -1 says that the system does not tell")
        self._children(element, id, host, numa if known else None)

    def _affinity(self, element: Element) -> str:
        text = element.get("affinity")
        if not text:
            return ""
        try:
            return cpus.listed(cpus.from_words(text))
        except ValueError as error:
            raise TopologyProblem(self.name, element.line, f'<cpu affinity="{text[:40]}">: {error}') from error

    def _children(self, element: Element, parent: str, host: str, numa: int | None) -> None:
        for child in element.children:
            if child.tag == "pci":
                self._pci(child, parent, host, numa)
            elif child.tag == "nic":
                self._nets(child, parent, host, numa, at=None)

    def _pci(self, element: Element, parent: str, host: str, numa: int | None) -> None:
        bus = element.get("busid").lower()
        if not bus:
            raise TopologyProblem(self.name, element.line, "<pci> without busid")
        kind = element.get("class").lower()
        gpus, nics = element.all("gpu"), element.all("nic")
        if gpus or (kind.startswith(GPU_CLASSES) and not element.all("pci")):
            bare: list[Element | None] = [None]
            ids = [self._gpu(element, g, parent, host, numa) for g in gpus or bare]
        elif nics or kind.startswith(NIC_CLASSES):
            ids = [self._nic(element, nics, parent, host, numa)]
        elif kind.startswith(SWITCH_CLASS) and element.get("vendor") == "0x10de":
            ids = [self._plain(element, "nvswitch", f"NVSwitch {bus}", parent, host, numa)]
        else:
            ids = [self._plain(element, "pci", f"PCIe switch {bus}", parent, host, numa)]
        for id in ids:
            self._uplink(element, id, parent)
        self.by_bus.setdefault((host, bus), ids[0])
        for child in element.all("pci"):
            self._pci(child, ids[0], host, numa)
        self.peers += [(host, ids[0], p) for p in element.all("pcilink")]

    def _facts(self, element: Element | None, names: Sequence[str]) -> list[Fact]:
        return [self.builder.fact(a, element.get(a)) for a in names] if element is not None else []

    def _plain(self, element: Element, kind: str, label: str, parent: str, host: str, numa: int | None) -> str:
        bus = element.get("busid").lower()
        return self.builder.node(
            f"{self._prefix(host)}{kind}:{bus}", kind, label, parent=parent, numa=numa, busid=bus,  # type: ignore[arg-type]
            facts=self._facts(element, _PCI_FACTS),
        )  # fmt: skip

    def _gpu(self, element: Element, gpu: Element | None, parent: str, host: str, numa: int | None) -> str:
        dev = whole(gpu, "dev", self.name) if gpu is not None else None
        index = len(self.gpus) if dev is None else dev
        bus = element.get("busid").lower()
        facts = [*self._facts(element, _PCI_FACTS), *self._facts(gpu, _GPU_FACTS)]
        id = self.builder.node(
            f"{self._prefix(host)}gpu{index}", "gpu", f"{self._prefix(host)}GPU{index}",
            parent=parent, numa=numa, busid=bus, facts=facts,
        )  # fmt: skip
        self.gpus.append((id, gpu if gpu is not None else Element("gpu", {}, element.line), bus))
        return id

    def _nic(self, element: Element, nics: list[Element], parent: str, host: str, numa: int | None) -> str:
        bus = element.get("busid").lower()
        names = list(dict.fromkeys(net.get("name") for nic in nics for net in nic.all("net") if net.get("name")))
        id = self.builder.node(
            f"{self._prefix(host)}nic:{bus}", "nic", ", ".join(names) or f"NIC {bus}",
            parent=parent, numa=numa, busid=bus, facts=self._facts(element, _PCI_FACTS),
        )  # fmt: skip
        for nic in nics:
            self._nets(nic, parent, host, numa, at=id)
        return id

    def _nets(self, nic: Element, parent: str, host: str, numa: int | None, at: str | None) -> None:
        """The ports of a NIC; a NIC outside the PCIe tree (virtual) gets a node of its own for each."""
        for net in nic.all("net"):
            label = net.get("name") or f"net{net.get('dev')}"
            id = at or self.builder.node(f"{self._prefix(host)}nic:{label}", "nic", label, parent=parent, numa=numa)
            if at is None:
                self.builder.both(parent, id, "pcie", rates.Rate("not in the PCIe tree", None, None, None))
            speed = number(net, "speed", self.name)
            rate = rates.network(speed)
            if speed is not None and rate.line is None:
                said = [self.builder.fact("speed", f"{net.get('speed')} Mbit/s")]
                self.builder.doubt(id, "network speed", said, "none: no port is that fast")
            self.builder.both(id, self.builder.network(), "network", rate, facts=self._facts(net, _NET_FACTS))

    def _uplink(self, element: Element, id: str, parent: str) -> None:
        speed, width = element.get("link_speed"), whole(element, "link_width", self.name)
        generation = rates.pcie_generation(speed)
        assumed = 16 if width == 0 else width
        how = self.builder.source
        if width == 0 and generation is not None:
            said = [self.builder.fact("link_width", 0)]
            self.builder.doubt(id, "PCIe width", said, "x16, as NCCL does")
            how = f"{how}; width 0 taken as x16, as NCCL does"
        if generation is None and speed:
            said = [self.builder.fact("link_speed", speed)]
            self.builder.doubt(id, "PCIe speed", said, "none; NCCL would take Gen3")
        if generation == 1 and self.builder.nodes[id].kind == "gpu":
            said = [self.builder.fact("link_speed", speed)]
            self.builder.doubt(id, "PCIe speed", said, "as it is, though an idle GPU lowers its generation to 1")
        facts = self._facts(element, ("link_speed", "link_width"))
        self.builder.both(parent, id, "pcie", rates.pcie(generation, assumed), how=how, facts=facts)

    def _gpu_links(self, gpu: str, element: Element) -> None:
        sm = whole(element, "sm", self.name)
        gcn = element.get("gcn")
        for link in element.children:
            count = whole(link, "count", self.name)
            if link.tag == "nvlink":
                how = f"{self.builder.source}; rate of a link from sm {sm}"
                self._fabric(gpu, link, "nvlink", rates.nvlink(sm, count), how)
            elif link.tag == "xgmi":
                how = f"{self.builder.source}; rate of a link from {gcn or 'no gcn'}"
                self._fabric(gpu, link, "xgmi", rates.xgmi(gcn, count), how)
            elif link.tag == "c2c":
                self._c2c(gpu, link, count)

    def _fabric(self, gpu: str, link: Element, kind: str, rate: rates.Rate, how: str) -> None:
        target = link.get("target").lower()
        facts = self._facts(link, ("target", "count", "tclass"))
        host = self._host_of(gpu)
        other = self.by_bus.get((host, target))
        if other == gpu:
            self.builder.doubt(gpu, f"{kind} target", facts, "left out: the link's other end is the GPU itself")
            return
        if other is None:
            other = self._beyond(target, link.get("tclass"), host)
        if other is None:
            self.builder.doubt(gpu, f"{kind} target", facts, "left out: no device of the file has this bus id")
            return
        self.builder.link(gpu, other, kind, rate, how=how, facts=facts)  # type: ignore[arg-type]
        if self.builder.nodes[other].kind != "gpu":  # a GPU lists its own end; switches and CPUs list nothing
            self.builder.link(other, gpu, kind, rate, how=how, facts=facts)  # type: ignore[arg-type]

    def _beyond(self, target: str, tclass: str, host: str) -> str | None:
        """The node of an NVSwitch that is in no `<pci>` of the file: hidden ones are one node, as NCCL has it."""
        if target != HIDDEN and not tclass.startswith(NVLINK_SWITCH[:6]):
            return None
        hidden = target == HIDDEN
        id = f"{self._prefix(host)}nvswitch{'' if hidden else f':{target}'}"
        if id not in self.builder.nodes:
            label = "NVSwitch (not visible)" if hidden else f"NVSwitch {target}"
            self.builder.node(id, "nvswitch", label, visible=not hidden, busid="" if hidden else target)
            if hidden:
                said = [self.builder.fact("nvlink target", target)]
                self.builder.doubt(id, "NVSwitch", said, "one switch of unknown make; how many there are is not told")
        return id

    def _c2c(self, gpu: str, link: Element, count: int | None) -> None:
        bw = number(link, "bw", self.name)
        line = bw * count / 1000 if bw and count else None
        cpu = self.builder.nodes[gpu].parent
        while cpu and self.builder.nodes[cpu].kind != "cpu":
            cpu = self.builder.nodes[cpu].parent
        rate = rates.Rate(f"NVLink-C2C{f' x{count}' if count else ''}", line, line, line)
        self.builder.both(gpu, cpu, "c2c", rate, facts=self._facts(link, ("bw", "count")))

    def _peer(self, host: str, node: str, element: Element) -> None:
        other = self.by_bus.get((host, element.get("target").lower()))
        if other is None or other == node:
            facts = self._facts(element, ("target",))
            self.builder.doubt(node, "pcilink target", facts, "left out: no other device of the file has this bus id")
        elif not any({x.src, x.dst} == {node, other} for x in self.builder.links):
            self.builder.both(node, other, "pcie", rates.Rate("PCIe switch to switch", None, None, None))

    def _host_of(self, id: str) -> str:
        prefix, slash, _ = id.partition("/")
        return self.hosts[int(prefix.removeprefix("host"))] if slash else self.hosts[0]

    def _sockets(self, found: list[Element]) -> None:
        first = found[0]
        family, model = whole(first, "familyid", self.name), whole(first, "modelid", self.name)
        constant = rates.socket_link(first.get("arch"), first.get("vendor"), family, model)
        if len(self.hosts) == 1:
            self.builder.interconnect(constant)
        else:
            self.builder.notes.append(
                f"the file joins {len(self.hosts)} hosts; links between their sockets are left out"
            )

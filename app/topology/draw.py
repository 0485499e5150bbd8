"""The topology as a drawing of Unicode lines and as the matrix that `topo -m` users know.

Links of one kind and rate share a letter, explained by the weight table; a hot link has `!` and its share behind it, so
nothing is told by colour alone. Chains of bridges fold into the link, alike NVSwitches into one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costlab.app.text import plain
from costlab.app.topology.graph import children, path_class
from costlab.app.topology.model import Link, Node, Topology

HOT = 0.5  # share of its ceiling from which a link is marked
MATRIX = 32  # devices beyond which a matrix is of no use to the eye
Key = tuple[str, str]  # src, dst


@dataclass(frozen=True)
class LinkClass:
    """All links of one kind, label and bandwidth: one letter of the drawing, one line of the table."""

    letter: str
    link: Link  # the slowest of them by measured bandwidth, else the first
    count: int  # undirected
    alike: list[Link]


def classes(topology: Topology) -> list[LinkClass]:
    """The link classes in the order of their letters: fabric first, then PCIe, the rest behind."""
    order = ("nvlink", "xgmi", "c2c", "pcie", "network", "numa", "memory", "disk", "loopback", "ring", "tree")
    groups: dict[tuple[object, ...], list[Link]] = {}
    for link in topology.links:
        groups.setdefault((order.index(link.kind), link.label, link.nominal_gbps), []).append(link)
    found = []
    for n, key in enumerate(sorted(groups, key=lambda k: (k[0], -_rate(k[2]), str(k[1])))):
        alike = groups[key]
        slowest = min(alike, key=lambda x: float("inf") if x.measured_gbps is None else x.measured_gbps)
        ends = {frozenset((x.src, x.dst)) for x in alike}
        found.append(LinkClass(letter(n), slowest, len(ends), alike))
    return found


def _rate(value: object) -> float:
    return value if isinstance(value, float) else 0.0


def letter(index: int) -> str:
    """A ... Z, then AA ..."""
    return chr(65 + index) if index < 26 else letter(index // 26 - 1) + letter(index % 26)


def drawing(topology: Topology, width: int = 80, use: Mapping[Key, float] | None = None) -> list[str]:
    """The tree of each NUMA node with its devices, the fabric at its right; `use` is a link's share of its ceiling."""
    return _Drawing(topology, width, use or {}).lines()


class _Drawing:
    def __init__(self, topology: Topology, width: int, use: Mapping[Key, float]) -> None:
        self.topology, self.width, self.use = topology, width, use
        self.letters = {id(x): c.letter for c in classes(topology) for x in c.alike}
        self.by_ends = {(x.src, x.dst): x for x in topology.links}
        self.rows: list[tuple[str, str]] = []  # text, id of the GPU that ends it
        self.switches = topology.of_kind("nvswitch")

    def lines(self) -> list[str]:
        roots = [n for n in self.topology.nodes if not n.parent and n.kind not in ("network", "nvswitch")]
        roots.sort(key=lambda n: (n.numa is None, n.numa or 0))  # stable: nodes without a number stay in order
        for root in roots:
            self.rows.append((plain(root.label), root.id if root.kind == "gpu" else ""))
            self._below(root, "  ")
        texts = self._with_fabric()
        return [t if len(t) <= self.width else t[: self.width - 1] + "…" for t in texts]

    def _below(self, node: Node, indent: str) -> None:
        found = [n for n in children(self.topology, node.id) if self._worth(n)]
        folded = self._folded(found)
        for n, group in enumerate(folded):
            last = n == len(folded) - 1
            self._line(node, group, indent, last)

    def _worth(self, node: Node) -> bool:
        """Bridges with nothing of interest below are not drawn."""
        return node.kind != "pci" or any(self._worth(c) for c in children(self.topology, node.id))

    def _line(self, parent: Node, group: list[Node], indent: str, last: bool) -> None:
        node, link, through = self._end(parent, group[0])
        label = plain(node.label, 40)
        if len(group) > 1:
            label = f"{len(group)} x NVSwitch"
        if node.kind == "nic":
            label += self._port(node)
        bridges = f" (through {through} bridge{'s' if through > 1 else ''})" if through else ""
        head = f"{indent}{'└' if last else '├'}─{self._mark(link)}─ {label}{bridges}"
        self.rows.append((head, node.id if node.kind == "gpu" else ""))
        if node.kind == "pci":
            self._below(node, indent + ("    " if last else "│   "))

    def _end(self, parent: Node, node: Node) -> tuple[Node, Link | None, int]:
        """What hangs on `parent` when bridges with one device below are passed through, the limiting link, bridges."""
        link, through = self.by_ends.get((parent.id, node.id)), 0
        while node.kind == "pci":
            only = [c for c in children(self.topology, node.id) if self._worth(c)]
            if len(only) != 1:
                break
            link, node, through = self._slower(link, self.by_ends.get((node.id, only[0].id))), only[0], through + 1
        return node, link, through

    def _folded(self, nodes: list[Node]) -> list[list[Node]]:
        """NVSwitches that are siblings, or behind sibling bridges, become one line."""
        groups: list[list[Node]] = []
        before = ""
        for node in nodes:
            kind = self._end(node, node)[0].kind
            if kind == before == "nvswitch":
                groups[-1].append(node)
            else:
                groups.append([node])
            before = kind
        return groups

    @staticmethod
    def _slower(a: Link | None, b: Link | None) -> Link | None:
        """Of two links in a row the one that limits; a measured or known one before an unknown."""
        if a is None or b is None:
            return a or b
        return min((a, b), key=lambda x: (x.capacity is None, x.capacity or 0.0))

    def _mark(self, link: Link | None) -> str:
        if link is None:
            return "─"
        share = max((self.use.get(k, 0.0) for k in ((link.src, link.dst), (link.dst, link.src))), default=0.0)
        return self.letters[id(link)] + (f"!{round(100 * share)}%" if share >= HOT else "")

    def _port(self, node: Node) -> str:
        link = self.by_ends.get((node.id, "network"))
        return f" ─{self._mark(link)}─ network" if link is not None else ""

    def _with_fabric(self) -> list[str]:
        """Text rows with a rail for GPUs on one hidden or common switch, or each GPU's peers where they are direct."""
        texts = [text for text, _ in self.rows]
        for switches in self._islands():
            rows = [i for i, (_, id) in enumerate(self.rows) if any((id, s.id) in self.by_ends for s in switches)]
            if rows:
                self._rail(texts, rows, switches)
        for i, (_, gpu) in enumerate(self.rows):
            peers = self._peers(gpu) if gpu else ""
            if peers:
                texts[i] = f"{texts[i]}  {peers}"
        return texts

    def _islands(self) -> list[list[Node]]:
        """NVSwitches that share a GPU or a link, transitively; boards that are not joined stay apart."""
        islands: list[tuple[set[str], list[Node]]] = []
        for switch in self.switches:
            near = {switch.id} | {src for src, dst in self.by_ends if dst == switch.id and not src.startswith("pci:")}
            merged, kept = ({*near}, [switch]), []
            for ids, members in islands:
                if ids & near:
                    merged = (merged[0] | ids, [*members, *merged[1]])
                else:
                    kept.append((ids, members))
            islands = [*kept, merged]
        return [members for _, members in islands]

    def _rail(self, texts: list[str], rows: list[int], switches: list[Node]) -> None:
        first, last = rows[0], rows[-1]
        column = max(len(t) for t in texts[first : last + 1]) + 1
        marks: list[tuple[int, str, str]] = []
        for i in range(first, last + 1):
            gpu = self.rows[i][1]
            if i in rows:
                links = [self.by_ends[(gpu, s.id)] for s in switches if (gpu, s.id) in self.by_ends]
                end = "═" if len(rows) == 1 else "╗" if i == first else "╝" if i == last else "╣"
                several = f"{len(links)}x" if len(links) > 1 else ""
                marks.append((i, f"═{several}{self._mark(links[0])}═", end))
            else:
                marks.append((i, "", "║"))
        wide = max(len(mark) for _, mark, _ in marks)
        for i, mark, end in marks:
            texts[i] = f"{texts[i]} ".ljust(column, "═" if mark else " ") + f"{mark or ' ' * wide:═<{wide}}{end}"
        texts[last] += f" {self._switch_name(switches)}"

    @staticmethod
    def _switch_name(switches: list[Node]) -> str:
        seen = [s for s in switches if s.visible]
        if not seen:
            return plain(switches[0].label, 40)
        return f"{len(seen)} x NVSwitch" if len(seen) > 1 else plain(seen[0].label, 40)

    def _peers(self, gpu: str) -> str:
        """ "A: GPU1 GPU2", the GPUs that a direct link leads to, by letter."""
        by_letter: dict[str, list[str]] = {}
        for (src, dst), link in self.by_ends.items():
            node = self.topology.node(dst)
            if src == gpu and node is not None and node.kind == "gpu" and dst != src:
                by_letter.setdefault(self._mark(link), []).append(plain(node.label, 12))
        return "  ".join(f"═{mark}═ {_few(names)}" for mark, names in sorted(by_letter.items()))


def _few(names: list[str]) -> str:
    """ "GPU1 GPU2", or "GPU1-7" for a run of three and more."""
    numbers = [int(n[3:]) for n in names if n.startswith("GPU") and n[3:].isdigit()]
    if len(numbers) != len(names):
        return " ".join(names)
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return " ".join(f"GPU{r[0]}-{r[-1]}" if len(r) > 2 else " ".join(f"GPU{n}" for n in r) for r in runs)


@dataclass(frozen=True)
class Matrix:
    """Path classes of all pairs: `cells[row][column]`, with the NUMA node of each device."""

    names: list[str]
    cells: list[list[str]]
    numa: list[str]


def matrix(topology: Topology) -> Matrix | None:
    """GPUs and NICs against each other; None where there are fewer than two or too many."""
    nodes = topology.of_kind("gpu", "nic")
    if not 2 <= len(nodes) <= MATRIX:
        return None
    cells = [["X" if a is b else path_class(topology, a.id, b.id) or "?" for b in nodes] for a in nodes]
    numa = ["?" if n.numa is None else str(n.numa) for n in nodes]
    return Matrix([plain(n.label, 12) for n in nodes], cells, numa)

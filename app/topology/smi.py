"""`nvidia-smi topo -m` and `topo -p2p` as copied from a terminal: escape codes, tabs or blanks, short rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from costlab.app.topology import rates
from costlab.app.topology.builder import Builder
from costlab.app.topology.model import Topology, TopologyProblem

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Za-z0-9]|\x1b.|\x0f|\x0e")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|(?:mlx|bnxt|irdma|efa|rdma|hfi|qedr|roce|ib)[\w.-]*", re.IGNORECASE)
_LEGEND_NIC = re.compile(r"\s*(NIC\d+)\s*[:=]\s*(\S+)\s*$")
_PATH = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|C2C|N/A", re.IGNORECASE)
_STATUS = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U|N/A", re.IGNORECASE)
LEVELS = ("PIX", "PXB", "PHB", "NODE")  # nearest first: what two devices have in common
_STATUS_MEANS = {
    "OK": "works", "CNS": "chipset does not support it", "GNS": "GPU does not support it",
    "DR": "disabled by a setting", "TNS": "topology does not support it", "NS": "not supported", "U": "unknown",
}  # fmt: skip


@dataclass
class _Row:
    name: str
    cells: list[str]
    rest: list[str]  # affinity columns
    line: int


@dataclass
class _Matrix:
    name: str
    columns: list[str]
    extra: list[str]  # titles of the affinity columns
    line: int
    rows: list[_Row] = field(default_factory=list)
    nics: dict[str, str] = field(default_factory=dict)

    def value(self, a: str, b: str) -> str:
        """The cell of row `a` and column `b`, else of row `b` and column `a`, "" where both are missing."""
        for first, second in ((a, b), (b, a)):
            row = next((r for r in self.rows if r.name == first), None)
            if row is not None and second in self.columns:
                at = self.columns.index(second)
                if at < len(row.cells):
                    return row.cells[at].upper()
        return ""


def looks_like(text: str) -> bool:
    """Whether a text has the header of a topo matrix."""
    return any(_header(line) for line in _ESCAPE.sub("", text).splitlines()[:400])


def read_smi(text: str, name: str) -> Topology:
    """A `topo -m` or `topo -p2p` matrix; TopologyProblem with the line for a text that is neither."""
    matrix = _parse(_ESCAPE.sub("", text), name)
    cells = {c.upper() for r in matrix.rows for c in r.cells} - {"X", "N/A"}
    if cells and all(_STATUS.fullmatch(c) for c in cells):
        return _p2p(matrix, text)
    return _topo(matrix)


def _header(line: str) -> tuple[list[str], list[str]] | None:
    """(devices, affinity titles) of a header line: devices only, the first of them a GPU, before any cell."""
    titles = re.findall(r"(?:CPU|NUMA|GPU NUMA|Memory) (?:Affinity|ID)", line)
    body = re.split(r"(?:GPU NUMA ID|CPU Affinity|NUMA Affinity|Memory Affinity)", line)[0]
    names = body.split()
    if not names or not re.fullmatch(r"GPU\d+", names[0]) or any(_cell(n) for n in names):
        return None
    return names, titles


def _cell(text: str) -> bool:
    return bool(_PATH.fullmatch(text) or _STATUS.fullmatch(text))


def _parse(text: str, name: str) -> _Matrix:
    matrix: _Matrix | None = None
    for number, line in enumerate(text.splitlines(), 1):
        found = _header(line)
        if matrix is None:
            if found and (len(found[0]) > 1 or found[1]):
                matrix = _Matrix(name, found[0], found[1], number)
            continue
        legend = _LEGEND_NIC.fullmatch(line)
        if legend:
            matrix.nics[legend[1]] = legend[2]
        elif line.split() and line.split()[0] in matrix.columns:
            matrix.rows.append(_row(matrix, line, number))
        elif found:
            break  # a second matrix (several commands in one paste): the first one counts
    if matrix is None:
        raise TopologyProblem(name, 1, "no header line with GPU0 ...: neither `nvidia-smi topo -m` nor `-p2p`")
    missing = [c for c in matrix.columns if c.startswith("GPU") and c not in {r.name for r in matrix.rows}]
    if missing:
        raise TopologyProblem(name, matrix.line, f"the header names {', '.join(missing)}, but there is no such row")
    return matrix


def _row(matrix: _Matrix, line: str, number: int) -> _Row:
    first, *words = line.split()
    if any(r.name == first for r in matrix.rows):
        raise TopologyProblem(matrix.name, number, f"a second row for {first}")
    cells = words[: len(matrix.columns)]
    if not matrix.extra and len(words) > len(cells):
        raise TopologyProblem(matrix.name, number, f"{len(words)} cells in a row under {len(cells)} columns")
    for cell in cells:
        if not _cell(cell):
            raise TopologyProblem(matrix.name, number, f"'{cell[:20]}' is not a path or status of the legend")
    if "\t" in line:
        rest = [c.strip() for c in line.rstrip("\n").split("\t")][1 + len(matrix.columns) :]
    else:
        rest = words[len(matrix.columns) :]
    return _Row(first, cells, rest, number)


def _affinity(matrix: _Matrix, row: _Row, title: str) -> str:
    if title not in matrix.extra:
        return ""
    rest = [c for c in row.rest if c] if len(row.rest) > len(matrix.extra) else row.rest
    at = matrix.extra.index(title)
    value = rest[at] if at < len(rest) else ""
    return "" if value.upper() == "N/A" else value


def _numa(matrix: _Matrix, row: _Row, builder: Builder, id: str) -> int | None:
    text = _affinity(matrix, row, "NUMA Affinity")
    if re.fullmatch(r"\d+", text):
        return int(text)
    if text:
        said = [builder.fact("NUMA Affinity", text)]
        builder.doubt(id, "NUMA node", said, "no node: the text names not exactly one")
    return None


def _topo(matrix: _Matrix) -> Topology:
    builder = Builder(f"nvidia-smi topo -m ({matrix.name})")
    ids = {c: _id(c) for c in matrix.columns}
    rows = {r.name: r for r in matrix.rows}
    numa: dict[str, int | None] = {}
    for column, id in ids.items():
        row = rows.get(column)
        gpu = column.startswith("GPU")
        numa[column] = _numa(matrix, row, builder, id) if row and gpu else None
        cpu_list = _affinity(matrix, row, "CPU Affinity") if row else ""
        label = column if gpu else matrix.nics.get(column, column)
        builder.node(id, "gpu" if gpu else "nic", label, numa=numa[column], facts=[builder.fact("cpus", cpu_list)])
    _nic_nodes(matrix, ids, numa, builder)
    _record(matrix, ids, builder)
    _tree(matrix, ids, numa, rows, builder)
    _nvlinks(matrix, ids, builder)
    for id in ids.values():
        if builder.nodes[id].kind == "nic":
            builder.both(id, builder.network(), "network", rates.network(None))
    return builder.topology()


def _id(column: str) -> str:
    return column.lower() if column.startswith("GPU") else f"nic:{column}"


def _record(matrix: _Matrix, ids: dict[str, str], builder: Builder) -> None:
    """Every cell as it stands; two cells of a pair that differ are a doubt."""
    rows = {r.name: r for r in matrix.rows}
    for i, a in enumerate(matrix.columns):
        for b in matrix.columns[i + 1 :]:
            said = [
                builder.fact(f"{x}, {y}", rows[x].cells[matrix.columns.index(y)])
                for x, y in ((a, b), (b, a))
                if x in rows and matrix.columns.index(y) < len(rows[x].cells)
            ]
            if said:
                builder.pair(ids[a], ids[b], "path", matrix.value(a, b))
            if len({f.value.upper() for f in said}) > 1:
                builder.doubt(ids[a], f"path to {ids[b]}", said, f"{matrix.value(a, b)}, the upper half of the matrix")


def _nic_nodes(matrix: _Matrix, ids: dict[str, str], numa: dict[str, int | None], builder: Builder) -> None:
    """A NIC's NUMA node is that of the GPUs it reaches without leaving the node, where they agree."""
    for nic in (c for c in matrix.columns if not c.startswith("GPU")):
        near = {numa[g] for g in matrix.columns if g.startswith("GPU") and matrix.value(nic, g) in LEVELS} - {None}
        if len(near) == 1:
            numa[nic] = near.pop()
            builder.change(ids[nic], numa=numa[nic], numa_source=f"{builder.source}: shares a path with a GPU there")


def _tree(
    matrix: _Matrix, ids: dict[str, str], numa: dict[str, int | None], rows: dict[str, _Row], builder: Builder
) -> None:
    """Hangs devices on what the path classes say they share; the links' rates are not in this text."""
    tops: dict[str, list[str]] = {id: [column] for column, id in ids.items()}
    names = {"PIX": "PCIe switch", "PXB": "PCIe switches"}
    for level, label in names.items():
        for group in _groups(matrix, tops, level):
            if len(group) > 1:
                members = [c for top in group for c in tops[top]]
                places = {numa[c] for c in members} - {None}
                node = builder.node(
                    f"pci:{level.lower()}{sum(n.kind == 'pci' for n in builder.nodes.values())}", "pci",
                    f"{label} (inferred from {level})", numa=places.pop() if len(places) == 1 else None,
                )  # fmt: skip
                for top in group:
                    _hang(builder, top, node)
                    del tops[top]
                tops[node] = members
    for top, members in tops.items():
        places = {numa[c] for c in members} - {None}
        _hang(builder, top, _cpu(builder, places.pop() if len(places) == 1 else None, matrix, rows, members))
    builder.interconnect(None)


def _groups(matrix: _Matrix, tops: dict[str, list[str]], level: str) -> list[list[str]]:
    """Tops of which some members are joined by `level`, transitively."""
    groups: list[list[str]] = []
    for top, members in tops.items():
        near = [g for g in groups if any(matrix.value(a, b) == level for o in g for a in tops[o] for b in members)]
        groups = [g for g in groups if g not in near] + [[*(o for g in near for o in g), top]]
    return groups


def _hang(builder: Builder, id: str, parent: str) -> None:
    builder.change(id, parent=parent)
    builder.both(parent, id, "pcie", rates.Rate("PCIe, rate not in this text", None, None, None))


def _cpu(builder: Builder, numa: int | None, matrix: _Matrix, rows: dict[str, _Row], members: list[str]) -> str:
    id = "cpu" if numa is None else f"numa{numa}"
    if id not in builder.nodes:
        lists = [_affinity(matrix, rows[m], "CPU Affinity") for m in members if m in rows and m.startswith("GPU")]
        named = next((x for x in lists if x), "")
        text = "CPU, NUMA node not stated" if numa is None else f"NUMA {numa}"
        builder.node(id, "cpu", f"{text} ─ CPU {named}" if named and numa is not None else text, numa=numa)
    return id


def _nvlinks(matrix: _Matrix, ids: dict[str, str], builder: Builder) -> None:
    """NV#: a bonded set of # links; where every GPU reaches every other with all its links, there is a switch."""
    gpus = [c for c in matrix.columns if c.startswith("GPU")]
    found = {(a, b): matrix.value(a, b) for a in gpus for b in gpus if a != b}
    counts = {pair: int(v[2:]) for pair, v in found.items() if re.fullmatch(r"NV\d+", v)}
    together = sum(n for (a, _), n in counts.items() if a == gpus[0])
    if counts and len(set(counts.values())) == 1 and len(counts) == len(found) and together > 18:
        each = next(iter(counts.values()))
        switch = builder.node("nvswitch", "nvswitch", "NVSwitch (not visible)", visible=False)
        said = [builder.fact("path", f"NV{each} between all GPUs")]
        builder.doubt(switch, "NVSwitch", said, f"{each} links to each of {len(gpus) - 1} GPUs at once need a switch")
        for gpu in gpus:
            builder.both(ids[gpu], switch, "nvlink", rates.nvlink(None, each))
    else:
        for (a, b), count in counts.items():
            builder.link(ids[a], ids[b], "nvlink", rates.nvlink(None, count))


def _p2p(matrix: _Matrix, text: str) -> Topology:
    builder = Builder(f"nvidia-smi topo -p2p ({matrix.name})")
    match = re.search(r"P2P\s+(Read|Write|NVLINK|Atomics|PCI)|topo\s+-p2p\s+([rwnap])\b", text, re.IGNORECASE)
    words = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pci"}
    kind = (match[1] or words.get((match[2] or "").lower(), "")).lower() if match else ""
    for column in matrix.columns:
        builder.node(_id(column), "gpu", column)
    for i, a in enumerate(matrix.columns):
        for b in matrix.columns[i + 1 :]:
            value = matrix.value(a, b)
            if value:
                meaning = _STATUS_MEANS.get(value, "")
                text_ = f"{value} ({meaning})" if meaning else value
                builder.pair(_id(a), _id(b), f"p2p {kind}".strip(), text_)
    builder.notes.append("peer-to-peer status only: this text says nothing of links and NUMA nodes")
    return builder.topology()

"""A topology as text, Markdown or JSON: drawing, weight table, matrix, what was measured, what is in doubt."""

from __future__ import annotations

import msgspec

from costlab.app.figures import MISSING, number, share, size
from costlab.app.report.document import Cell, Document, Log, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.app.topology.draw import LinkClass, classes, drawing, matrix
from costlab.app.topology.graph import bisection
from costlab.app.topology.model import UNIT_GBPS, Doubt, Measure, Topology
from costlab.app.topology.rates import SEED, SeedWeight, infiniband_name

WEIGHT_NOTE = (
    "GB/s = 1e9 bytes a second, one direction. Line: raw line rate. Efficiency = measured / line. Weight = measured "
    f"(m), else line (n), over {UNIT_GBPS:g} GB/s, the line rate of PCIe Gen5 x16. NCCL: the constant its search takes."
)

MATRIX_NOTE = (
    "X self, NV/XG direct links and how many, PIX one PCIe switch, PXB several, PHB the CPU's PCIe root, NODE the NUMA "
    "node, SYS between NUMA nodes, NET the network, ? not known."
)


def render_topology_json(topology: Topology) -> bytes:
    """UTF-8 JSON, indented: `nodes`, `links` and what else `Topology` has."""
    return msgspec.json.format(msgspec.json.encode(topology), indent=2) + b"\n"


def render_topology_markdown(topology: Topology) -> str:
    """The whole topology as Markdown."""
    return to_markdown(topology_document(topology, 100))


def render_topology_text(topology: Topology, width: int = 80) -> str:
    """The topology for a terminal of `width` columns."""
    return to_text(topology_document(topology, width), width)


def topology_document(topology: Topology, width: int) -> Document:
    """All sections; those without content are left out."""
    doc = Document()
    doc.heading(f"Topology: {topology.source}", 1)
    _lines(doc, drawing(topology, width - 2))
    _weights(doc, topology)
    _measured(doc, topology)
    _matrix(doc, topology)
    _limits(doc, topology)
    _schedules(doc, topology)
    _doubts(doc, topology)
    doc.items([[sentence(note)] for note in topology.notes])
    return doc


def _lines(doc: Document, lines: list[str]) -> None:
    doc.blocks.append(Log(lines))


def _weights(doc: Document, topology: Topology) -> None:
    found = classes(topology)
    headers = ["", "link", "n", "line", "measured", "eff.", "weight", "latency", "NCCL", "seed's weight"]
    doc.table(headers, [weight_row(c) for c in found], right=(2, 3, 4, 5, 6, 7, 8, 9), wide=1, drop=(8, 2))
    if found:
        doc.say(WEIGHT_NOTE)
    seeds = {name: s for name, s in SEED.items() if any(_seed_name(c) == name for c in found)}
    doc.items(
        [[f"The seed's weight of {name}, {s.weight:g}, for reference only: {s.error}."] for name, s in seeds.items()]
    )


def weight_row(c: LinkClass) -> list[Cell]:
    """One line of the weight table."""
    x = c.link
    seed = seed_of(c)
    weight = f"{number(x.weight)} {x.weight_from[:1]}" if x.weight is not None else MISSING
    return [
        c.letter, link_name(c), str(c.count), number(x.nominal_gbps), number(x.measured_gbps),
        MISSING if x.efficiency is None else f"{x.efficiency:.2f}", weight, latency(x.latency_ns),
        number(x.nccl_gbps), f"{seed.weight:g}" if seed else MISSING,
    ]  # fmt: skip


def link_name(c: LinkClass) -> str:
    """The label, with the kind where the label lacks it."""
    named = c.link.kind != "network" or c.link.label.startswith("network")
    return c.link.label if named else f"network, {c.link.label}"


def seed_of(c: LinkClass) -> SeedWeight | None:
    """The seed's line for a link class, None where it has none."""
    return SEED.get(_seed_name(c))


def _seed_name(c: LinkClass) -> str:
    mbps = (c.link.nominal_gbps or 0) * 8000
    if c.link.kind == "network" and infiniband_name(mbps) == "EDR":
        return "EDR"
    return next((name for name in SEED if c.link.label == name or c.link.label.startswith(f"{name} ")), "")


def latency(ns: float | None) -> str:
    """A latency: ns below a microsecond, else us."""
    if ns is None:
        return MISSING
    return f"{number(ns)} ns" if ns < 1000 else f"{number(ns / 1000)} us"


def _measured(doc: Document, topology: Topology) -> None:
    rows: list[list[Cell]] = []
    for c in classes(topology):
        for link in c.alike:
            rows += [[c.letter, f"{link.src} → {link.dst}", *measure_cells(m)] for m in link.measures]
    if not rows:
        return
    doc.heading("Measured")
    headers = ["", "link", "what", "way", "GB/s", "at", "fit GB/s", "alpha", "residual"]
    doc.table(headers, rows, right=(4, 5, 6, 7, 8), wide=2, drop=(0,))
    doc.say(
        "GB/s: bytes / median time at the largest size. Fit: time = alpha + bytes / bandwidth over all sizes; residual "
        "is the root mean square of its relative errors, and a large one says that bandwidth depends on the size."
    )
    meanings = {(m.what, m.direction): m.alpha_is for link in topology.links for m in link.measures}
    doc.items([[f"alpha of {what}, {way}: {text}"] for (what, way), text in meanings.items()])


def measure_cells(m: Measure) -> list[str]:
    """What, way, bandwidth, size, fit, alpha, residual of a measure."""
    what = f"{m.what}, {m.where}" if m.where else m.what
    return [what, m.direction, number(m.largest_gbps), size(m.largest_bytes), number(m.gbps), latency(m.alpha_ns),
            share(m.residual)]  # fmt: skip


def _matrix(doc: Document, topology: Topology) -> None:
    table = matrix(topology)
    if table is None:
        return
    doc.heading("Paths")
    wide = max(len(n) for n in table.names)
    cell = max(wide, *(len(c) for row in table.cells for c in row))
    lines = [" " * wide + "  " + " ".join(f"{n:>{cell}}" for n in table.names) + "  NUMA"]
    for name, row, numa in zip(table.names, table.cells, table.numa, strict=True):
        lines.append(f"{name:<{wide}}  " + " ".join(f"{c:>{cell}}" for c in row) + f"  {numa:>4}")
    _lines(doc, lines)
    doc.say(MATRIX_NOTE)


def _limits(doc: Document, topology: Topology) -> None:
    flow = bisection(topology)
    if flow is None:
        return
    if flow.gbps is None:
        doc.say(sentence(f"bisection bandwidth of the GPUs: not known ({flow.note})"))
        return
    halves = f"{' '.join(flow.left)} | {' '.join(flow.right)}"
    note = f"; {flow.note}" if flow.note else ""
    doc.say(f"Bisection bandwidth of the GPUs, one direction: {number(flow.gbps)} GB/s ({halves}{note}).")


def _schedules(doc: Document, topology: Topology) -> None:
    used = [s for s in topology.schedules if s.channels]
    if not used:
        return
    doc.heading("NCCL's graphs")
    rows: list[list[Cell]] = [
        [s.name, s.pattern, str(len(s.channels)), number(s.speed_intra), s.type_intra, number(s.speed_inter),
         " ".join(s.channels[0])] for s in used
    ]  # fmt: skip
    headers = ["graph", "pattern", "channels", "GB/s each", "path", "between hosts", "first channel"]
    doc.table(headers, rows, right=(2, 3, 5), wide=6)


def _doubts(doc: Document, topology: Topology) -> None:
    if topology.doubts:
        doc.heading("Said differently, or not told")
        doc.items([[text] for text in doubt_lines(topology)])


def doubt_lines(topology: Topology) -> list[str]:
    """What sources said and what was taken, devices of which the same is said in one line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for doubt in topology.doubts:
        alike.setdefault((doubt.what, said(doubt, topology.source), doubt.taken), []).append(doubt.device)
    return [
        f"{', '.join(devices)}: {what}: {words or 'see the source'}. Taken: {taken}."
        for (what, words, taken), devices in alike.items()
    ]


def said(doubt: Doubt, source: str = "") -> str:
    """ "numa_node -1 (sysfs), memory_affinity 0 (NVML)"; the topology's own source is not repeated."""
    return ", ".join(f"{f.name} {f.value}" + (f" ({f.source})" if f.source != source else "") for f in doubt.said)

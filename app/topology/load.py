"""Topology files by what is in them, one or several of the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from costlab.app.topology.model import Topology, TopologyProblem
from costlab.app.topology.xmlread import MAX_BYTES


def load_file(path: Path) -> Topology:
    """The topology in one file; TopologyProblem says which file, line and reason."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TopologyProblem(path.name, None, f"larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise TopologyProblem(path.name, None, f"cannot be read: {error.strerror}") from error
    return load_bytes(data, path.name)


def load_bytes(data: bytes, name: str) -> Topology:
    """The topology in `data`: NCCL or RCCL topology or graph XML, hwloc XML, `nvidia-smi topo -m` or `-p2p`."""
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        return _xml(data, name)
    from costlab.app.topology.smi import looks_like, read_smi

    text = data.decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise TopologyProblem(name, None, "the file is empty")
    if not looks_like(text):
        kinds = "NCCL or RCCL topology or graph XML, hwloc XML, nvidia-smi topo -m or -p2p"
        raise TopologyProblem(name, 1, f"not a topology that costlab reads ({kinds})")
    return read_smi(text, name)


def _xml(data: bytes, name: str) -> Topology:
    from costlab.app.topology.hwloc import read_hwloc
    from costlab.app.topology.nccl import read_system
    from costlab.app.topology.nccl_graph import read_graphs
    from costlab.app.topology.xmlread import parse

    root = parse(data, name)
    readers = {"system": read_system, "graphs": read_graphs, "topology": read_hwloc}
    if root.tag not in readers:
        raise TopologyProblem(name, root.line, f"<{root.tag[:40]}> is not the root of a topology that costlab reads")
    return readers[root.tag](root, name)


def load_files(paths: Sequence[Path]) -> Topology:
    """The first file, with the schedules, pairs, notes and doubts of the others that describe the same GPUs."""
    first, *rest = [load_file(p) for p in paths]
    if not first.links or all(link.kind in ("ring", "tree") for link in first.links):
        fuller = next((t for t in rest if any(link.kind not in ("ring", "tree") for link in t.links)), None)
        if fuller is not None:
            rest[rest.index(fuller)], first = first, fuller
    for other in rest:
        first = _join(first, other)
    return first


def _join(base: Topology, other: Topology) -> Topology:
    mine, theirs = {n.id for n in base.gpus}, {n.id for n in other.gpus}
    if not theirs <= mine:
        raise TopologyProblem(
            other.source,
            None,
            f"has GPUs that {base.source} lacks ({', '.join(sorted(theirs - mine)[:4])}): another machine?",
        )
    note = f"also read: {other.source}"
    return msgspec.structs.replace(
        base,
        pairs=[*base.pairs, *other.pairs],
        schedules=[*base.schedules, *other.schedules],
        doubts=[*base.doubts, *other.doubts],
        notes=[*base.notes, note, *other.notes],
    )

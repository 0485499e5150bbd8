"""The topology of a run: the facts its ranks wrote, NCCL's own dumps beside them, the machine's last calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from costlab.app.analysis.views import CollectivesView
from costlab.app.topology.calibration import calibrated, stored
from costlab.app.topology.discovery import fingerprint, from_rows
from costlab.app.topology.load import load_file, load_files
from costlab.app.topology.model import Doubt, Fact, Topology, TopologyProblem
from costlab.probes.records import LinkRow

DUMPS = ("nccl-topo.xml", "nccl-graph.xml")  # in the run's raw/: NCCL_TOPO_DUMP_FILE, NCCL_GRAPH_DUMP_FILE
CHECK_IN = "check-in"


def read_links(run_dir: Path) -> list[LinkRow]:
    """The table `links` of all ranks; a damaged file of a rank is left out. Raises nothing."""
    rows: list[LinkRow] = []
    for path in sorted(run_dir.glob("rank-*/links.parquet")):
        rows += _table(path)
    return rows


def _table(path: Path) -> list[LinkRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return msgspec.convert(pq.read_table(path).to_pylist(), list[LinkRow])
    except (OSError, pa.ArrowInvalid, msgspec.ValidationError):
        return []


def run_topology(rows: Sequence[LinkRow], run_dir: Path, home: Path) -> Topology | None:
    """From the table `links` of all ranks and the run's raw/; None where neither tells anything."""
    ranks = [r.rank for r in rows if r.kind != CHECK_IN]
    machine = [r for r in rows if r.kind != CHECK_IN and r.rank == min(ranks)]
    dumped = [p for p in (run_dir / "raw" / name for name in DUMPS) if p.is_file()]
    if not machine:
        return _dumps(dumped)
    topology = from_rows(machine, f"the run's machine, as rank {min(ranks)} saw it")
    last = stored(fingerprint(machine), home)
    if last is not None:
        topology = calibrated(topology, last)
    for path in dumped:
        topology = _with_dump(topology, path)
    return topology


def on_machine(
    view: CollectivesView, links: Sequence[LinkRow], run_dir: Path, home: Path, *, cpu: bool, hosts: int = 1
) -> CollectivesView:
    """The collectives with ideal times and curves from the run's graph and the benchmarks kept for its machine."""
    from costlab.app.topology.curves import bench_curves, ideal_curves
    from costlab.app.topology.use import uses, with_ideals

    machine = [r for r in links if r.kind != CHECK_IN]
    topology = run_topology(links, run_dir, home)
    if topology is None or hosts > 1:  # the graph is one host's
        return view
    found = uses(topology, view.rows, cpu=cpu)
    first = [r for r in machine if r.rank == min(m.rank for m in machine)]
    kept = bench_curves(view.rows, fingerprint(first), home, "gloo" if cpu else "nccl") if first else []
    curves = [*kept, *ideal_curves(found)]
    return msgspec.structs.replace(view, rows=with_ideals(view.rows, found), curves=curves)


def _dumps(paths: list[Path]) -> Topology | None:
    try:
        return load_files(paths) if paths else None
    except TopologyProblem:
        return None


def _with_dump(topology: Topology, path: Path) -> Topology:
    """Schedules from NCCL's graph; its topology is compared by bus id, and what differs is shown, not merged."""
    try:
        dump = load_file(path)
    except TopologyProblem as error:
        return msgspec.structs.replace(topology, notes=[*topology.notes, f"NCCL's dump: {error}"])
    doubts = [d for n in dump.gpus if (d := _differs(topology, dump, n.id)) is not None]
    return msgspec.structs.replace(
        topology,
        schedules=[*topology.schedules, *dump.schedules],
        doubts=[*topology.doubts, *doubts],
        notes=[*topology.notes, f"also read: {dump.source}"],
    )


def _differs(topology: Topology, dump: Topology, id: str) -> Doubt | None:
    theirs = dump.node(id)
    if theirs is None or not theirs.busid:
        return None
    mine = next((n for n in topology.gpus if n.busid == theirs.busid), None)
    if mine is None:
        said = [Fact(name="bus id", value=theirs.busid, source=dump.source)]
        return Doubt(device=id, what="a GPU that only NCCL names", said=said, taken="not in the graph")
    if theirs.numa is not None and theirs.numa != mine.numa:
        said = [
            Fact(name="numaid", value=str(theirs.numa), source=dump.source),
            Fact(name="node", value="not stated" if mine.numa is None else str(mine.numa), source=mine.numa_source),
        ]
        return Doubt(
            device=mine.id,
            what="NUMA node",
            said=said,
            taken="PCI's or NVML's word" if mine.numa is not None else "no node",
        )
    return None


def check_in_facts(rows: Sequence[LinkRow]) -> list[tuple[int, dict[str, str]]]:
    """The check-in of each rank as name -> value, in rank order."""
    found: dict[int, dict[str, str]] = {}
    for row in rows:
        if row.kind == CHECK_IN:
            found.setdefault(row.rank, {})[row.fact] = row.value
    return sorted(found.items())

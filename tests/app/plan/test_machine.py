"""From topologies to hosts and fabrics: what is taken from where, what is assumed and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from costlab.app.plan.machine import PlanProblem, Shape, Wanted, fabric, machine
from costlab.app.topology.load import load_file
from costlab.app.topology.model import Link, Measure, Node, Topology

DATA = Path(__file__).parents[2] / "data" / "topology"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "topology"


def measured(src: str, dst: str, gbps: float, alpha_ns: float) -> Link:
    fit = Measure(
        what="device copy", direction="one", gbps=gbps, largest_gbps=gbps, largest_bytes=1 << 28, alpha_ns=alpha_ns,
        alpha_is="copy", residual=0.01, sizes=8, repeats=5,
    )  # fmt: skip
    return Link(
        src=src, dst=dst, kind="nvlink", label="NVLink 4 x18", nominal_gbps=450.0, nccl_gbps=370.8,
        measured_gbps=gbps, measures=[fit],
    )  # fmt: skip


def two_gpus(*links: Link) -> Topology:
    return Topology(source="two", nodes=[Node(id=f"gpu{i}", kind="gpu", label="") for i in range(2)], links=[*links])


def test_measured_links_go_before_constants() -> None:
    host = machine(two_gpus(measured("gpu0", "gpu1", 390.0, 2500), measured("gpu1", "gpu0", 380.0, 2700)))
    assert (host.ranks, host.inside.gbps, host.inside.source) == (2, 380.0, "measured")
    assert host.inside.alpha_us == pytest.approx(2.6)


def test_constants_where_a_link_was_not_measured() -> None:
    other = Link(src="gpu1", dst="gpu0", kind="nvlink", label="NVLink 4 x18", nominal_gbps=450.0, nccl_gbps=370.8)
    host = machine(two_gpus(measured("gpu0", "gpu1", 390.0, 2500), other))
    assert (host.inside.gbps, host.inside.source) == (370.8, "NCCL's constant")


def test_what_the_user_says_goes_first() -> None:
    wanted = Wanted(per_host=8, inside_gbps=300.0, nics=4, network_gbps=48.0, step_us=0.0)
    host = machine(two_gpus(), wanted)
    assert (host.ranks, host.inside.gbps, host.nics, host.network.gbps, host.step_us) == (8, 300.0, 4, 48.0, 0.0)
    assert host.network.source == "--network"


def test_a_machine_without_gpus_shares_its_memory() -> None:
    host = machine(Topology(source="cpu", nodes=[Node(id="cpu0", kind="cpu", label="")]))
    assert (host.library, host.shared) == ("gloo", True)
    assert any("calibrat" in note for note in host.notes)
    assert fabric(host, Shape(ranks=4)).machine == host.inside.gbps * 1e9


@pytest.mark.parametrize(
    ("name", "ranks", "inside", "nics", "network"),
    [
        ("aws-p4d-24xl-topo.xml", 8, 10.0, 4, 12.5),
        ("azure-ncv4-graph.xml", 4, 12.0, 1, 12.5),
        ("azure-ndv2-topo.xml", 8, 10.0, 1, 12.5),
        ("azure-ndv4-topo.xml", 8, 16.0, 8, 12.5),
        ("h200x2-nccl-graph.xml", 2, 360.0, 1, 12.5),
        ("h200x2-nccl-topo.xml", 2, 370.8, 1, 1.25),
        ("hwloc-nvidiaDGX2.xml", 16, 150.0, 1, 12.5),
        ("rccl-topo_8p_940.xml", 8, 448.0, 8, 50.0),
        ("topo-m-nccl-issue-595.txt", 4, 240.0, 2, 12.5),
    ],
)
def test_collected_files(name: str, ranks: int, inside: float, nics: int, network: float) -> None:
    file = next((f / name for f in (DATA, SHARED) if (f / name).is_file()), None)
    if file is None:
        pytest.skip("the collection of topology files is not here")
    host = machine(load_file(file))
    assert (host.ranks, host.nics) == (ranks, nics)
    assert host.inside.gbps == pytest.approx(inside)
    assert host.network.gbps == pytest.approx(network)
    assert (host.network.source == "assumed") == any("no network rate" in n for n in host.notes)
    found = fabric(host, Shape(ranks=3 * ranks - 1))
    assert found.world_size == 3 * ranks - 1
    assert [len(s.ranks) for s in found.segments] == [ranks, ranks, ranks - 1]


def test_shapes() -> None:
    host = machine(two_gpus(), Wanted(network_gbps=10.0, nics=2))
    assert len(fabric(host, Shape(ranks=2)).segments) == 1
    leaves = fabric(host, Shape(ranks=16, leaf=4, oversubscribed=4.0))
    assert (leaves.leaf, leaves.uplink) == (4, 2 * 4 * 10e9 / 4)
    slow = fabric(host, Shape(ranks=8, wiring="line", slow={3: 0.25}))
    assert slow.wiring == "line"
    assert [s.port.bandwidth for s in slow.segments] == [10e9, 10e9, 10e9, 2.5e9]
    for bad in (Shape(ranks=0), Shape(ranks=8, slow={4: 0.5}), Shape(ranks=8, slow={0: 1.5})):
        with pytest.raises(PlanProblem):
            fabric(host, bad)

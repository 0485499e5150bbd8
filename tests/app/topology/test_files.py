"""Real files: how many GPUs, which links, which NUMA nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from costlab.app.topology.graph import path_class
from costlab.app.topology.load import load_file, load_files
from costlab.app.topology.model import Topology

DATA = Path(__file__).parent / "data"
EIGHT_IN_TWO = [0, 0, 0, 0, 1, 1, 1, 1]


@dataclass(frozen=True)
class Expected:
    """What a file says; links count both directions."""

    gpus: int
    numa: list[int | None]
    links: dict[str, int]
    nics: int = 0


FILES = {
    "azure-ndv2-topo.xml": Expected(8, list(EIGHT_IN_TWO), {"pcie": 18, "numa": 2}, nics=1),
    "azure-ndv4-topo.xml": Expected(8, [0, 0, 1, 1, 2, 2, 3, 3], {"pcie": 40, "numa": 12}, nics=8),
    "azure-ncv4-graph.xml": Expected(4, [None] * 4, {"ring": 8}),
    "aws-p4d-24xl-topo.xml": Expected(8, list(EIGHT_IN_TWO), {"pcie": 32, "numa": 2}, nics=4),
    "rccl-topo_8p_940.xml": Expected(8, list(EIGHT_IN_TWO), {"pcie": 80, "xgmi": 56, "network": 16, "numa": 2}, nics=8),
    "hwloc-nvidiaDGX2.xml": Expected(16, [0] * 8 + [1] * 8, {"pcie": 168, "nvlink": 192, "numa": 2}),
    "topo-m-nccl-issue-595.txt": Expected(
        4, [1, 0, 3, 2], {"nvlink": 12, "pcie": 16, "numa": 12, "network": 4}, nics=2
    ),
    "h200x2-nccl-topo.xml": Expected(2, [None, None], {"nvlink": 4, "pcie": 6, "network": 2}, nics=1),
    "h200x2-nccl-graph.xml": Expected(2, [None, None], {"ring": 2}),
}


def load(name: str) -> Topology:
    return load_file(DATA / name)


def test_every_file_of_the_folder_is_expected() -> None:
    assert {p.name for p in DATA.iterdir()} == {*FILES, "README.md"}


@pytest.mark.parametrize("name", FILES)
def test_gpus_links_and_numa_nodes(name: str) -> None:
    expected, topology = FILES[name], load(name)
    assert len(topology.gpus) == expected.gpus
    assert [g.numa for g in topology.gpus] == expected.numa
    assert Counter(link.kind for link in topology.links) == expected.links
    assert len(topology.of_kind("nic")) == expected.nics
    for link in topology.links:
        assert topology.node(link.src), link
        assert topology.node(link.dst), link


def test_h200_has_two_gpus_on_a_switch_that_is_not_visible() -> None:
    topology = load_files([DATA / "h200x2-nccl-topo.xml", DATA / "h200x2-nccl-graph.xml"])
    (switch,) = topology.of_kind("nvswitch")
    assert not switch.visible
    ports = [x for x in topology.links if x.kind == "nvlink"]
    assert {(x.src, x.dst) for x in ports} == {
        ("gpu0", "nvswitch"), ("nvswitch", "gpu0"), ("gpu1", "nvswitch"), ("nvswitch", "gpu1"),
    }  # fmt: skip
    assert {(x.label, x.nominal_gbps, x.weight) for x in ports} == {("NVLink 4 x18", 450.0, 450 / 64)}
    assert [x.nccl_gbps for x in ports] == [pytest.approx(370.8)] * 4
    (uplink,) = [x for x in topology.links if (x.src, x.dst) == ("cpu", "gpu0")]
    assert (uplink.label, uplink.nominal_gbps, uplink.weight, uplink.weight_from) == (
        "PCIe 5 x16",
        64.0,
        1.0,
        "nominal",
    )
    assert "width 0 taken as x16" in uplink.nominal_source
    assert {d.what for d in topology.doubts} == {"NUMA node", "PCIe width", "NVSwitch"}
    assert all(n.numa is None for n in topology.nodes)
    ring = next(s for s in topology.schedules if s.name == "ring")
    assert (len(ring.channels), ring.speed_intra, ring.type_intra) == (12, 30.0, "NVL")
    assert ring.channels[0] == ["gpu0", "gpu1"]
    assert [len(s.channels) for s in topology.schedules if s.name == "nvls"] == [0]


def test_order_of_files_does_not_matter() -> None:
    names = [DATA / "h200x2-nccl-topo.xml", DATA / "h200x2-nccl-graph.xml"]
    a, b = load_files(names), load_files(names[::-1])
    assert (a.nodes, a.links, a.schedules) == (b.nodes, b.links, b.schedules)


def test_other_spellings_of_a_speed() -> None:
    ndv4, p4d = load("azure-ndv4-topo.xml"), load("aws-p4d-24xl-topo.xml")
    assert {x.label for x in ndv4.links if x.kind == "pcie"} == {"PCIe 4 x16"}
    assert {x.nominal_gbps for x in p4d.links if x.kind == "pcie"} == {16.0}
    cpu = ndv4.node("numa2")
    assert cpu is not None
    assert cpu.label.endswith("CPU 48-71")


def test_rccl_is_fully_connected_by_xgmi() -> None:
    topology = load("rccl-topo_8p_940.xml")
    pairs = {(x.src, x.dst) for x in topology.links if x.kind == "xgmi"}
    assert pairs == {(f"gpu{a}", f"gpu{b}") for a in range(8) for b in range(8) if a != b}
    assert {x.nominal_gbps for x in topology.links if x.kind == "xgmi"} == {64.0}
    ports = [x for x in topology.links if x.kind == "network" and x.src.startswith("nic")]
    assert [(x.label, x.nominal_gbps) for x in ports] == [("400 Gbit/s", 50.0)] * 8
    assert path_class(topology, "gpu0", "nic:0000:07:00.0") == "PXB"
    assert path_class(topology, "gpu0", "gpu7") == "XG1"


def test_dgx2_has_six_links_of_25_from_each_gpu() -> None:
    topology = load("hwloc-nvidiaDGX2.xml")
    assert len(topology.of_kind("nvswitch")) == 12
    for gpu in topology.gpus:
        links = [x for x in topology.links if x.src == gpu.id and x.kind == "nvlink"]
        assert [x.nominal_gbps for x in links] == [25.0] * 6
        switches = {x.dst for x in links}
        assert {topology.node(s).numa for s in switches} == {gpu.numa}  # type: ignore[union-attr]
    gpu = topology.gpus[0]
    uplink = next(x for x in topology.links if x.dst == gpu.id and x.kind == "pcie")
    assert (uplink.nominal_gbps, uplink.payload_gbps) == (16.0, pytest.approx(15.7538, rel=1e-5))
    distance = [p for p in topology.pairs if p.name == "NUMA distance"]
    assert [(p.a, p.b, p.value) for p in distance] == [("numa0", "numa1", "21")]


def test_topo_m_keeps_paths_and_puts_nics_where_they_are_near() -> None:
    topology = load("topo-m-nccl-issue-595.txt")
    assert path_class(topology, "gpu0", "gpu1") == "NV4"
    assert path_class(topology, "gpu1", "nic:mlx5_0") == "PIX"
    assert path_class(topology, "gpu3", "nic:mlx5_1") == "SYS"
    nics = {n.id: n.numa for n in topology.of_kind("nic")}
    assert nics == {"nic:mlx5_0": 0, "nic:mlx5_1": 3}
    assert all(x.nominal_gbps is None for x in topology.links), "the text has no rate"
    assert topology.node("numa1").label == "NUMA 1 ─ CPU 16-31,80-95"  # type: ignore[union-attr]


def test_graph_gives_rings_with_nccls_speed() -> None:
    topology = load("azure-ncv4-graph.xml")
    ring = next(s for s in topology.schedules if s.name == "ring")
    assert ring.channels == [["gpu0", "gpu1", "gpu2", "gpu3"], ["gpu0", "gpu3", "gpu2", "gpu1"]]
    assert ring.type_intra == "SYS"
    assert {(x.src, x.dst): x.nccl_gbps for x in topology.links}["gpu0", "gpu1"] == 12.0
    assert all(x.nominal_gbps is None for x in topology.links)

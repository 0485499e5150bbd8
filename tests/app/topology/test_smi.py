"""Texts of `nvidia-smi topo` as people paste them."""

from __future__ import annotations

import pytest

from costlab.app.topology.graph import path_class
from costlab.app.topology.load import load_bytes
from costlab.app.topology.model import Topology

H100 = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""


def load(text: str) -> Topology:
    return load_bytes(text.encode(), "topo.txt")


@pytest.mark.parametrize(
    "text", [H100, H100.replace("\t", "    "), "$ nvidia-smi topo -m\r\n" + H100.replace("\n", "\r\n")]
)
def test_escape_codes_blanks_for_tabs_and_a_legend(text: str) -> None:
    topology = load(text)
    assert [(n.id, n.label, n.numa) for n in topology.of_kind("gpu", "nic")] == [
        ("gpu0", "GPU0", 0), ("gpu1", "GPU1", 1), ("nic:NIC0", "mlx5_0", 0), ("nic:NIC1", "mlx5_bond_0", 1),
    ]  # fmt: skip
    assert [x.label for x in topology.links if x.kind == "nvlink"] == ["NVLink x18"] * 2
    assert {n.label for n in topology.of_kind("pci")} == {
        "PCIe switch (inferred from PIX)", "PCIe switches (inferred from PXB)",
    }  # fmt: skip
    assert path_class(topology, "gpu0", "nic:NIC0") == "PIX"


def test_not_available_and_several_nodes_are_no_claim() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-15\tN/A\nGPU1\tPHB\t X \t0-15\t0-1\n"
    topology = load(text)
    assert [g.numa for g in topology.gpus] == [None, None]
    assert [(d.device, d.what) for d in topology.doubts] == [("gpu1", "NUMA node")]


def test_more_nvlinks_than_a_gpu_has_means_a_switch() -> None:
    names = [f"GPU{i}" for i in range(4)]
    rows = [f"{a}\t" + "\t".join(" X " if a == b else "NV12" for b in names) for a in names]
    topology = load("\t" + "\t".join(names) + "\n" + "\n".join(rows))
    (switch,) = topology.of_kind("nvswitch")
    assert not switch.visible
    assert {x.dst for x in topology.links if x.kind == "nvlink" and x.src.startswith("gpu")} == {switch.id}
    assert topology.doubts[0].what == "NVSwitch"


def test_halves_that_differ_are_shown() -> None:
    topology = load("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tSYS\t X \n")
    (doubt,) = topology.doubts
    assert [f.value for f in doubt.said] == ["PIX", "SYS"]
    assert path_class(topology, "gpu0", "gpu1") == "PIX"


def test_peer_to_peer_status() -> None:
    text = """\
 \x1b[4mGPU0\tGPU1\tGPU2\x1b[0m
 GPU0\tX\tOK\tCNS
 GPU1\tOK\tX\tGNS
 GPU2\tCNS\tGNS\tX

Legend:
  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
$ nvidia-smi topo -p2p r
"""
    topology = load(text)
    assert [(p.a, p.b, p.name, p.value) for p in topology.pairs] == [
        ("gpu0", "gpu1", "p2p read", "OK (works)"),
        ("gpu0", "gpu2", "p2p read", "CNS (chipset does not support it)"),
        ("gpu1", "gpu2", "p2p read", "GNS (GPU does not support it)"),
    ]
    assert topology.links == []
    assert [g.numa for g in topology.gpus] == [None] * 3


def test_one_gpu() -> None:
    topology = load("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n")
    assert [(g.id, g.numa) for g in topology.gpus] == [("gpu0", 0)]

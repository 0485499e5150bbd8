"""A machine's facts, from a stand-in for NVML and a copied /sys, to its graph."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.app.report.topology import render_topology_text
from costlab.app.topology.discovery import HERE, discover, fingerprint, from_rows
from costlab.app.topology.model import Topology
from costlab.probes.nvml import Nvml
from costlab.probes.records import LinkRow
from costlab.probes.sysfs import nics, pci_device
from costlab.probes.topology import machine_rows
from tests.probes.fake_nvml import FakeNvml, NvmlError
from tests.probes.fake_sysfs import Machine, two_sockets, virtual_machine


class LinkedNvml(FakeNvml):
    """Two GPUs with 18 NVLinks each to something that is hidden, as in a virtual machine."""

    buses = ("00000000:00:06.0", "00000000:00:07.0")
    remote_bus = "FFFFFFF:FF:FF.0"
    remote_type = 2
    affinity: tuple[int, ...] = (1,)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.buses[handle].encode())

    def nvmlDeviceGetNvLinkState(self, _: int, link: int) -> int:
        if link >= 18:
            raise NvmlError("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, _: int, __: int) -> int:
        return self.remote_type

    def nvmlDeviceGetNvLinkRemotePciInfo(self, _: int, __: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.remote_bus)

    def nvmlDeviceGetNvLinkVersion(self, _: int, __: int) -> int:
        return 6

    def nvmlDeviceGetFieldValues(self, _: int, __: list[int]) -> list[SimpleNamespace]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]

    def nvmlDeviceGetMemoryBusWidth(self, _: int) -> int:
        return 6144

    def nvmlDeviceGetMaxClockInfo(self, _: int, __: int) -> int:
        return 3201

    def nvmlDeviceGetMemoryAffinity(self, _: int, words: int, __: int) -> list[int]:
        return [*self.affinity, *[0] * (words - len(self.affinity))]

    def nvmlDeviceGetTopologyCommonAncestor(self, _: int, __: int) -> int:
        return 30

    def nvmlDeviceGetP2PStatus(self, _: int, __: int, ___: int) -> int:
        return 0


def rows(root: Path, nvml: FakeNvml) -> list[LinkRow]:
    return machine_rows(nvml=Nvml(nvml), root=root)  # type: ignore[arg-type]


@pytest.fixture
def vm(tmp_path: Path) -> Topology:
    return from_rows(rows(virtual_machine(tmp_path).root, LinkedNvml()), HERE)


def test_virtual_machine_with_two_h200(vm: Topology) -> None:
    assert [(g.id, g.numa, g.busid) for g in vm.gpus] == [
        ("gpu0", None, "0000:00:06.0"),
        ("gpu1", None, "0000:00:07.0"),
    ]
    uplink = next(x for x in vm.links if x.dst == "gpu0" and x.kind == "pcie")
    assert (uplink.label, uplink.nominal_gbps, uplink.weight) == ("PCIe 5 x16", 64.0, 1.0)
    assert uplink.nominal_source == "NVML, maximum of the link"
    (switch,) = vm.of_kind("nvswitch")
    assert (switch.visible, switch.label) == (False, "NVSwitch (not visible)")
    ports = [x for x in vm.links if x.kind == "nvlink" and x.src == "gpu0"]
    assert [(x.label, x.nominal_gbps) for x in ports] == [("NVLink 4 x18", 450.0)]
    memory = next(x for x in vm.links if x.kind == "memory" and x.src == "gpu1")
    assert memory.nominal_gbps == pytest.approx(6144 / 8 * 3201 * 2 / 1000)


def test_disagreements_are_shown(vm: Topology) -> None:
    doubts = {(d.device, d.what): d for d in vm.doubts}
    pcie = doubts["gpu0", "PCIe link"]
    assert {(f.name, f.value) for f in pcie.said} >= {("pcie_generation_now", "1"), ("pcie_generation_max", "5")}
    assert pcie.taken.startswith("the maximum")
    numa = doubts["gpu0", "NUMA node"]
    assert {(f.value, f.source) for f in numa.said} == {("-1", "sysfs"), ("0", "NVML")}
    assert numa.taken.startswith("no node")
    assert "devices' own not stated" in vm.node("numa0").label  # type: ignore[union-attr]
    assert {(p.name, p.value) for p in vm.pairs} == {("PCIe path", "PHB"), ("p2p read", "OK"), ("p2p write", "OK")}


def test_two_sockets(tmp_path: Path) -> None:
    fake = LinkedNvml()
    fake.buses = ("00000000:18:00.0", "00000000:99:00.0")
    fake.remote_type, fake.affinity = 0, ()
    fake.remote_bus = "00000000:99:00.0"
    topology = from_rows(rows(two_sockets(tmp_path).root, fake), HERE)
    assert [(g.id, g.numa, g.numa_source) for g in topology.gpus] == [
        ("gpu0", 0, "sysfs numa_node"), ("gpu1", 1, "sysfs numa_node"),
    ]  # fmt: skip
    gpu = topology.node("gpu1")
    assert gpu is not None
    assert gpu.parent == "pci:0000:98:00.0"
    assert topology.node("pci:0000:98:00.0").parent == "pci:0000:97:00.0"  # type: ignore[union-attr]
    assert topology.node("pci:0000:97:00.0").parent == "numa1"  # type: ignore[union-attr]
    nic = next(n for n in topology.of_kind("nic") if n.label == "mlx5_0")
    assert (nic.parent, nic.numa) == ("pci:0000:98:00.0", 1)
    port = next(x for x in topology.links if x.src == nic.id and x.dst == "network")
    assert (port.nominal_gbps, port.label) == (50.0, "400 Gbit/s")
    assert {(x.src, x.dst) for x in topology.links if x.kind == "nvlink"} >= {("gpu0", "gpu1")}
    assert [(p.a, p.b, p.value) for p in topology.pairs if p.name == "NUMA distance"] == [("numa0", "numa1", "21")]


def test_nvml_that_contradicts_pci_is_a_doubt(tmp_path: Path) -> None:
    fake = LinkedNvml()
    fake.buses, fake.affinity = ("00000000:18:00.0", "00000000:99:00.0"), (2,)
    topology = from_rows(rows(two_sockets(tmp_path).root, fake), HERE)
    assert topology.gpus[0].numa == 0
    assert next(d for d in topology.doubts if d.device == "gpu0" and d.what == "NUMA node").taken == "0, PCI's word"


def test_without_a_driver_the_rest_is_there(tmp_path: Path) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise NvmlError("Driver Not Loaded")

    topology = from_rows(rows(two_sockets(tmp_path).root, Broken()), HERE)
    assert topology.gpus == []
    assert {n.label for n in topology.of_kind("nic")} == {"mlx5_0", "eno1"}
    assert any("Driver Not Loaded" in note for note in topology.notes)


def test_this_machine_is_discovered() -> None:
    topology = discover()
    assert topology.of_kind("cpu")
    for node in topology.nodes:
        assert node.numa is None or node.numa >= 0


def test_fingerprint_names_the_machine_not_its_state(tmp_path: Path) -> None:
    root = virtual_machine(tmp_path).root
    one, again = LinkedNvml(), LinkedNvml()
    again.nvmlDeviceGetCurrPcieLinkGeneration = lambda _: 5  # type: ignore[method-assign]
    assert fingerprint(rows(root, one)) == fingerprint(rows(root, again))
    assert fingerprint(rows(root, one)) != fingerprint(rows(two_sockets(tmp_path / "b").root, one))


def test_sysfs_reading(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    device = pci_device("00000000:99:00.0", tmp_path)
    assert device is not None
    assert (device.numa, device.chain) == (1, ("0000:98:00.0", "0000:97:00.0"))
    assert pci_device("0000:ff:00.0", tmp_path) is None
    assert {(n.name, n.kind, n.mbps) for n in nics(tmp_path)} == {
        ("mlx5_0", "rdma", 400_000.0), ("eno1", "ethernet", 25_000.0),
    }  # fmt: skip
    virtual = Machine(tmp_path)
    virtual.write("sys/class/net/lo/speed", "0")
    assert len(nics(machine.root)) == 2


NAMES = ["gpu0", "gpu1", "gpu", "GPU 0", "numa0", "numa", "numax", "0000:01:00.0", "0000:00:01.0 0000:01:00.0"]
FACTS = ["nvlink switch hidden", "nvlink gpu 0000:01:00.0", "busid", "chain", "numa_node", "mbps", "p2p read gpu1",
         "ancestor gpu", "distances", "pcie_generation_max", "width_max", "sm"]  # fmt: skip
VALUES = ["-1", "0", "99999999999999999999", "\u00b2", "0:10,1:x", "90", "", "\x1b[31m"]
WORDS = st.sampled_from([*NAMES, *FACTS, *VALUES])
KINDS = st.sampled_from(["gpu", "numa", "nic", "pci", "disk", "nvswitch", "machine", "accelerator", "check-in", "x"])
ROW = st.builds(
    LinkRow, rank=st.just(0), device=WORDS | st.text(max_size=8), kind=KINDS, fact=WORDS | st.text(max_size=8),
    value=WORDS | st.text(max_size=8), source=st.sampled_from(["NVML", "sysfs", ""]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(ROW, max_size=30))
def test_any_rows_make_a_graph_that_can_be_shown(links: list[LinkRow]) -> None:
    """A run's table is data from elsewhere: whatever it says, it is drawn or left out."""
    topology = from_rows(links, "run")
    assert "\x1b" not in render_topology_text(topology)
    known = {n.id for n in topology.nodes}
    assert all({x.src, x.dst} <= known for x in topology.links)

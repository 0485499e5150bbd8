"""Check-in on trees of real kinds of servers: the right node, and nothing bound on doubt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from costlab.probes import checkin, numa
from costlab.probes.nvml import Nvml
from tests.probes.fake_nvml import FakeNvml
from tests.probes.fake_sysfs import Machine, two_sockets, virtual_machine

GPU = "0000:99:00.0"


def facts(placement: checkin.Placement) -> dict[str, str]:
    return {name: value for name, value, _ in placement.facts}


def test_two_sockets_gives_the_gpus_node_and_its_nics(tmp_path: Path) -> None:
    root = two_sockets(tmp_path).root
    placement = checkin.plan("report", GPU, "1", root)
    assert placement.why == ""
    assert (placement.node, placement.source) == (1, "sysfs")
    assert placement.cpus == frozenset(range(8, 16))
    assert facts(placement)["NICs under a common bridge"] == "mlx5_0"
    assert facts(placement)["NICs of the node"] == "mlx5_0"
    other = checkin.plan("report", "0000:18:00.0", "0", root)
    assert other.cpus == frozenset(range(8))
    assert facts(other)["NICs of the node"] == "eno1"


def test_eight_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nodes([f"{16 * i}-{16 * i + 15},{128 + 16 * i}-{143 + 16 * i}" for i in range(8)])
    machine.packages({0: [*range(64), *range(128, 192)], 1: [*range(64, 128), *range(192, 256)]})
    machine.allowed("0-255", "0-7")
    machine.pci(GPU, numa=5, local="80-95,208-223")
    placement = checkin.plan("report", GPU, "", tmp_path)
    assert placement.node == 5
    assert placement.cpus == frozenset([*range(80, 96), *range(208, 224)])
    assert facts(placement)["nodes per package"] == "4"


def test_sub_numa_clustering_binds_to_the_cluster_though_local_cpus_are_the_socket(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nodes(["0-3", "4-7", "8-11", "12-15"])
    machine.packages({0: range(8), 1: range(8, 16)})
    machine.allowed("0-15", "0-3")
    machine.pci(GPU, numa=3, local="8-15")
    placement = checkin.plan("report", GPU, "3", tmp_path)
    assert placement.cpus == frozenset(range(12, 16))
    assert facts(placement)["nodes per package"] == "2"


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine.write("sys/devices/system/cpu/online", "0-9,14-15")
    assert checkin.plan("report", GPU, "", tmp_path).cpus == frozenset([8, 9, 14, 15])
    machine.write("sys/devices/system/cpu/online", "0-7")
    placement = checkin.plan("bind", GPU, "", tmp_path)
    assert not placement.cpus
    assert "no CPU that is online" in placement.why


def test_cpuset_cuts_the_node(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine.allowed("6-11", "0-1")
    assert checkin.plan("report", GPU, "", tmp_path).cpus == frozenset(range(8, 12))


Spoil = Callable[[Machine], object]
DOUBTS: list[tuple[str, Spoil, str, str]] = [
    ("cpuset without the node's CPUs", lambda m: m.allowed("0-7", "0-1"), "", "leaves this process no CPU"),
    ("cpuset without the node's memory", lambda m: m.allowed("0-15", "0"), "", "no memory of NUMA node 1"),
    ("process status unreadable", lambda m: (m.root / "proc/self/status").unlink(), "", "cannot be read"),
    ("NVML names another node", lambda _: None, "0", "NVML says 0"),
    ("local CPUs of the other node",
     lambda m: m.write("sys/devices/pci0000:00/0000:97:00.0/0000:98:00.0/0000:99:00.0/local_cpulist", "0-7"), "",
     "are not those of its NUMA node 1"),
    ("node offline", lambda m: m.write("sys/devices/system/node/online", "0"), "", "nothing to gain"),
    ("node that does not exist",
     lambda m: m.write("sys/devices/pci0000:00/0000:97:00.0/0000:98:00.0/0000:99:00.0/numa_node", "7"), "",
     "node 7 is not online"),
    ("CPU list damaged", lambda m: m.write("sys/devices/system/node/node1/cpulist", "8-x"), "", "cannot be read"),
    ("memory only", lambda m: m.write("sys/devices/system/node/node1/cpulist", ""), "", "no CPU"),
    ("no memory",
     lambda m: m.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB"), "", "has no memory"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "near", "reason"), [d[1:] for d in DOUBTS], ids=[d[0] for d in DOUBTS])
def test_nothing_is_bound_on_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, near: str, reason: str
) -> None:
    machine = two_sockets(tmp_path)
    spoil(machine)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound on doubt"))
    monkeypatch.setattr(numa, "set_policy", lambda *_: pytest.fail("memory bound on doubt"))
    placement = checkin.plan("bind", GPU, near, tmp_path)
    assert reason in placement.why
    assert not placement.cpus


def test_minus_one_is_no_node_and_never_node_zero(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine.pci("0000:aa:00.0", numa=-1, local="0-15")
    placement = checkin.plan("bind", "0000:aa:00.0", "0-1", tmp_path)
    assert placement.node is None
    assert placement.why == checkin.UNTOLD


def test_nvml_stands_in_where_pci_says_nothing_and_names_one_node(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine.pci("0000:aa:00.0", numa=-1, local="8-15")
    placement = checkin.plan("bind", "0000:aa:00.0", "1", tmp_path)
    assert (placement.node, placement.source, placement.why) == (1, "NVML", "")


def test_nccl_topology_file_is_the_last_resort(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path)
    machine.pci("0000:aa:00.0", numa=-1)
    xml = tmp_path / "topo.xml"
    xml.write_text(
        '<system version="1"><cpu numaid="0"/><cpu numaid="1"><pci busid="ffff:ff:01.0">'
        '<pci busid="0000:aa:00.0"/></pci></cpu></system>'
    )
    placement = checkin.plan("bind", "0000:aa:00.0", "", tmp_path, str(xml))
    assert (placement.node, placement.source) == (1, "NCCL topology file")
    xml.write_text('<!DOCTYPE a [<!ENTITY b "c">]><system><cpu numaid="1"><pci busid="0000:aa:00.0"/></cpu></system>')
    assert checkin.nccl_node(str(xml), "0000:aa:00.0") is None
    xml.write_text('<system><cpu numaid="-1"><pci busid="0000:aa:00.0"/></cpu></system>')
    assert checkin.nccl_node(str(xml), "0000:aa:00.0") is None


def test_one_node_has_nothing_to_gain(tmp_path: Path) -> None:
    root = virtual_machine(tmp_path).root
    nvml = Nvml(FakeNvml())  # type: ignore[arg-type]
    placement = checkin.check_in("bind", 0, nvml=nvml, root=root, topo_file="")
    assert placement.sentence == "one NUMA node: nothing to gain"
    assert placement.node is None
    assert not placement.bound_cpus


def test_no_gpu_and_no_nodes_are_said(tmp_path: Path) -> None:
    two_sockets(tmp_path / "a")
    assert checkin.plan("bind", "", "", tmp_path / "a").why == "no GPU: nothing to bind to"
    assert "no NUMA nodes" in checkin.plan("bind", GPU, "", tmp_path / "empty").why


def test_off_looks_at_nothing() -> None:
    placement = checkin.check_in("off", 0)
    assert placement.rows(0) == []
    assert checkin.closing_rows(placement, 0) == []


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """The kernel's answers, recorded: this machine has one node, so the calls themselves are watched."""
    calls: dict[str, list[object]] = {"cpus": [], "policy": []}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: calls["cpus"].append(set(cpus)))
    monkeypatch.setattr(numa, "set_policy", lambda mode, node=None: calls["policy"].append((mode, node)))
    monkeypatch.setattr(numa, "probe_pages", lambda _: {1: 2048})
    return calls


def test_bind_sets_cpus_of_all_threads_then_memory(tmp_path: Path, bound: dict[str, list[object]]) -> None:
    root = two_sockets(tmp_path).root
    placement = checkin.plan("bind", GPU, "1", root)
    checkin.bind(placement, root)
    assert set(map(frozenset, bound["cpus"])) == {frozenset(range(8, 16))}  # type: ignore[arg-type]
    assert len(bound["cpus"]) == len(list(Path("/proc/self/task").iterdir()))
    assert bound["policy"] == [(numa.MPOL_PREFERRED, 1)]
    assert placement.sentence == "bound to NUMA node 1: CPUs 8-15, memory on node 1"
    assert facts(placement)["fresh pages elsewhere"] == "0.0 %"


def test_pages_that_go_elsewhere_undo_the_binding(
    tmp_path: Path, bound: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_sockets(tmp_path).root
    monkeypatch.setattr(numa, "probe_pages", lambda _: {0: 1024, 1: 1024})
    placement = checkin.plan("bind", GPU, "1", root)
    checkin.bind(placement, root)
    assert not placement.bound_cpus
    assert "50 % of fresh pages" in placement.why
    assert bound["cpus"][-1] == {0, 1}
    assert bound["policy"][-1] == (numa.MPOL_DEFAULT, None)


def test_no_permission_binds_nothing(
    tmp_path: Path, bound: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    root = two_sockets(tmp_path).root
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    placement = checkin.plan("bind", GPU, "1", root)
    checkin.bind(placement, root)
    assert "Operation not permitted" in placement.why
    assert not placement.bound_cpus
    assert bound["policy"] == []


def test_permission_lost_while_undoing_is_said(tmp_path: Path, bound: dict[str, list[object]]) -> None:
    placement = checkin.Placement("bind", GPU, node=1, before={0: {0}})

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        checkin.release(placement)
    assert "Operation not permitted" in facts(placement)["not undone"]


def test_memory_policy_refused_leaves_cpus_bound_and_says_so(
    tmp_path: Path, bound: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise numa.NumaRefused("set_mempolicy: Operation not permitted")

    monkeypatch.setattr(numa, "set_policy", refuse)
    root = two_sockets(tmp_path).root
    placement = checkin.plan("bind", GPU, "1", root)
    checkin.bind(placement, root)
    assert placement.sentence == "bound to NUMA node 1: CPUs 8-15, memory not bound"
    assert "not bound: set_mempolicy" in facts(placement)["memory"]


def test_another_gpu_than_expected_undoes_the_binding(tmp_path: Path, bound: dict[str, list[object]]) -> None:
    root = two_sockets(tmp_path).root
    placement = checkin.plan("bind", GPU, "1", root)
    checkin.bind(placement, root)
    checkin.confirm(placement, "00000000:99:00.0")
    assert placement.bound_cpus
    checkin.confirm(placement, "00000000:18:00.0")
    assert not placement.bound_cpus
    assert "CUDA's GPU is 0000:18:00.0" in placement.sentence


def test_real_affinity_is_set_and_restored(tmp_path: Path) -> None:
    """The one thing every Linux lets a process do: bind itself to a CPU that it already has."""
    before = os.sched_getaffinity(0)
    cpu = min(before)
    placement = checkin.Placement("bind", GPU, node=0, cpus=frozenset([cpu]))
    try:
        checkin.bind(placement)
        assert placement.bound_cpus
        assert os.sched_getaffinity(0) == {cpu}
        if placement.bound_memory:
            assert numa.get_policy() == (numa.MPOL_PREFERRED, [0])
    finally:
        checkin.release(placement)
    assert os.sched_getaffinity(0) == before


def test_numa_maps_are_counted_by_node_and_page_size(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(
        "proc/self/numa_maps",
        "7f0000000000 default anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n"
        "7f0000200000 bind:1 huge anon=2 N1=2 kernelpagesize_kB=2048\n"
        "7f0000a00000 default file=/x mapped=4",
    )
    assert numa.pages_by_node(tmp_path) == {0: 1, 1: 2 + 2 * 512}
    assert numa.pages_by_node(tmp_path, 0x7F0000200010) == {1: 1024}
    assert numa.share_elsewhere({0: 1, 1: 3}, 1) == 0.25
    assert numa.share_elsewhere({}, 1) is None
    assert numa.pages_by_node(tmp_path / "none") is None


def test_closing_rows_tell_the_share_on_other_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/self/numa_maps", "7f0000000000 default N0=1 N1=9 kernelpagesize_kB=4")
    placement = checkin.Placement("report", GPU, node=1)
    rows = {r.fact: r.value for r in checkin.closing_rows(placement, 3, tmp_path)}
    assert rows == {"pages by node": "0: 1, 1: 9", "pages elsewhere": "10.0 %"}
    unknown = checkin.closing_rows(checkin.Placement("report", GPU), 3, tmp_path)
    assert [r.fact for r in unknown] == ["pages by node"]


class NearNode1(FakeNvml):
    """One GPU, at the bus id of `two_sockets`' node 1."""

    def nvmlDeviceGetPciInfo(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{GPU}")


@pytest.mark.parametrize(("mode", "told"), [("report", ["75.0 %"]), ("bind", ["75.0 %", "0.0 %"])])
def test_fresh_pages_are_told_with_and_without_the_binding(
    tmp_path: Path, bound: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch, mode: checkin.Mode, told: list[str]
) -> None:
    """Before the policy is set three pages of four go elsewhere, none after."""
    monkeypatch.setattr(numa, "probe_pages", lambda _: {1: 4} if bound["policy"] else {0: 3, 1: 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    nvml = Nvml(NearNode1(1))  # type: ignore[arg-type]
    placement = checkin.check_in(mode, 0, nvml=nvml, root=two_sockets(tmp_path).root)
    names = ["fresh pages elsewhere, unbound", "fresh pages elsewhere"]
    assert [facts(placement)[name] for name in names if name in facts(placement)] == told


def test_copies_from_each_nodes_memory_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_sockets(tmp_path)
    asked: list[int] = []

    @contextlib.contextmanager
    def on(node: int) -> Iterator[None]:
        asked.append(node)
        yield

    monkeypatch.setattr(numa, "memory_on", on)
    placement = checkin.plan("report", GPU, "", tmp_path)
    checkin.compare_host_memory(placement, lambda node: 50.0 - 20 * (node == 0), tmp_path)
    assert asked == [0, 1]
    assert [f[:2] for f in placement.facts if f[0].startswith("host to device")] == [
        ("host to device from another node 0", "30.0 GB/s"),
        ("host to device from own node 1", "50.0 GB/s"),
    ]


def test_one_node_and_refusals_compare_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_machine(tmp_path / "vm")
    alone = checkin.plan("report", "0000:00:06.0", "", tmp_path / "vm")
    checkin.compare_host_memory(alone, lambda _: 1 / 0, tmp_path / "vm")
    assert not any(f[0].startswith("host to device") for f in alone.facts)
    two_sockets(tmp_path / "two")

    def refused(_: int) -> None:
        raise numa.NumaRefused("not permitted")

    monkeypatch.setattr(numa, "memory_on", refused)
    placement = checkin.plan("report", GPU, "", tmp_path / "two")
    checkin.compare_host_memory(placement, lambda _: 1.0, tmp_path / "two")
    assert placement.facts[-1][:2] == ("host to device by node", "not measured: not permitted")

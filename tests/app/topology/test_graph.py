"""Paths, bottlenecks, flows and halves on graphs whose answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.app.analysis.views import CollectiveView
from costlab.app.topology.builder import Builder
from costlab.app.topology.graph import bisection, max_flow, multigraph, path, path_class, route
from costlab.app.topology.load import load_file, load_files
from costlab.app.topology.model import LinkKind, Topology
from costlab.app.topology.rates import Rate
from costlab.app.topology.use import hot, uses

DATA = Path(__file__).parent / "data"


def rate(gbps: float | None) -> Rate:
    return Rate(f"{gbps}", gbps, gbps, None)


def server(nvlink: float | None = None, sockets: float | None = 20.0) -> Topology:
    """Two sockets, two GPUs under a switch on each; with `nvlink`, GPUs of a socket are joined directly."""
    b = Builder("test")
    for numa in (0, 1):
        cpu = b.node(f"numa{numa}", "cpu", f"NUMA {numa}", numa=numa)
        switch = b.node(f"pci:{numa}", "pci", "switch", parent=cpu, numa=numa)
        b.both(cpu, switch, "pcie", rate(32.0))
        for n in (0, 1):
            gpu = b.node(f"gpu{2 * numa + n}", "gpu", f"GPU{2 * numa + n}", parent=switch, numa=numa)
            b.both(switch, gpu, "pcie", rate(16.0))
    b.both("numa0", "numa1", "numa", rate(sockets))
    for pair in (("gpu0", "gpu1"), ("gpu2", "gpu3")):
        if nvlink:
            b.both(*pair, "nvlink", rate(nvlink))
    return b.topology()


def test_path_and_bottleneck() -> None:
    way = path(server(), "gpu0", "gpu3")
    assert way is not None
    assert way.nodes == ["gpu0", "pci:0", "numa0", "numa1", "pci:1", "gpu3"]
    assert way.gbps == 16.0
    assert path_class(server(), "gpu0", "gpu3") == "SYS"
    assert path_class(server(), "gpu0", "gpu1") == "PIX"


def test_nvlink_goes_before_pcie_and_gpus_do_not_relay() -> None:
    topology = server(nvlink=100.0)
    direct = path(topology, "gpu0", "gpu1")
    assert direct is not None
    assert [x.kind for x in direct.links] == ["nvlink"]
    across = path(topology, "gpu0", "gpu2")
    assert across is not None
    assert not {"gpu1", "gpu3"} & set(across.nodes)


def test_unknown_bandwidths_are_counted_not_guessed() -> None:
    way = path(server(sockets=None), "gpu0", "gpu2")
    assert way is not None
    assert (way.gbps, way.unknown) == (16.0, 1)
    flow = max_flow(server(sockets=None), ["gpu0"], ["gpu2"])
    assert flow.gbps is None
    assert not flow.exact
    assert "2 links of unknown bandwidth" in flow.note


def test_no_path_is_none() -> None:
    topology = load_file(DATA / "azure-ncv4-graph.xml")
    assert path(topology, "gpu0", "gpu1") is None
    assert path(topology, "gpu0", "gpu0") is None


@pytest.mark.parametrize(
    ("sockets", "nvlink", "expected"), [(20.0, None, 20.0), (50.0, None, 32.0), (20.0, 100.0, 20.0)]
)
def test_bisection(sockets: float, nvlink: float | None, expected: float) -> None:
    flow = bisection(server(nvlink, sockets))
    assert flow is not None
    assert (flow.gbps, flow.exact) == (expected, True)
    if sockets == 20.0:
        assert set(flow.left) in ({"gpu0", "gpu1"}, {"gpu2", "gpu3"})


def test_bisection_of_many_gpus_says_that_it_is_a_bound() -> None:
    flow = bisection(load_file(DATA / "hwloc-nvidiaDGX2.xml"))
    assert flow is not None
    assert not flow.exact
    assert "upper bound" in flow.note
    assert bisection(Builder("test").topology()) is None


def test_max_flow_of_both_gpus_of_a_switch_is_the_switchs_uplink() -> None:
    assert max_flow(server(sockets=100.0), ["gpu0", "gpu1"], ["gpu2", "gpu3"]).gbps == 32.0
    assert max_flow(server(), ["gpu0"], ["gpu1"]).gbps == 16.0


def test_multigraph_has_every_link_with_its_weight() -> None:
    graph = multigraph(load_file(DATA / "rccl-topo_8p_940.xml"))
    assert graph.number_of_edges() == 154
    assert {d["weight"] for _, _, d in graph.edges(data=True) if d["kind"] == "xgmi"} == {1.0}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.5, 500)), min_size=1, max_size=20))
def test_flow_never_exceeds_what_leaves_or_enters(edges: list[tuple[int, int, float]]) -> None:
    b = Builder("test")
    for n in range(6):
        b.node(f"n{n}", "gpu" if n in (0, 5) else "nvswitch", f"n{n}")
    kind: LinkKind = "nvlink"
    for src, dst, gbps in edges:
        b.link(f"n{src}", f"n{dst}", kind, rate(gbps))
    topology = b.topology()
    flow = max_flow(topology, ["n0"], ["n5"]).gbps or 0.0
    out = sum(g for s, d, g in edges if s == 0 and d != 0)
    into = sum(g for s, d, g in edges if d == 5 and s != 5)
    assert flow <= min(out, into) * (1 + 1e-9)
    way = path(topology, "n0", "n5")
    assert (way is None) == (flow == 0.0)
    if way is not None:
        assert (way.gbps or 0.0) <= flow * (1 + 1e-9)


def collective(group: str, busbw: float, algbw: float) -> CollectiveView:
    return CollectiveView(
        kind="all_reduce", group=group, group_size=2, dtype="float32", calls=1.0, bytes_in=64_000_000,
        bytes_out=64_000_000, bytes_step=64_000_000, ms=1.0, transfer_ms=1.0, wait_ms=0.0, exposed_ms=0.0,
        algbw_gbps=algbw, busbw_gbps=busbw,
    )  # fmt: skip


def test_a_collective_travels_nccls_ring_and_its_share_is_of_the_slowest_link() -> None:
    topology = load_files([DATA / "h200x2-nccl-topo.xml", DATA / "h200x2-nccl-graph.xml"])
    (use,) = uses(topology, [collective("0,1", 225.0, 225.0), collective("0,1 … 2,3 (2 groups)", 1.0, 1.0)])
    assert use.share == pytest.approx(0.5)
    assert "first of 12 ring channels" in use.route.how
    assert use.ideal_ms == pytest.approx(64_000_000 / 450 / 1e6)
    assert hot([use])["gpu0", "nvswitch"] == pytest.approx(0.5)


def test_a_route_without_a_graph_says_what_it_assumes() -> None:
    way = route(server(), [0, 1, 2, 3])
    assert way is not None
    assert way.how.startswith("assumed")
    assert way.bottleneck is not None
    assert way.bottleneck.capacity == 16.0
    assert route(server(), [0]) is None
    assert route(server(), [0, 9]) is None

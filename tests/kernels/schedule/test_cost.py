"""Formulas against the simulator and against what is known in closed form; the simulator against itself."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.schedule.cost import CostModel
from costlab.kernels.schedule.errors import FabricError, ScheduleRefused
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.simulator import max_min, simulate
from costlab.kernels.schedule.topology import (
    Fabric,
    Link,
    Route,
    Segment,
    chain_order,
    from_dict,
    to_dict,
    uniform,
)

NVLINK = Link(3.4e-6, 370.8e9)  # NCCL 2.30's constants for a step on NVLink 4 and over a NIC
NDR = Link(14e-6, 48e9)
EDR = Link(14e-6, 12e9)
MIB = 1 << 20

FABRICS = {
    "4 NICs": uniform(8, 4, NVLINK, NDR, nics=4),
    "1 NIC": uniform(6, 4, NVLINK, NDR),
    "two hosts": uniform(2, 8, NVLINK, EDR),
    "slow NICs": uniform(8, 4, NVLINK, EDR, slow={3: 0.5, 5: 0.5}),
    "line": uniform(4, 8, NVLINK, Link(14e-6, 24e9), wiring="line"),
    "leaves": uniform(8, 4, NVLINK, NDR, nics=4, leaf=4, uplink=4 * 4 * 48e9 / 16),
    "host time": uniform(4, 4, NVLINK, NDR, nics=2, step=10e-6),
}


@pytest.mark.parametrize("name", FABRICS)
def test_formulas_agree_with_the_simulator(name: str) -> None:
    fabric = FABRICS[name]
    model, order = CostModel(fabric), chain_order(fabric)
    plans = [Plan("ring"), Plan("ring", chunks=4, channels=4), Plan("chain", chunks=16, order=order)]
    plans += [Plan("two-level", chunks=c) for c in (1, 8)] + [Plan("hybrid", chunks=c, order=order) for c in (1, 8, 32)]
    errors = []
    for nbytes in (MIB, 256 * MIB):
        for plan in plans:
            exact = simulate(fabric, plan, nbytes).seconds
            errors.append(abs(model.seconds(plan, nbytes) / exact - 1))
            assert exact >= model.bound(nbytes) * (1 - 1e-9)
    assert max(errors) < 0.22
    assert sum(errors) / len(errors) < 0.06


@settings(max_examples=60, deadline=None)
@given(
    segments=st.integers(1, 4),
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 6),
    nbytes=st.integers(4096, 1 << 24),
    schedule=st.sampled_from(["ring", "chain", "two-level", "hybrid"]),
    sharing=st.sampled_from(["queue", "fair"]),
    wiring=st.sampled_from(["switch", "line"]),
)
def test_nothing_beats_the_bound(
    segments: int, ranks: int, chunks: int, nbytes: int, schedule: str, sharing: str, wiring: str
) -> None:
    plain = uniform(segments, ranks, Link(1e-6, 5e9), Link(5e-6, 1e9), wiring=wiring)  # type: ignore[arg-type]
    fabric = from_dict({**to_dict(plain), "sharing": sharing})
    model = CostModel(fabric)
    plan = Plan(schedule, chunks=chunks)  # type: ignore[arg-type]
    bound = model.bound(nbytes)
    assert simulate(fabric, plan, nbytes).seconds >= bound * (1 - 1e-6)
    assert model.seconds(plan, nbytes) >= bound * 0.95


def test_a_ring_inside_one_host_is_the_textbook_formula() -> None:
    fabric = uniform(1, 8, NVLINK, NDR)
    nbytes = 512 * MIB
    slice_seconds = NVLINK.alpha + nbytes / 8 / NVLINK.bandwidth
    assert simulate(fabric, Plan("ring"), nbytes).seconds == pytest.approx(14 * slice_seconds, rel=1e-6)
    assert CostModel(fabric).seconds(Plan("ring"), nbytes) == pytest.approx(14 * slice_seconds, rel=1e-6)


def test_two_level_beats_ring_by_the_known_factor() -> None:
    """Between k = 2 hosts of g = 8 the NIC carries S instead of 15/8 S (BlueConnect)."""
    fabric = uniform(2, 8, NVLINK, EDR)
    nbytes = 1024 * MIB
    ring = simulate(fabric, Plan("ring"), nbytes).seconds
    two = simulate(fabric, Plan("two-level", chunks=16), nbytes).seconds
    assert ring / two == pytest.approx(15 / 8, rel=0.03)


def test_the_hybrid_wins_where_it_should() -> None:
    """On a line by up to 2(k-1)/k over two-level; on a symmetric switch it loses for more than two hosts."""
    nbytes = 1024 * MIB
    line, switch = uniform(4, 2, NVLINK, EDR, wiring="line"), uniform(4, 2, NVLINK, EDR)
    hybrid, two = Plan("hybrid", chunks=256), Plan("two-level", chunks=8)
    assert simulate(line, two, nbytes).seconds / simulate(line, hybrid, nbytes).seconds == pytest.approx(1.5, rel=0.05)
    assert simulate(switch, two, nbytes).seconds < simulate(switch, hybrid, nbytes).seconds


def test_a_slow_nic_belongs_at_the_end_of_a_chain() -> None:
    fabric = uniform(4, 2, NVLINK, EDR, slow={1: 0.25})
    order = chain_order(fabric)
    assert 1 in (order[0], order[-1])
    nbytes = 256 * MIB
    best = simulate(fabric, Plan("hybrid", chunks=128, order=order), nbytes).seconds
    plain = simulate(fabric, Plan("hybrid", chunks=128), nbytes).seconds
    assert plain / best == pytest.approx(2.0, rel=0.05)


def test_leaves_stay_together_in_a_chain() -> None:
    fabric = uniform(8, 2, NVLINK, NDR, leaf=4, uplink=24e9, slow={2: 0.5, 5: 0.5})
    order = chain_order(fabric)
    assert {order[0], order[-1]} == {2, 5}
    crossings = sum(a // 4 != b // 4 for a, b in pairwise(order))
    assert crossings == 1


def test_fair_shares_are_max_min() -> None:
    """Two flows over a link of 10 and one that only has a link of 3: 3, 5 and 5 of 10 (the third is elsewhere)."""
    routes = {
        1: Route((("a", 10.0),), 0.0),
        2: Route((("a", 10.0), ("b", 3.0)), 0.0),
        3: Route((("c", 4.0),), 0.0),
    }
    assert max_min(routes) == {1: 7.0, 2: 3.0, 3: 4.0}


def test_machine_shared_by_all_ranks_limits_the_sum() -> None:
    fabric = from_dict({**to_dict(uniform(1, 4, Link(0.0, 1e9), Link(0.0, 1e9))), "machine": 1e9})
    nbytes = 4 << 20
    assert simulate(fabric, Plan("ring"), nbytes).seconds == pytest.approx(4 * 6 / 4 * nbytes / 1e9, rel=1e-3)


def test_busiest_resource_is_named() -> None:
    fabric = uniform(2, 2, NVLINK, EDR)
    resource, share = simulate(fabric, Plan("two-level", chunks=8), 512 * MIB).busiest()
    assert resource in {(way, s, 0) for way in ("tx", "rx") for s in (0, 1)}
    assert 0.9 < share <= 1
    load = CostModel(fabric).pipeline(Plan("two-level")).busiest
    assert load.bytes_per_byte == pytest.approx(1.0)


def test_symmetric_memory_and_the_library() -> None:
    one_host, two_hosts = uniform(1, 8, NVLINK, NDR), uniform(2, 8, NVLINK, NDR)
    model = CostModel(one_host, memory=4e12)
    assert model.seconds(Plan("one-shot"), 4096) < model.seconds(Plan("two-shot"), 4096)
    assert model.seconds(Plan("two-shot"), 64 * MIB) < model.seconds(Plan("one-shot"), 64 * MIB)
    with pytest.raises(ScheduleRefused, match="one segment"):
        CostModel(two_hosts).seconds(Plan("one-shot"), 4096)
    many = uniform(64, 8, NVLINK, NDR, nics=8)
    tree, ring = (CostModel(many, library).seconds(Plan("backend"), MIB) for library in ("nccl", "gloo"))
    assert tree < ring / 3, "a tree's latency grows with the logarithm"


def test_fabric_descriptions() -> None:
    fabric = FABRICS["leaves"]
    assert from_dict(to_dict(fabric)) == fabric
    assert fabric.route(0, 1).alpha == NVLINK.alpha
    with pytest.raises(FabricError, match="KeyError"):
        from_dict({"segments": [{"ranks": [0]}]})
    with pytest.raises(FabricError, match="bandwidth"):
        Link(0.0, 0.0)
    with pytest.raises(FabricError, match="two segments"):
        Fabric((Segment((0, 1), NVLINK, NDR), Segment((1,), NVLINK, NDR)))
    with pytest.raises(FabricError, match=r"0\.\.N-1"):
        Fabric((Segment((0, 2), NVLINK, NDR),))
    with pytest.raises(FabricError, match="belong together"):
        uniform(2, 2, NVLINK, NDR, leaf=2)


def test_nothing_to_reduce_takes_no_time() -> None:
    assert CostModel(uniform(1, 1, NVLINK, NDR)).seconds(Plan("ring"), MIB) == 0
    assert CostModel(FABRICS["1 NIC"]).seconds(Plan("hybrid"), 0) == 0
    assert simulate(FABRICS["1 NIC"], Plan("hybrid"), 0).seconds == 0


def test_planning_does_not_import_torch() -> None:
    names = ("planner", "cost", "simulator", "topology", "plan", "program", "segmented", "seed_table", "errors")
    code = (
        "\n".join(f"import costlab.kernels.schedule.{n}" for n in names) + "\nimport sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

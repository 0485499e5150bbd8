"""Rates and statuses from layer traffic."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.probes.fusion.model import GraphSpan, LayerTraffic, Lost
from costlab.probes.fusion.rates import (
    Instance,
    Tally,
    by_class,
    inclusive,
    per_layer,
    serving_root,
    static_instances,
    status,
    statuses,
    total,
)

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be shared


def lost(nbytes: int, *, addressable: bool = True, cause: str = "layout_copy") -> Lost:
    return Lost("", cause, addressable, nbytes)


def graph(root: str, phase: str = "forward", compile_id: str = "0/0", **layers: LayerTraffic) -> GraphSpan:
    return GraphSpan(compile_id, phase, root, "Block", layers={k.replace("_", "."): v for k, v in layers.items()})


def traffic(read: int, written: int, *items: Lost) -> LayerTraffic:
    return LayerTraffic("", read + written, list(items), ops=1, read=read, written=written)


def test_a_shared_graph_counts_for_each_of_its_blocks() -> None:
    g = graph("layers.0", mlp=traffic(60, 40, lost(20), lost(30, addressable=False, cause="through_extern")))
    own = per_layer([Instance(g, "layers.0", "forward", 1), Instance(g, "layers.5", "forward", 2)])["forward"]
    assert own["layers.0.mlp"].rate == pytest.approx(0.8)
    assert own["layers.0.mlp"].strict_rate == pytest.approx(0.5)
    assert own["layers.5.mlp"].actual == 200
    assert own["layers.5.mlp"].main_cause == "layout_copy"


def test_parents_include_their_children() -> None:
    own = {"layers.0.mlp": Tally(read=60, addressable=60), "layers.1": Tally(read=40)}
    whole = inclusive(own)
    assert set(whole) == {"", "layers", "layers.0", "layers.0.mlp", "layers.1"}
    assert whole[""].actual == 100 and whole["layers.0"].rate == 0.0


def test_classes_sum_to_the_step() -> None:
    own = {"a": Tally(read=60, addressable=6), "b": Tally(written=40), "c": Tally(read=5)}
    sums = by_class(own, {"a": "mlp", "b": "mlp"})
    assert sums["mlp"].rate == pytest.approx(0.94)
    assert total(sums.values()).actual == total(own.values()).actual


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (Tally(), "complete"),
        (Tally(read=100), "complete"),
        (Tally(read=100, structural=99), "complete"),
        (Tally(read=100, addressable=5), "complete"),
        (Tally(read=100, addressable=6), "partial"),
        (Tally(read=100, addressable=50), "partial"),
        (Tally(read=100, addressable=51), "broken"),
        (Tally(read=100, hard={"graph_break"}), "broken"),
        (Tally(read=10, addressable=10), "partial"),
        (Tally(read=10, hard={"graph_break"}), "complete"),
    ],
)
def test_status_with_a_floor_of_ten_bytes(tally: Tally, expected: str) -> None:
    assert status(tally, 10) == expected


def test_a_layer_with_a_broken_one_inside_is_not_complete() -> None:
    own = {"layers.0.mlp": Tally(read=10, addressable=10), "layers.0.attn": Tally(read=990)}
    verdicts = statuses(own, 1)
    assert verdicts == {
        "layers.0.mlp": "broken",
        "layers.0.attn": "complete",
        "layers.0": "partial",
        "layers": "partial",
        "": "partial",
    }


def test_what_breaks_a_layer_breaks_not_its_parent() -> None:
    own = {"layers.0": Tally(read=10, hard={"graph_break"}), "head": Tally(read=100)}
    assert statuses(own, 1) == {"layers.0": "broken", "layers": "partial", "head": "complete", "": "partial"}


def test_a_small_addressable_cause_does_not_hide_the_real_one() -> None:
    tally = Tally(read=1000, addressable=1, structural=400)
    tally.causes.update({(True, "layout_copy"): 1, (False, "reduction_shape"): 400})
    assert tally.main_cause == "reduction_shape"
    tally.causes[True, "layout_copy"] = 20
    assert tally.main_cause == "layout_copy"
    tally.hard.add("device_copy")
    assert tally.main_cause == "device_copy"


def test_without_launches_each_block_counts_once() -> None:
    blocks = [f"layers.{i}" for i in range(12)]
    first, wide = graph("layers.0"), graph("layers.5", compile_id="0/1")
    found = static_instances([first, wide, graph("head")], blocks)
    served = {i.base: i.graph.root for i in found}
    assert [served[b] for b in blocks] == ["layers.0"] * 5 + ["layers.5"] * 7
    assert served["head"] == "head"


def test_an_old_compile_is_left_out() -> None:
    old = graph("layers.0")
    old.superseded = True
    assert [i.graph.compile_id for i in static_instances([old, graph("layers.0", compile_id="0/1")], ["layers.0"])] == [
        "0/1"
    ]


def test_which_compile_serves_a_block() -> None:
    assert serving_root("layers.7", ["layers.0", "layers.5", "layers.10"]) == "layers.5"
    assert serving_root("layers.1", ["layers.2"]) == "layers.2"


@BUSY
@given(
    st.lists(st.tuples(st.sampled_from(["a", "a.b", "a.c", "d"]), st.integers(0, 99), st.integers(0, 99)), max_size=8)
)
def test_the_model_is_the_sum_of_its_layers(rows: list[tuple[str, int, int]]) -> None:
    own: dict[str, Tally] = {}
    for layer, read, share in rows:
        own.setdefault(layer, Tally()).__iadd__(Tally(read=read, addressable=min(read, share)))
    whole = inclusive(own)
    if own:
        assert whole[""].actual == sum(t.actual for t in own.values())
        assert whole[""].addressable == sum(t.addressable for t in own.values())
    assert all(t.rate is None or 0 <= t.rate <= 1 for t in whole.values())

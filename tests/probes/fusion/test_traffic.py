"""The traffic model on graphs made by hand: each byte counted once, each lost one with its cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.probes.fusion.causes import STRUCTURAL
from costlab.probes.fusion.facts import GraphFacts, SchedKernel, SchedOp
from costlab.probes.fusion.ledger import Charge
from costlab.probes.fusion.trace import build
from costlab.probes.fusion.traffic import TrafficModel

from .graphs import Builder

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be shared


def judged(facts: GraphFacts) -> TrafficModel:
    trace = build([facts], [], Counter())
    assert len(trace.graphs) == 1
    return TrafficModel(facts).run()


def mlp(model: TrafficModel) -> Charge:
    return model.ledger.layers["mlp"]


def test_one_kernel_reads_once_and_writes_once() -> None:
    g = Builder()
    x = g.input("x")
    a = g.node("sin", x)
    b = g.node("cos", a, kernel=a)
    charge = mlp(judged(g.done(b)))
    assert (charge.read, charge.written, charge.addressable, charge.structural) == (1000, 1000, 0, 0)


def test_two_kernels_lose_a_write_and_a_read() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    b = g.node("cos", a)
    g.reject("sin", "cos", "memory deps did not match")
    model = judged(g.done(b))
    assert (mlp(model).actual, mlp(model).addressable) == (4000, 2000)
    assert {(x.cause, x.producer_source, x.consumer_source) for x in model.ledger.lost} == {
        ("layout_mismatch", "model.py:1", "model.py:2")
    }


def test_the_last_reason_counts() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    b = g.node("cos", a)
    g.reject("sin", "cos", "memory deps did not match")
    g.reject("sin", "cos", "exceeds max fusion")
    assert set(mlp(judged(g.done(b))).causes) == {"heuristic_limit"}


def test_an_indexing_reason_counts_for_the_tensor_in_question() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    b = g.node("cos", a)
    g.reject("sin", "cos", "indexing: {'x': 'broadcast', 'buf_sin': 'Mismatch loop orders: 100%'}")
    model = judged(g.done(b))
    assert set(mlp(model).causes) == {"layout_mismatch"}
    assert model.ledger.lost[0].reason == "indexing: Mismatch loop orders: 100%"


def test_a_pair_that_was_never_tried() -> None:
    g = Builder()
    b = g.node("cos", g.node("sin", g.input("x")))
    assert set(mlp(judged(g.done(b))).causes) == {"not_attempted"}


def test_a_product_between_is_structural() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    w = g.node("mm", a, g.input("w"), kind="extern")
    model = judged(g.done(g.node("add", w, a)))
    # `sin` is read again after the product: one read that no fusion removes; its write the product needs anyway.
    assert dict(mlp(model).causes) == {"through_extern": 1000}
    assert (mlp(model).addressable, mlp(model).structural) == (0, 1000)
    assert model.ledger.lost[0].reason == "aten.mm.default lies between"


def test_a_collective_between_says_so() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    c = g.node("all_reduce", a, kind="collective", namespace="collective")
    assert dict(mlp(judged(g.done(g.node("add", c, a)))).causes) == {"collective_boundary": 1000}


def test_a_copy_to_another_device_breaks_the_layer() -> None:
    g = Builder()
    a = g.node("sin", g.input("x"))
    c = g.node("device_put", a, kind="device_copy", namespace="prims")
    d = g.node("device_put_1", g.node("sigmoid", c), kind="device_copy", packet="device_put", namespace="prims")
    facts = g.done(g.node("mul", d))
    model = judged(facts)
    assert model.ledger.hard_causes() == {"mlp": ["device_copy"]}
    trace = build([facts], [], Counter())
    assert trace.graphs[0].hard == {"mlp": ["device_copy"]}
    found = [p for p in trace.antipatterns if p.kind == "cross_device"]
    assert {p.layer for p in found} == {"layers.0.mlp"}
    assert {p.source for p in found} == {
        facts.nodes[n].stack.split(", ")[1].replace("line ", "model.py:") for n in (c, d)
    }


@pytest.mark.parametrize(
    ("packet", "namespace", "cause"),
    [
        ("rand_like", "aten", "rng_fallback"),
        ("topk", "aten", "library_op"),
        ("sorted", "prims", "library_op"),
        ("secret", "mine", "opaque_op"),
    ],
)
def test_library_calls_by_what_they_are(packet: str, namespace: str, cause: str) -> None:
    g = Builder()
    f = g.node("f", g.node("sin", g.input("x")), kind="extern", packet=packet, namespace=namespace)
    charge = mlp(judged(g.done(g.node("cos", f))))
    assert set(charge.causes) == {cause}
    assert bool(charge.structural) == (cause in STRUCTURAL)


def test_an_input_is_ideally_read_once() -> None:
    g = Builder()
    x = g.input("x")
    a, b = g.node("sin", x), g.node("cos", x)
    g.reject("sin", "cos", "nodes numel incompatibility")
    charge = mlp(judged(g.done(a, b)))
    assert (charge.read, charge.addressable) == (2000, 1000)


def test_slices_of_an_input_are_not_read_twice() -> None:
    g = Builder()
    x = g.input("x")
    halves = [g.node(f"slice_{i}", x, packet="slice", view=True, nbytes=500) for i in range(2)]
    a, b = (g.node(n, h, nbytes=500) for n, h in zip(("sin", "cos"), halves, strict=True))
    charge = mlp(judged(g.done(a, b)))
    assert (charge.read, charge.addressable) == (1000, 0)


def test_a_copy_of_a_product_is_lost_whole() -> None:
    g = Builder()
    w = g.node("mm", g.input("x"), g.input("w"), kind="extern")
    t = g.node("permute", w, packet="permute", view=True)
    c = g.node("clone", t)
    model = judged(g.done(g.node("mm_1", c, g.input("v"), kind="extern", packet="mm")))
    assert model.kinds[1] == "layout_copy"
    assert (mlp(model).actual, mlp(model).addressable) == (2000, 2000)
    assert set(mlp(model).causes) == {"layout_copy"}


def test_the_reader_of_a_copy_would_have_read_its_source() -> None:
    g = Builder()
    w = g.node("mm", g.input("x"), g.input("w"), kind="extern")
    c = g.node("clone", w)
    charge = mlp(judged(g.done(g.node("sin", c))))
    assert (charge.actual, charge.addressable) == (4000, 2000)


def test_a_copy_that_inductor_inserted_belongs_to_the_call_it_was_made_for() -> None:
    g = Builder()
    x = g.input("x")
    g.node("attention", x, g.input("w"), kind="extern", packet="attention", layer="L['self'].attn")
    facts = g.done("attention")
    call = facts.ops["op0"]
    facts.ops = {
        "copy": SchedOp("copy", 1, "loop", ("buf_copy",), {"x": {1: 1000}}, ("attention",), ""),
        "op0": replace(call, reads=call.reads | {"buf_copy": {0: 0}}),
    }
    facts.kernels.append(SchedKernel(1, "pointwise", "cuda", ("copy",), 1000, 1000))
    model = judged(facts)
    assert model.kinds == {0: "extern", 1: "layout_copy"}
    charge = model.ledger.layers["attn"]
    assert (charge.actual, charge.addressable) == (2000, 2000)
    assert "strides that aten.attention.default needs" in model.ledger.lost[0].reason
    (span,) = (k for k in build([facts], [], Counter()).graphs[0].kernels if k.kind == "layout_copy")
    assert span.layer == "attn"


def test_a_second_pass_of_a_reduction_is_no_copy() -> None:
    g = Builder()
    total = g.node("sum", g.input("x"), kind="reduction", nbytes=10)
    facts = g.done(total)
    facts.ops["second"] = SchedOp("second", 1, "loop", ("buf_2",), {"buf_sum": {1: 10}}, ("sum",), "")
    facts.kernels.append(SchedKernel(1, "pointwise", "cuda", ("second",), 10, 10))
    assert judged(facts).kinds[1] == "pointwise"


def test_casting_an_input_is_policy_and_between_products_is_not() -> None:
    g = Builder()
    weight = g.node("_to_copy", g.input("w"), nbytes=500, dtype="bfloat16", packet="_to_copy")
    y = g.node("mm", g.input("x"), weight, kind="extern", nbytes=500)
    up = g.node("convert_element_type", y, packet="convert_element_type", namespace="prims")
    facts = g.done(g.node("mm_1", up, g.input("v"), kind="extern", packet="mm"))
    charge = mlp(judged(facts))
    assert charge.causes == {"dtype_copy": 3000}
    assert (charge.structural, charge.addressable) == (1500, 1500)


def test_a_reduction_between_excuses_a_loop_mismatch() -> None:
    g = Builder()
    e = g.node("exp", g.input("x"))
    s = g.node("sum", e, kind="reduction", nbytes=10)
    d = g.node("div", e, s)
    g.reject("exp", "div", "numel/rnumel mismatch (non-reduce) (%s, %s), (%s, %s)")
    g.reject("exp", "sum", "numel/rnumel mismatch (reduce) (%s, %s), (%s, %s)")
    g.reject("sum", "div", "numel/rnumel mismatch (reduce) (%s, %s), (%s, %s)")
    charge = mlp(judged(g.done(d)))
    assert set(charge.causes) == {"reduction_shape"}
    assert charge.addressable == 0


def test_gradients_without_a_module_take_a_neighbours_layer() -> None:
    g = Builder()
    a = g.node("mul", g.input("x"))
    g.node("add", a, kernel=a, layer="?")
    b = g.node("cos", "add", kernel=a, layer="L['self'].norm")
    model = judged(g.done(b))
    assert model.facts.nodes["add"].layer == "norm"


@BUSY
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.lists(st.integers(0, 30), max_size=12))
def test_no_more_is_lost_than_moved(fused: list[bool], extra: list[int]) -> None:
    g = Builder()
    names = [g.input("x")]
    for i, joined in enumerate(fused):
        also = [names[extra[i] % len(names)]] if i < len(extra) else []
        previous = names[-1]
        share = previous if joined and i else ""
        names.append(
            g.node(f"n{'abcdefghijkl'[i]}", previous, *dict.fromkeys(a for a in also if a != previous), kernel=share)
        )
    model = TrafficModel(_resolved(g.done(names[-1]))).run()
    for charge in (*model.ledger.layers.values(), *model.ledger.kernels.values()):
        assert 0 <= charge.addressable + charge.structural <= charge.actual
    by_kernel = sum(c.actual for c in model.ledger.kernels.values())
    assert by_kernel == sum(c.actual for c in model.ledger.layers.values())
    assert sum(x.bytes for x in model.ledger.lost) == sum(c.addressable for c in model.ledger.layers.values())
    if all(fused):
        assert model.ledger.lost == []


def _resolved(facts: GraphFacts) -> GraphFacts:
    from costlab.probes.fusion.ownership import resolve_layers

    resolve_layers(facts)
    return facts


def test_a_graph_that_cannot_be_judged_costs_only_itself() -> None:
    good, bad = Builder(), Builder()
    b = good.node("sin", good.input("x"))
    bad.node("sin", bad.input("x"))
    broken = bad.done("sin")
    broken.kernels.clear()
    errors: Counter[str] = Counter()
    trace = build([broken, good.done(b)], [], errors)
    assert len(trace.graphs) == 1
    assert sum(errors.values()) == 1

"""Attention's operations are counted from its shapes, whichever library runs it and with fewer key heads too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from costlab.probes.fusion.extract import attention_flops
from costlab.probes.fusion.inductor import FusionCollector

LIBRARIES = ("flash", "efficient", "cudnn", "fused")


def node(*shapes: tuple[int, ...]) -> Any:
    """A call with operands of these shapes."""
    graph = torch.fx.Graph()
    operands = [graph.placeholder(f"a{i}") for i in range(len(shapes))]
    for operand, shape in zip(operands, shapes, strict=True):
        operand.meta["val"] = torch.empty(shape, device="meta")
    return SimpleNamespace(args=(*operands, None, True), meta={})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("key_heads", [8, 2, 1])
def test_forward_and_backward_by_hand(library: str, key_heads: int) -> None:
    q, kv, out = (2, 8, 32, 16), (2, key_heads, 48, 16), (2, 8, 32, 16)
    name = f"_scaled_dot_product_{library}_attention"
    assert attention_flops(name, node(q, kv, kv)) == 2 * 2 * 8 * 32 * 48 * (16 + 16)
    assert attention_flops(f"{name}_backward", node(out, q, kv, kv)) == 2 * 2 * 8 * 32 * 48 * 5 * 16


def test_torchs_own_formula_where_it_has_one() -> None:
    q, v = (2, 4, 16, 8), (2, 4, 16, 8)
    assert attention_flops("_scaled_dot_product_flash_attention", node(q, q, v)) == sdpa_flop_count(q, q, v)
    backward = attention_flops("_scaled_dot_product_flash_attention_backward", node(v, q, q, v))
    assert backward == sdpa_backward_flop_count(v, q, q, v)


def test_operands_in_another_layout_are_left_to_torch() -> None:
    assert attention_flops("_scaled_dot_product_x", node((32, 8, 16), (32, 8, 16), (32, 8, 16))) == 0


class Mixed:
    """A code generator that defines a kernel and two epilogues and names only the epilogues, as Inductor's does."""

    def __init__(self, collector: FusionCollector, live: Any, tell: bool) -> None:
        self.define = collector._defined(lambda name: name)
        self.codegen = collector._mix_order(self.original)
        self.live, self.tell = live, tell

    def original(self, _backend: Any, _node: Any) -> str:
        for name in ("triton_per_main", "triton_poi_epilogue"):
            self.define(name)
        if self.tell:
            self.live.facts.calls.append(("triton_poi_epilogue", ("op2",)))
        return "done"


@pytest.mark.parametrize("tell", [True, False])
def test_a_mix_order_kernel_is_named_before_its_epilogues(tell: bool) -> None:
    collector = FusionCollector()
    live = SimpleNamespace(facts=SimpleNamespace(calls=[("triton_before", ("op0",))]))
    collector._local.live = live
    mixed = Mixed(collector, live, tell)
    nodes = [SimpleNamespace(get_name=lambda: "op1"), SimpleNamespace(get_name=lambda: "op2")]
    assert mixed.codegen(None, SimpleNamespace(get_nodes=lambda: nodes)) == "done"
    expected = [("triton_before", ("op0",)), ("triton_per_main", ("op1", "op2"))]
    assert live.facts.calls == expected + ([("triton_poi_epilogue", ("op2",))] if tell else [])
    mixed.define("triton_later")  # outside a mix-order kernel nothing is kept
    assert len(live.facts.calls) == len(expected) + tell

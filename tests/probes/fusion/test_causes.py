"""Scheduler reasons become causes."""

from __future__ import annotations

import inspect
import re

import pytest
from torch._inductor import scheduler

from costlab.probes.fusion.causes import CAUSES, HARD, STRUCTURAL, addressable, cause_of, mend_of, text_of
from costlab.probes.fusion.why import Reasons

from .graphs import Builder


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("device mismatch (%s vs %s)", "device_mismatch"),
        ("numel/rnumel mismatch (reduce) (%s, %s), (%s, %s)", "reduction_shape"),
        ("numel/rnumel mismatch (non-reduce) (%s, %s), (%s, %s)", "iteration_shape"),
        ("numel/rnumel mismatch prologue mismatch (%s, %s), (%s, %s)", "iteration_shape"),
        ("Split scan cannot fuse with reductions", "reduction_shape"),
        ("memory deps did not match", "layout_mismatch"),
        ("nodes numel/rnumel incompatibility", "layout_mismatch"),
        ("tiling mismatch (%s, %s, %s)", "layout_mismatch"),
        ("intermediate nodes between node1 & node2", "data_dependency"),
        ("will create cycle", "data_dependency"),
        ("node1 is extern but not a triton kernel", "extern_boundary"),
        ("template epilogue not satisfied", "extern_boundary"),
        ("prologue fusion turned off", "extern_boundary"),
        ("exceeds max fusion", "heuristic_limit"),
        ("Fusion will increase peak memory", "heuristic_limit"),
        ("register spilling of the fused kernel", "heuristic_limit"),
        ("grouped node must not be fused with other nodes", "config_off"),
        ("fusion for buffer explicit disabled", "config_off"),
        ("foreach do not have same length", "foreach"),
        ("candidate producer is a reduction, foreach ops cannot be fused with reductions currently", "reduction_shape"),
        ("no shared data", "no_shared_data"),
        ("no shared data due to indexing mismatch", "layout_mismatch"),
        ("indexing: {'buf1': 'broadcast'}", "iteration_shape"),
        ("indexing: {'buf1': 'different offset: 0 v.s. 64'}", "layout_mismatch"),
        ("backend: CppScheduling gave no reason", "backend_loop_mismatch"),
        ("a reason nobody has seen", "other"),
    ],
)
def test_reasons(reason: str, cause: str) -> None:
    assert cause_of(reason) == cause


def test_every_reason_of_the_running_scheduler_has_a_cause() -> None:
    source = inspect.getsource(scheduler)
    # Each literal that the fusion code hands to a WhyNoFuse; overlap scheduling has a `why` of its own.
    found = re.findall(r'\bwhy\(\s*"([^"]+)"', source)
    assert len(found) > 20
    unknown = [r for r in found if cause_of(r) == "other" and "overlap" not in r]
    assert unknown == []


def test_every_cause_explains_itself() -> None:
    for cause in CAUSES:
        assert text_of(cause) and mend_of(cause)
    assert text_of("no such cause") == CAUSES["other"].text


def test_nothing_is_excused_unless_it_is_structural() -> None:
    assert STRUCTURAL.isdisjoint(HARD)
    assert all(addressable(c) == (c not in STRUCTURAL) for c in CAUSES)
    assert addressable("no such cause")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        # The rows of a column sum, filled up to three parts: the loop's order decides, and a reduction stands there.
        ("different numel: 4096*s77 v.s. 384*(((32*s77 + 2)//3))", "reduction_shape"),
        ("different numel: 128*s27*s77 v.s. 256*(((s27*s77 + 1)//2))", "reduction_shape"),
        ("different numel: 32896 v.s. 384*86", "reduction_shape"),
        # Twice as many elements are another loop, which the user may change.
        ("different numel: 4096*s77 v.s. 8192*s77", "iteration_shape"),
        ("different numel: 4096*s77 v.s. __import__('os')", "iteration_shape"),
        ("different numel: 4096*s77 v.s. 1//0", "iteration_shape"),
    ],
)
def test_a_split_reduction_that_was_filled_up_is_no_other_loop(reason: str, cause: str) -> None:
    b = Builder()
    b.input("x")
    b.node("mul", "x")
    b.node("sum", "mul", kind="reduction")
    b.reject("mul", "sum", f"indexing: {{'buf_mul': '{reason}'}}" if "'" not in reason else f"indexing: {reason}")
    ops = {o.origin: o.name for o in b.facts.ops.values()}
    assert Reasons(b.facts).why(ops["mul"], ops["sum"], {"buf_mul"})[0] == cause

"""A real two-rank CPU trace: per-block compiled FSDP2 over gloo, torch 2.13, one step, names of no one in it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse, rows
from costlab.probes.trace.model import RankTrace

DATA = Path(__file__).parent / "data"
BLOCK, ROOT = 45184 * 4, 16384 * 4  # bytes of gathered parameters: 2 blocks, and embedding with head


@pytest.fixture(scope="module", params=[0, 1])
def trace(request: pytest.FixtureRequest) -> RankTrace:
    path = DATA / f"gloo_fsdp2_rank{request.param}.json.gz"
    result = analyse(kineto.read(path), device="cpu", blocks=["layers.0", "layers.1"])
    assert result.rank == request.param
    return result


def test_nothing_is_missing(trace: RankTrace) -> None:
    assert trace.problems == []
    assert [w.step for w in trace.steps] == [1]


def test_collectives_are_those_of_fsdp2(trace: RankTrace) -> None:
    """gloo names its reduce-scatters all_reduce; the operator that issued them says what they are."""
    calls = [(x.kind, x.layer, x.phase, max(x.bytes_in or 0, x.bytes_out or 0)) for x in trace.collectives]
    assert calls == [
        ("all_gather", "", "forward", ROOT),
        ("all_gather", "layers.0", "forward", BLOCK),
        ("all_gather", "layers.1", "forward", BLOCK),
        ("all_gather", "layers.1", "backward", BLOCK),
        ("all_gather", "layers.0", "backward", BLOCK),
        ("reduce_scatter", "layers.1", "backward", BLOCK),
        ("reduce_scatter", "layers.0", "backward", BLOCK),
        ("reduce_scatter", "", "backward", ROOT),
    ]
    assert {(x.group, x.group_size, x.dtype) for x in trace.collectives} == {("0,1", 2, "float32")}
    assert [x.seq for x in trace.collectives] == list(range(8))
    for x in trace.collectives:
        assert (x.bytes_in, x.bytes_out) in (
            (BLOCK, BLOCK // 2),
            (BLOCK // 2, BLOCK),
            (ROOT, ROOT // 2),
            (ROOT // 2, ROOT),
        )


def test_compiled_kernels_belong_to_their_block(trace: RankTrace) -> None:
    inductor = [x for x in trace.launches if x.name.startswith("graph_0_cpp")]
    assert {(x.layer, x.frame, x.compiled, x.category) for x in inductor} == {
        ("layers.0", "layers.0", True, "memory"),
        ("layers.1", "layers.1", True, "memory"),
    }
    assert Counter((x.phase, x.layer) for x in inductor) == {
        ("forward", "layers.0"): 4,
        ("forward", "layers.1"): 4,
        ("backward", "layers.0"): 5,
        ("backward", "layers.1"): 5,
    }
    hooks = [x for x in trace.launches if x.name == "aten::split_with_sizes_copy"]
    assert hooks and not any(x.compiled or x.frame for x in hooks)


def test_products_are_counted_once_and_by_layer(trace: RankTrace) -> None:
    products = Counter((x.name, x.phase, x.layer) for x in trace.launches if x.category == "matmul")
    block = {
        ("aten::mm", "forward"): 3,
        ("aten::mm", "backward"): 6,
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "forward"): 1,
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "backward"): 1,
    }
    expected = {(*key, layer): n for key, n in block.items() for layer in ("layers.0", "layers.1")}
    assert products == expected | {("aten::mm", "forward", "head"): 1, ("aten::mm", "backward", "head"): 2}


def test_launches_do_not_overlap_on_the_training_thread(trace: RankTrace) -> None:
    ordered = sorted((x for x in trace.launches if x.category != "communication"), key=lambda x: x.start)
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(ordered))


def test_collectives_are_launches_too(trace: RankTrace) -> None:
    found = Counter((x.name, x.op, x.phase) for x in trace.launches if x.category == "communication")
    assert found == {
        ("gloo:all_gather", "c10d::_allgather_base_", "forward"): 3,
        ("gloo:all_gather", "c10d::_allgather_base_", "backward"): 2,
        ("gloo:all_reduce", "c10d::_reduce_scatter_base_", "backward"): 3,
    }


def test_parts_sum_to_the_step(trace: RankTrace) -> None:
    collectives, parts = rows(trace, 0)
    window = trace.steps[0]
    by_name = {p.name: p.ms for p in parts}
    assert sum(by_name.values()) == pytest.approx((window.end - window.start) / 1000)
    assert by_name["matrix math"] == pytest.approx(
        sum(x.dur for x in trace.launches if x.category == "matmul") / 1000, rel=1e-6
    )
    assert by_name["exposed communication"] == pytest.approx(sum(c.exposed_ms for c in collectives))
    assert by_name["framework overhead"] > 0

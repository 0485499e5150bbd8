"""Graph breaks, recompiles and loops as anti-patterns; what a model's graphs show is in the truth set."""

from __future__ import annotations

import pytest

from costlab.probes.fusion.antipatterns import KINDS, break_kind, from_breaks, from_recompiles, merge
from costlab.probes.fusion.model import AntiPattern, GraphBreak, GraphSpan, LayerTraffic, Lost
from costlab.probes.sources import OWN_BUCKETS


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "item"),
        ("Data-dependent branching", "data_dependent"),
        ("generic_jump TensorVariable()", "data_dependent"),
        ("Dynamic shape operator", "data_dependent"),
        ("Operator does not support running with fake tensors", "op_without_fake"),
        ("Failed to trace builtin operator\n  Explanation: ... `print` ...", "print"),
        ("Attempted to call function marked as skipped", "graph_break"),
        (OWN_BUCKETS, "bucket_cut"),
    ],
)
def test_breaks_by_the_tracers_words(reason: str, kind: str) -> None:
    assert break_kind(reason) == kind


def test_a_break_carries_its_line_layer_and_bytes() -> None:
    graph = GraphSpan("0/0", "forward", "blocks.0", "Block", layers={"": LayerTraffic("")})
    graph.layers[""].lost.append(Lost("", "graph_break", True, 200, culprit_source="m.py:9"))
    broken = GraphBreak("Data-dependent branching\nmore", ["train.py:1", "m.py:9"], count=3, layer="blocks.0")
    (found,) = from_breaks([broken], [graph])
    assert (found.kind, found.layer, found.source, found.bytes, found.count) == (
        "data_dependent",
        "blocks.0",
        "m.py:9",
        200,
        3,
    )
    assert "more" not in found.text
    assert found.mend == KINDS["data_dependent"].mend


def test_recompiles_count_those_of_one_module() -> None:
    graphs = [GraphSpan(f"0/{i}", "forward", "blocks.0", "Block", superseded=i < 2) for i in range(3)]
    graphs.append(GraphSpan("1/0", "forward", "head", "Linear"))
    (found,) = from_recompiles(graphs)
    assert (found.layer, found.count) == ("blocks.0", 2)


def test_equal_findings_are_one() -> None:
    rows = [AntiPattern("mutation", "a", "m.py:1", "t", "m", nbytes, "forward") for nbytes in (1, 5)]
    rows.append(AntiPattern("mutation", "a", "m.py:2", "t", "m", 9, "forward"))
    assert [(x.source, x.bytes, x.count) for x in merge(rows)] == [("m.py:2", 9, 1), ("m.py:1", 6, 2)]

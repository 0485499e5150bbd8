"""From span, miss and kernel tables to the fusion view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costlab.app.analysis.fusion import fusion_view, rooted
from costlab.app.analysis.views import FusionView
from costlab.app.store import Run
from costlab.probes.records import KernelRow, MissRow, SpanRow, WorkloadFacts
from tests.app.analysis.tables import frame
from tests.app.make_run import write_example_run

FACTS = WorkloadFacts(copy_gbps=1000.0)


def span(kind: str, path: str, parent: str | None, **values: Any) -> SpanRow:
    base: dict[str, Any] = {"trace_id": "t", "rank": 0, "name": path, "phase": "forward"}
    return SpanRow(kind=kind, span_id=f"{kind}:{path}", parent_span_id=parent, **(base | values))  # type: ignore[arg-type]


def kernel(name: str, layer: str, ms: float = 1.0, **values: Any) -> KernelRow:
    return KernelRow(rank=0, name=name, category="memory", layer=layer, phase="forward", calls=1.0, ms=ms, **values)


def view_of(spans: list[SpanRow], misses: list[MissRow], kernels: list[KernelRow]) -> FusionView:
    view = fusion_view(frame(SpanRow, spans), frame(MissRow, misses), frame(KernelRow, kernels), FACTS)
    assert view is not None
    return view


def example(tmp_path: Path, **options: Any) -> FusionView:
    run = Run(write_example_run(tmp_path / "run", **options))
    tables = (run.table(t.table, t, (0,)) for t in (SpanRow, MissRow, KernelRow))
    view = fusion_view(*tables, run.manifest.workload or WorkloadFacts())
    assert view is not None
    return view


TREE = [
    span("step", "step", None, fusion_status="partial"),
    span("phase", "forward", "step:step"),
    span("layer", "block", "phase:forward", layer="block", layer_class="Block", bytes_read=300, bytes_written=100,
         addressable_lost=40, structural_lost=20, ms=4.0, fusion_status="partial"),
    span("layer", "block.mlp", "layer:block", layer="block.mlp", layer_class="MLP", bytes_read=100, bytes_written=100,
         addressable_lost=40, structural_lost=20, ms=3.0, fusion_status="partial"),
    span("kernel", "k1", "layer:block", layer="block", ms=1.0, bytes_read=200, bytes_written=0, kernel_kind="pointwise",
         fusion_status="complete", ops="aten.add", source="m.py:3"),
    span("kernel", "k2", "layer:block.mlp", layer="block.mlp", ms=3.0, bytes_read=100, bytes_written=100,
         kernel_kind="pointwise", fusion_status="partial"),
]  # fmt: skip


def test_layer_spans_that_count_their_children_are_not_counted_twice() -> None:
    view = view_of(TREE, [], [kernel("k1", "block"), kernel("k2", "block.mlp", 3.0)])
    rows = {r.path: r for r in view.layers}
    assert (rows[""].bytes, rows[""].lost, rows[""].ms) == (400, 40, 4.0)
    assert (rows["block"].bytes, rows["block.mlp"].bytes) == (400, 200)
    assert view.rate is not None
    assert view.rate.value == pytest.approx(0.9)
    assert view.strict_rate == pytest.approx(1 - 60 / 400)
    assert view.status == "partial"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_both_kinds_of_layer_spans_give_the_same_tree(tmp_path: Path, device: str) -> None:
    whole, own = example(tmp_path / "a", device=device), example(tmp_path / "b", device=device, own_spans=True)
    assert len(whole.layers) == len(own.layers)
    for x, y in zip(whole.layers, own.layers, strict=True):
        assert (x.path, x.bytes, x.lost, x.structural, x.rate) == (y.path, y.bytes, y.lost, y.structural, y.rate)
        assert x.ms == pytest.approx(y.ms)
    assert [(c.layer_class, c.bytes, c.lost) for c in whole.classes] == [
        (c.layer_class, c.bytes, c.lost) for c in own.classes
    ]


def test_the_example_is_what_it_was_made_to_be(tmp_path: Path) -> None:
    view = example(tmp_path)
    rows = {r.path: r for r in view.layers}
    assert [r.label for r in view.layers if r.depth == 1] == ["embed", "layers (4 alike)", "head", "loss"]
    assert rows["loss"].status == "broken"
    assert rows["loss"].main_cause == "graph_break"
    assert rows["layers.*.attention"].main_cause == "backend_loop_mismatch"
    assert rows["layers.*.feed_forward"].status == "complete"
    assert rows["layers.*.feed_forward"].structural == 4 * 8192 * 5632 * 2
    assert rows["head"].rate is None
    assert view.quality is not None
    assert view.quality.value == pytest.approx(1.0)
    assert sum(c.ms or 0 for c in view.classes) == pytest.approx(rows[""].ms)
    first = view.misses[0]
    assert (first.layer, first.count, first.addressable) == ("loss", 1, True)
    assert view.misses[1].count == 4
    assert view.misses[-1].saves_ms is None


def test_saved_time_is_lost_bytes_at_copy_bandwidth(tmp_path: Path) -> None:
    view = example(tmp_path)
    loss = next(r for r in view.layers if r.path == "loss")
    assert loss.saves_ms == pytest.approx((loss.lost or 0) / 4200e6)


def test_kernels_share_their_spans_bytes_by_calls() -> None:
    rows = [kernel("k2", "block.mlp", 1.0, stream="7"), kernel("k2", "block.mlp", 2.0, stream="8", op="x")]
    view = view_of(TREE, [], rows)
    assert [k.bytes for k in view.kernels] == [100, 100]
    assert view.kernels[0].ms == 2.0
    assert view.kernels[0].gbps == pytest.approx(100 / 2.0e6)
    assert view.kernels[0].of_copy == pytest.approx(100 / 2.0e6 / 1000)
    assert (view.kernels[0].kind, view.kernels[0].status) == ("pointwise", "partial")


def test_a_kernel_without_a_span_is_shown_and_lowers_the_quality() -> None:
    view = view_of(
        TREE, [], [kernel("k1", "block"), kernel("k2", "block.mlp", 3.0), kernel("new", "", 1.0, bytes_moved=5)]
    )
    stray = next(k for k in view.kernels if k.name == "new")
    assert (stray.bytes, stray.status, stray.kind) == (5, "unknown", "")
    assert view.quality is not None
    assert view.quality.value == pytest.approx(0.8)


def test_an_orphan_span_lowers_the_quality() -> None:
    cut = [s if s.name != "k2" else span("kernel", "k2", None, layer="block.mlp", ms=3.0) for s in TREE]
    view = view_of(cut, [], [kernel("k1", "block"), kernel("k2", "block.mlp", 3.0)])
    assert view.quality is not None
    assert view.quality.value == pytest.approx(0.25)


def test_parent_loops_are_broken_chains() -> None:
    parents = {"a": "b", "b": "a", "c": "step", "d": "c", "e": None, "f": "gone"}
    known = {"step": True}
    assert [rooted(s, parents, known) for s in "abcdef"] == [False, False, True, True, False, False]


def test_misses_of_one_cause_and_line_in_alike_layers_are_one() -> None:
    def miss(layer: str, cause: str, size: int, source: str = "m.py:1") -> MissRow:
        base: dict[str, Any] = {"rank": 0, "phase": "forward", "reason": "r", "addressable": cause != "through_extern"}
        return MissRow(layer=layer, cause=cause, bytes=size, producer_source=source, **base)

    misses = [
        miss("layers.0.a", "layout_copy", 10),
        miss("layers.1.a", "layout_copy", 20),
        miss("layers.1.a", "layout_copy", 20, "m.py:2"),
        miss("layers.1.a", "through_extern", 999),
    ]
    view = view_of(TREE, misses, [kernel("k1", "block")])
    assert [(m.layer, m.bytes, m.count, m.addressable) for m in view.misses] == [
        ("layers.*.a", 30, 2, True),
        ("layers.*.a", 20, 1, True),
        ("layers.*.a", 999, 1, False),
    ]
    assert "copy" in view.misses[0].cause_text


def test_nothing_recorded_is_no_view_and_kernels_alone_are_unknown() -> None:
    empty = frame(SpanRow, []), frame(MissRow, [])
    assert fusion_view(*empty, frame(KernelRow, []), FACTS) is None
    view = view_of([], [], [kernel("k", "")])
    assert (view.rate, view.status, view.quality, view.layers) == (None, "unknown", None, [])
    assert "no fusion spans" in view.note


def test_a_broken_model_span_does_not_break_the_model() -> None:
    own = span(
        "layer", "model", "phase:forward", layer="", bytes_read=1, bytes_written=1, ms=0.1, fusion_status="broken"
    )
    view = view_of([*TREE, own], [], [kernel("k1", "block")])
    assert view.layers[0].status == "partial"


def test_collectives_take_no_part_in_a_layers_time() -> None:
    from costlab.app.analysis.fusion import leave_out_collectives, own_traffic
    from costlab.probes.records import SpanRow

    def span(kind: str, name: str, ms: float, **more: str) -> SpanRow:
        return SpanRow(
            trace_id="t", span_id=name, parent_span_id="p", rank=0, kind=kind, name=name, phase="forward", ms=ms, **more
        )  # type: ignore[arg-type]

    spans = frame(
        SpanRow,
        [
            span("layer", "fsdp", 12.0, layer="fsdp"),
            span("kernel", "ncclDevKernel_AllGather", 10.0, layer="fsdp", kernel_kind="collective"),
            span("kernel", "copy_in", 2.0, layer="fsdp", kernel_kind="copy"),
            span("layer", "mlp", 5.0, layer="mlp"),
            span("kernel", "mm", 5.0, layer="mlp", kernel_kind="extern"),
        ],
    )
    own = own_traffic(spans)
    leave_out_collectives(own, spans)
    assert {layer: own[layer].ms for layer in ("fsdp", "mlp")} == {"fsdp": 2.0, "mlp": 5.0}

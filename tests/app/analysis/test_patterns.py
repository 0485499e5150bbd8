"""Anti-patterns: alike lines are one, the costliest first, and only those nobody else names become findings."""

from __future__ import annotations

import msgspec
import pytest

from costlab.app.analysis.patterns import pattern_views
from costlab.app.analysis.views import KernelView, LayerRow
from costlab.app.diagnosis.patterns import patterns
from costlab.app.diagnosis.rule import Context
from costlab.app.report import render_markdown, render_text
from costlab.probes.records import PatternRow
from tests.app.analysis.tables import frame
from tests.app.diagnosis.reports import healthy


def row(kind: str = "mutation", layer: str = "layers.0.mlp", **more: object) -> PatternRow:
    base: dict[str, object] = {"source": "model.py:7", "text": "written in place", "mend": "compute out of place"}
    return PatternRow(rank=0, kind=kind, layer=layer, **(base | more))  # type: ignore[arg-type]


def test_the_same_line_in_alike_layers_is_one_pattern() -> None:
    rows = [row(layer=f"layers.{i}.mlp", bytes=1_000_000, count=2, ops="aten.add_") for i in range(4)]
    (view,) = pattern_views(frame(PatternRow, rows), copy_gbps=1000.0)
    assert (view.layer, view.bytes, view.count, view.ops) == ("layers.*.mlp", 4_000_000, 8, "aten.add_")
    assert view.saves_ms == pytest.approx(0.004)


def test_another_line_is_another_pattern_and_the_costliest_comes_first() -> None:
    rows = [row(bytes=10), row(source="model.py:9", bytes=20), row(kind="print", source="model.py:9")]
    views = pattern_views(frame(PatternRow, rows), copy_gbps=None)
    assert [(v.kind, v.source, v.saves_ms) for v in views] == [
        ("mutation", "model.py:9", None),
        ("mutation", "model.py:7", None),
        ("print", "model.py:9", None),
    ]


def test_what_missed_fusion_or_breaks_already_name_is_no_second_finding() -> None:
    report = healthy()
    assert report.fusion is not None
    rows = [row("hidden_copy", bytes=9), row("print"), row("item"), row("opaque_op", source="model.py:3")]
    views = pattern_views(frame(PatternRow, rows), copy_gbps=None)
    report = msgspec.structs.replace(report, fusion=msgspec.structs.replace(report.fusion, patterns=views))
    (finding,) = patterns(Context(report))
    assert (finding.id, finding.where, finding.action) == ("anti-pattern", "model.py:3", "Compute out of place.")
    for text in (render_markdown(report), render_text(report)):
        assert "Anti-patterns in the model" in text
        assert "model.py:3" in text


def kernel(**more: object) -> KernelView:
    base: dict[str, object] = {
        "name": "triton_poi_fused_clone_0", "kind": "layout_copy", "category": "memory", "layer": "layers.0.mlp",
        "phase": "forward", "calls": 1.0, "ms": 0.5, "bytes": None, "gbps": None, "of_copy": None, "flops": None,
        "status": "broken", "ops": "aten.clone.default", "source": "model.py:7",
    }  # fmt: skip
    return KernelView(**(base | more))  # type: ignore[arg-type]


def layer(path: str, alike: int) -> LayerRow:
    return LayerRow(
        path=path, label=path, depth=1, layer_class="mlp", status="partial", rate=0.5, target=0.95, ms=1.0, bytes=1,
        lost=1, structural=0, main_cause="", saves_ms=None, alike=alike,
    )  # fmt: skip


def test_the_cost_of_a_copy_is_its_kernels_measured_time() -> None:
    rows = frame(PatternRow, [row("hidden_copy", phase="forward", bytes=1_000_000)])
    alike = [kernel(layer=f"layers.{i}.mlp") for i in range(4)]
    mixed = kernel(kind="pointwise", ops="aten.clone,aten.mul")
    others = [kernel(source="model.py:8"), kernel(phase="backward"), mixed]
    (view,) = pattern_views(rows, 1000.0, [*alike, *others])
    assert (view.cost_ms, view.cost_kind) == (pytest.approx(2.0), "derived")


def test_a_cast_in_a_kernel_of_its_own_is_a_copy_too() -> None:
    rows = frame(PatternRow, [row("dtype_ping_pong", phase="forward", bytes=8)])
    casts = [kernel(kind="pointwise", ops="prims.convert_element_type.default")]
    (view,) = pattern_views(rows, 1000.0, casts)
    assert (view.cost_ms, view.cost_kind) == (0.5, "derived")


def test_without_kernels_of_its_own_the_cost_is_modelled_for_all_alike_layers() -> None:
    rows = frame(PatternRow, [row("mutation", phase="forward", bytes=1_000_000)])
    (view,) = pattern_views(rows, 1000.0, [kernel()], [layer("layers.*.mlp", 22), layer("head", 1)])
    assert (view.cost_ms, view.cost_kind) == (pytest.approx(0.022), "modelled")
    (unknown,) = pattern_views(frame(PatternRow, [row("print")]), 1000.0, [kernel()])
    assert (unknown.cost_ms, unknown.cost_kind) == (None, "")

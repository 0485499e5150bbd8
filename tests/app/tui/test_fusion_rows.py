"""The fusion tree without its widgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from costlab.app.analysis.views import FusionView, KernelView, LayerRow, MissView
from costlab.app.tui.panes.fusion_rows import (
    Filter,
    FusionTree,
    LayerIndex,
    causes,
    matches,
    next_of,
    together,
    within,
)
from tests.work import counted


def layer(path: str, depth: int, **fields: Any) -> LayerRow:
    values: dict[str, Any] = {
        "label": path.rpartition(".")[2] or "model",
        "layer_class": "Block",
        "status": "complete",
        "rate": 1.0,
        "target": 0.95,
        "ms": 1.0,
        "bytes": 100,
        "lost": 0,
        "structural": 0,
        "main_cause": "",
        "saves_ms": None,
    }
    return LayerRow(path=path, depth=depth, **(values | fields))


ROWS = [
    layer("", 0, has_children=True, lost=9, ms=9.0),
    layer("embed", 1),
    layer("layers.0-3", 1, has_children=True, lost=9, ms=5.0, alike=4),
    layer("layers.0-3.attention", 2, ms=4.0),
    layer("layers.0-3.mlp", 2, lost=9, saves_ms=0.9, status="partial", rate=0.8, main_cause="layout_copy"),
    layer("loss", 1, status="broken", rate=None, main_cause="graph_break", ms=0.5),
]


def tree() -> FusionTree:
    return FusionTree.of(
        FusionView(rate=None, strict_rate=None, target=None, status="partial", quality=None, layers=ROWS)
    )


def test_the_way_to_the_largest_loss_is_open_at_first() -> None:
    paths = [row.path for row in tree().lines(Filter())]
    assert paths == [row.path for row in ROWS]


def test_closing_a_layer_hides_what_is_inside() -> None:
    shown = tree()
    shown.toggle("layers.0-3")
    assert [row.path for row in shown.lines(Filter())] == ["", "embed", "layers.0-3", "loss"]
    shown.toggle("", False)
    assert [(row.path, row.branch) for row in shown.lines(Filter())] == [("", "closed")]


def test_a_filter_gives_a_list_of_full_names() -> None:
    assert [row.label for row in tree().lines(Filter(status="partial"))] == ["layers.0-3.mlp"]
    assert [row.label for row in tree().lines(Filter(text="LOSS"))] == []
    assert [row.label for row in tree().lines(Filter(text="loss"))] == ["loss"]
    assert [row.path for row in tree().lines(Filter(sort="ms"))][:2] == ["", "layers.0-3"]
    assert next(row.path for row in tree().lines(Filter(sort="rate"))) == "layers.0-3.mlp"
    assert [row.path for row in tree().lines(Filter(sort="rate"))][-1] == "loss", "no rate is not a low rate"


def test_addressable_keeps_only_what_loses_something() -> None:
    assert [row.path for row in ROWS if matches(row, Filter(addressable=True))] == ["", "layers.0-3", "layers.0-3.mlp"]


def test_the_filter_says_itself_in_words() -> None:
    assert Filter().words == ""
    assert Filter(status="broken", cause="layout_copy", sort="lost").words == "broken · layout copy · sorted by lost"


def test_causes_are_ordered_by_what_they_lose() -> None:
    assert causes(ROWS) == ["layout_copy", "graph_break"]


def test_parents() -> None:
    assert tree().parent_of("layers.0-3.mlp") == "layers.0-3"
    assert tree().parent_of("loss") == ""
    assert tree().parent_of("") is None
    assert tree().parent_of("no such layer") is None


def test_folded_lines_own_the_layers_they_stand_for() -> None:
    assert within("layers.2.mlp", "layers.0-3")
    assert within("layers.*.mlp.act", "layers.0-3.mlp")
    assert within("layers.*.mlp", "layers.*")
    assert within("anything", "")
    assert not within("layers.5.mlp", "layers.0-3")
    assert not within("layers2.mlp", "layers")


def test_misses_of_a_layer_put_what_can_be_mended_first() -> None:
    def miss(name: str, can: bool, size: int) -> MissView:
        return MissView(
            layer=name, phase="forward", cause="other", cause_text="", addressable=can, bytes=size, saves_ms=None,
            reason="", producer="", consumer="", producer_source="", consumer_source="",
        )  # fmt: skip

    misses = [miss("a", False, 100), miss("a.b", True, 1), miss("a", True, 5), miss("c", True, 900)]
    view = FusionView(rate=None, strict_rate=None, target=None, status="unknown", quality=None, misses=misses)
    assert [(m.layer, m.bytes) for m in LayerIndex(view).of("a")[0]] == [("a", 5), ("a.b", 1), ("a", 100)]


def test_kernels_of_alike_layers_are_one_line_and_nothing_is_lost() -> None:
    def kernel(layer: str, ms: float, **fields: Any) -> KernelView:
        values: dict[str, Any] = {
            "name": "k",
            "kind": "pointwise",
            "category": "memory",
            "phase": "forward",
            "calls": 2,
        }
        return KernelView(layer=layer, ms=ms, **(values | fields))

    alike = [
        kernel("h.0.mlp", 1.0, bytes=3_000_000, gbps=3.0, of_copy=0.5, flops=7, status="complete"),
        kernel("h.1.mlp", 2.0, bytes=3_000_000, gbps=1.5, of_copy=0.25, status="broken"),
    ]
    others = [kernel("h.0.mlp", 1.0, phase="backward"), kernel("h.0.norm", 0.5), kernel("h.2.mlp", 4.0, name="mm")]
    rows = together([*alike, *others])
    assert [(k.name, k.layer, k.phase, k.ms) for k in rows] == [
        ("mm", "h.2.mlp", "forward", 4.0),
        ("k", "h.*.mlp", "forward", 3.0),
        ("k", "h.0.mlp", "backward", 1.0),
        ("k", "h.0.norm", "forward", 0.5),
    ]
    both = rows[1]
    assert (both.calls, both.bytes, both.flops, both.status) == (4, 6_000_000, 7, "broken")
    assert both.gbps == 2.0
    assert both.of_copy is not None
    assert abs(both.of_copy - 1 / 3) < 1e-12
    assert (rows[0].bytes, rows[0].gbps, rows[0].of_copy) == (None, None, None)


def test_cycling_goes_around() -> None:
    assert [next_of((1, 2, 3), n) for n in (1, 3, 9)] == [2, 1, 1]


def work_of_a_tree(layers: int) -> int:
    many = [layer("", 0, has_children=True)]
    for n in range(layers):
        many.append(layer(f"h.{n}", 1, has_children=True, lost=n))
        many += [layer(f"h.{n}.{name}", 2, lost=n) for name in "abc"]
    big = replace(tree(), layers=many, opened={""} | {f"h.{n}" for n in range(layers)})
    with counted() as work:
        assert len(big.lines(Filter())) == 4 * layers + 1
        assert len(big.lines(Filter(text="h.29"))) > 40
        assert big.heaviest() == {"", f"h.{layers - 1}"}
    return work.calls


def test_the_work_of_thousands_of_layers_grows_no_faster_than_they() -> None:
    assert work_of_a_tree(3000) < 2.4 * work_of_a_tree(1500)

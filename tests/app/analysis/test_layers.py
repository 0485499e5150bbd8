"""The layer tree: sums upwards, verdicts, and identical siblings on one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.analysis.layers import (
    Traffic,
    build_tree,
    class_rows,
    covers,
    layer_rows,
    status_of,
    strip_index,
    target_of,
)
from costlab.app.analysis.views import LayerRow
from costlab.probes.records import FusionStatus


def traffic(size: int, lost: int = 0, status: FusionStatus = "complete", ms: float = 1.0) -> Traffic:
    return Traffic(bytes=size, lost=lost, ms=ms, measured=True, traced=True, kernels=1, statuses=[status])


def by_path(rows: list[LayerRow]) -> dict[str, LayerRow]:
    out = {r.path: r for r in rows}
    assert len(out) == len(rows)
    return out


def test_values_add_up_towards_the_model() -> None:
    own = {"a.x": traffic(100, 10), "a.y": traffic(300), "b": traffic(200, 50)}
    rows = by_path(layer_rows(build_tree(own, {}), 1.0))
    assert (rows[""].bytes, rows[""].lost, rows[""].ms) == (600, 60, 3.0)
    assert (rows["a"].bytes, rows["a"].rate) == (400, 0.975)
    assert rows["b"].rate == 0.75
    assert rows[""].saves_ms == pytest.approx(60 / 1e6)
    assert [r.depth for r in rows.values()] == [0, 1, 2, 2, 1]
    assert (rows["a"].has_children, rows["b"].has_children) == (True, False)


def test_siblings_come_in_the_models_order() -> None:
    own = {p: traffic(1) for p in ("norm", "embed", "head", "layers.10", "layers.9", "layers.2.a")}
    classes = {"embed": "E", "layers.2.a": "A", "layers.9": "B", "layers.10": "B", "norm": "N", "head": "H"}
    paths = [r.path for r in layer_rows(build_tree(own, classes), None)]
    assert [p for p in paths if "." not in p] == ["", "embed", "layers", "norm", "head"]
    unknown = [r.path for r in layer_rows(build_tree({f"{n}": traffic(n + 1) for n in (10, 9, 1)}, {}), None)]
    assert unknown == ["", "1", "9", "10"]


def test_identical_siblings_become_one_line_with_their_children() -> None:
    own = {
        f"layers.{n}.{part}": traffic(100, lost, ms=1 + n / 100)
        for n in range(16)
        for part, lost in (("a", 0), ("m", 20))
    }
    rows = by_path(layer_rows(build_tree(own | {"norm": traffic(5)}, {}), None))
    assert list(rows) == ["", "layers.*", "layers.*.a", "layers.*.m", "norm"]
    line = rows["layers.*"]
    assert (line.label, line.alike, line.depth, line.bytes, line.kernels) == ("layers (16 alike)", 16, 1, 3200, 32)
    assert rows["layers.*.m"].lost == 320
    assert rows["layers.*.m"].alike == 1


def test_a_sibling_that_differs_stays_apart() -> None:
    own = {f"layers.{n}.a": traffic(100, 60 if n == 2 else 0) for n in range(5)}
    rows = by_path(layer_rows(build_tree(own, {}), None))
    assert list(rows) == ["", "layers", "layers.0-1,3-4", "layers.0-1,3-4.a", "layers.2", "layers.2.a"]
    assert rows["layers.0-1,3-4"].label == "0–1,3–4 (4 alike)"
    assert rows["layers.2"].status == "broken"
    assert rows["layers"].status == "partial"


def test_nested_lists_fold_in_both_levels() -> None:
    own = {f"stage.{s}.{b}.conv": traffic(10 * (s + 1)) for s in range(2) for b in range(3)}
    rows = by_path(layer_rows(build_tree(own, {}), None))
    assert list(rows) == ["", "stage", "stage.0.*", "stage.0.*.conv", "stage.1.*", "stage.1.*.conv"]
    experts = {f"layers.{n}.experts.{e}": traffic(10) for n in range(4) for e in range(8)}
    rows = by_path(layer_rows(build_tree(experts, {}), None))
    assert list(rows) == ["", "layers.*", "layers.*.experts.*"]
    assert rows["layers.*.experts.*"].alike == 8
    assert rows["layers.*.experts.*"].bytes == 320


def test_a_list_that_moves_something_itself_keeps_its_line() -> None:
    own = {f"layers.{n}": traffic(100) for n in range(3)} | {"layers": traffic(7)}
    rows = by_path(layer_rows(build_tree(own, {}), None))
    assert list(rows) == ["", "layers", "layers.0-2"]
    assert rows["layers"].bytes == 307


@pytest.mark.parametrize(
    ("rate", "own", "below", "status"),
    [
        (1.0, ["complete"], [], "complete"),
        (0.95, ["complete"], [], "complete"),
        (0.949, ["complete"], [], "partial"),
        (0.5, ["partial"], [], "partial"),
        (0.499, ["partial"], [], "broken"),
        (1.0, ["broken"], [], "broken"),
        (1.0, [], ["complete", "broken"], "partial"),
        (None, [], ["broken", "broken"], "broken"),
        (None, ["complete"], [], "complete"),
        (None, ["unknown"], ["unknown"], "unknown"),
        (None, [], [], "unknown"),
        (0.99, ["complete", "unknown"], [], "complete"),
    ],
)
def test_verdicts(rate: float | None, own: list[FusionStatus], below: list[FusionStatus], status: FusionStatus) -> None:
    assert status_of(rate, own, below) == status


def test_classes_sum_to_the_step() -> None:
    own = {"": traffic(5), "layers.0": traffic(10, 1), "layers.0.a": traffic(90, 9), "layers.1.a": traffic(90, 9)}
    classes = {"": "Model", "layers.0": "Block", "layers.0.a": "Attention", "layers.1.a": "Attention"}
    rows = {r.layer_class: r for r in class_rows(build_tree(own, classes), 1.0)}
    assert sum(r.bytes or 0 for r in rows.values()) == 195
    assert (rows["Attention"].layers, rows["Attention"].lost, rows["Attention"].rate) == (2, 18, 0.9)
    assert next(iter(rows)) == "Attention"


def test_targets_by_class() -> None:
    assert target_of("RMSNorm") == target_of("LayerNorm2d") == 0.98
    assert target_of("CrossEntropy") == 0.9
    assert target_of("Whatever") == target_of("") == 0.95


@pytest.mark.parametrize(
    ("path", "layer", "inside"),
    [
        ("", "anything.at.all", True),
        ("layers.*", "layers.3", True),
        ("layers.*", "layers.3.attention", True),
        ("layers.*", "layers.norm", False),
        ("layers.*.attention", "layers.3", False),
        ("layers.0-1,3-4.a", "layers.3.a", True),
        ("layers.0-1,3-4.a", "layers.2.a", False),
        ("layers.2", "layers.20", False),
        ("a.b", "a.bc", False),
        ("head", "", False),
        ("x", "x", True),
    ],
)
def test_a_line_covers_its_layers(path: str, layer: str, inside: bool) -> None:
    assert covers(path, layer) is inside


def test_indices_are_stripped_only_where_they_are_components() -> None:
    assert strip_index("layers.3.attention") == "layers.*.attention"
    assert strip_index("12.conv1.0") == "*.conv1.*"
    assert strip_index("conv1x1.bn2") == "conv1x1.bn2"
    assert strip_index("") == ""


NAMES = st.sampled_from(["layers", "a", "b", "0", "1", "2", "10"])
TREES = st.dictionaries(
    st.lists(NAMES, max_size=4).map(".".join), st.builds(traffic, st.integers(1, 50), st.integers(0, 1)), max_size=20
)


@given(TREES)
def test_every_layer_is_on_exactly_the_lines_above_it(own: dict[str, Traffic]) -> None:
    rows = layer_rows(build_tree(own, {}), None)
    assert sum(t.bytes for t in own.values()) == (rows[0].bytes or 0)
    assert len({r.path for r in rows}) == len(rows)
    for depth in {r.depth for r in rows}:
        lines = [r.path for r in rows if r.depth == depth]
        assert all(sum(covers(p, layer) for p in lines) <= 1 for layer in own)
    for row in rows[1:]:
        assert row.bytes == sum(t.bytes for layer, t in own.items() if covers(row.path, layer))

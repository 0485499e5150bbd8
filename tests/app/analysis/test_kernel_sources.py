"""Generated kernel sources of a run: the right one by name and phase, and none where none was kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.sources import kernel_source, longest
from costlab.app.analysis.views import KernelView
from costlab.app.store import Run
from costlab.probes.records import KernelSourceRow
from costlab.probes.tables import write_rows
from tests.app.make_run import write_example_run


def row(name: str, source: str, phase: str = "forward", **fields: Any) -> KernelSourceRow:
    return KernelSourceRow(
        rank=0, name=name, phase=phase, compile_id="0/0", **({"language": "triton", "source": source} | fields)
    )


def with_sources(path: Path, rows: Sequence[KernelSourceRow]) -> Run:
    write_example_run(path)
    write_rows(path / "rank-00000", KernelSourceRow, rows)
    return Run(path)


def test_the_phase_decides_between_kernels_of_one_name(tmp_path: Path) -> None:
    run = with_sources(tmp_path / "r", [row("k", "ahead"), row("k", "back", "backward"), row("only", "x", "backward")])
    ahead, back = (kernel_source(run, "k", phase) for phase in ("forward", "backward"))
    assert ahead is not None and back is not None
    assert (ahead.source, back.source) == ("ahead", "back")
    other = kernel_source(run, "only", "forward")
    assert other is not None, "a name of one phase needs no phase"
    assert other.source == "x"


def test_graphs_that_use_one_name_twice_are_told_apart_by_count(tmp_path: Path) -> None:
    run = with_sources(tmp_path / "r", [row("k", "old"), row("k", "new"), row("k", "new"), row("one", "x", cut=True)])
    twice, once = kernel_source(run, "k", "forward"), kernel_source(run, "one")
    assert twice is not None and once is not None
    assert (twice.source, twice.variants, twice.cut) == ("new", 2, False)
    assert (once.variants, once.cut, once.language) == (1, True, "triton")


def test_a_run_without_the_table_has_no_source_and_no_note(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "r"))
    assert kernel_source(run, "k") is None
    assert longest(run, []) == []
    assert not [n for n in run.notes if "kernel_sources" in n]


def test_a_damaged_table_is_a_note(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "r"))
    (run.path / "rank-00000" / "kernel_sources.parquet").write_bytes(b"PAR1 no such thing")
    assert kernel_source(run, "k") is None
    assert any("kernel_sources" in n for n in run.notes)


def test_the_longest_come_first_with_alike_layers_together(tmp_path: Path) -> None:
    run = with_sources(tmp_path / "r", [row(n, f"def {n}") for n in ("a", "b", "c")])

    def kernel(name: str, layer: str, ms: float) -> KernelView:
        return KernelView(name=name, kind="pointwise", category="memory", layer=layer, phase="forward", calls=1, ms=ms)

    kernels = [
        kernel("b", "h.0", 3.0),
        kernel("a", "h.0", 2.0),
        kernel("a", "h.1", 2.0),
        kernel("aten::mm", "h.0", 9.0),
    ]
    assert [(k.name, k.ms, k.source) for k in longest(run, kernels)] == [("a", 4.0, "def a"), ("b", 3.0, "def b")]
    assert [k.name for k in longest(run, kernels, most=1)] == ["a"]


@pytest.mark.parametrize("count", [0, 3])
def test_the_report_has_them(tmp_path: Path, count: int) -> None:
    plain = Run(write_example_run(tmp_path / "first"))
    fusion = build_report(plain).fusion
    assert fusion is not None
    names = dict.fromkeys(k.name for k in fusion.kernels)
    chosen = list(names)[:count]
    run = with_sources(tmp_path / "r", [row(name, f"# {name}") for name in chosen]) if count else plain
    report = build_report(run)
    assert report.fusion is not None
    assert {(s.name, s.source) for s in report.fusion.sources} == {(name, f"# {name}") for name in chosen}

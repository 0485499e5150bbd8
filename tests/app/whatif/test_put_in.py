"""What an arm put in: told in its notes, once, from the arm's own run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import RunReport
from costlab.app.report.content import build_document
from costlab.app.report.markdown import to_markdown
from costlab.app.store import open_run
from costlab.app.tui.panes.overview import facts
from costlab.app.whatif.put_in import put_in
from tests.app.make_run import write_example_run

PLACES = ["add_norm: layers.0", "rope: layers.0.attention", "add_norm: layers.1", "add_norm: layers.1 (in the graph)"]
ROW = {"asked": "auto", "ranks": 2, "hosts": 1, "library": "nccl", "used": True}
CHOSEN = [
    {**ROW, "nbytes": 1 << 20, "schedule": "one-shot", "seconds": {"one-shot": 2e-5, "backend": 5e-5}},
    {**ROW, "nbytes": 25 << 20, "schedule": "backend", "seconds": {"backend": 1e-4}},
]


@pytest.fixture
def plain(tmp_path: Path) -> RunReport:
    return build_report(open_run(write_example_run(tmp_path / "plain")))


def altered(
    path: Path, *, fused: list[str] | None = None, schedules: list[dict[str, object]] | None = None
) -> RunReport:
    write_example_run(path)
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest["workload"]["fused"] = fused or []
    manifest["extra"] = {"schedules": schedules or []}
    file.write_text(json.dumps(manifest))
    return build_report(open_run(path))


def test_fused_kernels_are_told_by_name_and_number(plain: RunReport, tmp_path: Path) -> None:
    fused = altered(tmp_path / "fused", fused=PLACES)
    assert put_in(plain, fused) == ["4 fused kernels put in: 3 x add_norm, 1 x rope"]
    assert put_in(fused, fused) == []
    assert put_in(fused, plain) == []
    assert "4 fused kernels put in: 3 x add\\_norm, 1 x rope." in to_markdown(build_document(fused))
    assert "fused kernels put in" not in to_markdown(build_document(plain))
    lines = ["".join(text for text, _ in row) for row in facts(fused)]
    assert "fused       4 kernels put in: 3 x add_norm, 1 x rope" in lines
    assert not any("put in" in text for row in facts(plain) for text, _ in row)


def test_each_message_is_told_with_its_schedule_and_the_librarys_time(plain: RunReport, tmp_path: Path) -> None:
    planned = altered(tmp_path / "planned", schedules=CHOSEN)
    assert put_in(plain, planned) == [
        "all-reduces, each timed alone: 1.05 MB by one-shot (20.0 µs, the library's own 50.0 µs); "
        "26.2 MB by NCCL's own (0.100 ms)"
    ]
    assert put_in(planned, planned) == []


def test_many_sizes_are_counted_and_sizes_that_were_only_timed_left_out(plain: RunReport, tmp_path: Path) -> None:
    many = [{**CHOSEN[0], "nbytes": n << 20} for n in range(1, 8)]
    (said,) = put_in(plain, altered(tmp_path / "many", schedules=many))
    assert said.endswith("; 3 more sizes")
    timed = [{**CHOSEN[1], "used": False}, CHOSEN[0]]
    (said,) = put_in(plain, altered(tmp_path / "timed", schedules=timed))
    assert "26.2 MB" not in said


def test_both_are_told_of_an_arm_that_combines_them(plain: RunReport, tmp_path: Path) -> None:
    assert len(put_in(plain, altered(tmp_path / "both", fused=PLACES, schedules=CHOSEN))) == 2

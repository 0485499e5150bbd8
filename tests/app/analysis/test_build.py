"""A whole run becomes a whole report; a damaged one says what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costlab.app.analysis import build
from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import RunReport
from costlab.app.store import Run
from costlab.probes.records import ROWS
from tests.app.make_run import write_example_run
from tests.work import counted

SECTIONS = ("steps", "waterfall", "fusion", "collectives", "checkpoint", "compile", "memory", "energy", "cost")


@pytest.fixture(autouse=True)
def no_price_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))


def report(tmp_path: Path, **options: Any) -> RunReport:
    return build_report(Run(write_example_run(tmp_path / "run", **options)))


@pytest.mark.parametrize(
    "options",
    [{}, {"device": "cpu"}, {"ranks": 1}, {"ranks": 4}, {"parallel": "ddp"}, {"compile": "none"}, {"hostile": True}],
)
def test_every_kind_of_run_has_every_section(tmp_path: Path, options: dict[str, Any]) -> None:
    view = report(tmp_path, **options)
    assert [s for s in SECTIONS if getattr(view, s) is None] == []
    assert not [n for n in view.run.notes if "could not be analysed" in n]
    assert view.waterfall is not None
    assert sum(p.ms for p in view.waterfall.parts) == pytest.approx(view.waterfall.step_ms, rel=1e-12)
    assert view.steps is not None
    assert view.waterfall.step_ms == view.steps.step_ms.value


def test_the_example_is_consistent_with_itself(tmp_path: Path) -> None:
    view = report(tmp_path)
    assert view.run.notes == []
    assert view.collectives is not None
    assert view.collectives.bytes_per_step is not None
    assert view.collectives.expected_bytes is not None
    assert view.collectives.bytes_per_step.value == pytest.approx(view.collectives.expected_bytes.value, rel=0.01)
    assert view.energy is not None
    assert view.energy.average_w is not None
    assert view.energy.average_w.value == pytest.approx(1080, rel=0.01)
    assert view.waterfall is not None
    parts = {p.name: p.ms for p in view.waterfall.parts}
    assert view.collectives.transfer_ms is not None
    assert view.waterfall.wait_ms is not None
    # the profiler lengthens waiting: the unprofiled step exposes no more than the profiled ones, and no less than waits
    assert view.waterfall.wait_ms < parts["exposed communication"] <= view.collectives.exposed_ms


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.table)
def test_each_table_may_be_absent(tmp_path: Path, row: Any) -> None:
    view = report(tmp_path, omit=frozenset({row.table}))
    assert not [n for n in view.run.notes if "could not be analysed" in n]
    lacking = {s for s in SECTIONS if getattr(view, s) is None}
    expected = {
        "steps": {"steps", "waterfall"},
        "parts": {"waterfall"},
        "compile": {"compile"},
        "checkpoint": {"checkpoint"},
        "memory": {"memory"},
    }
    assert lacking == expected.get(row.table, set())


def test_an_empty_failed_run_is_a_report_of_its_failure(tmp_path: Path) -> None:
    everything = frozenset(row.table for row in ROWS)
    view = report(tmp_path, status="failed", omit=everything)
    assert view.run.failure == "rank 1 ran out of GPU memory"
    assert view.run.failure_advice == "halve --batch"
    assert (view.steps, view.fusion, view.collectives, view.memory) == (None,) * 4
    assert view.findings == []
    assert "the run failed: what it left is shown" in view.run.notes


def test_a_run_without_environment_and_workload_is_readable(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "run")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({k: manifest[k] for k in ("run_id", "created", "status")}))
    view = build_report(Run(path))
    assert view.steps is not None
    assert (view.steps.throughput, view.steps.mfu) == (None, None)
    assert view.cost is not None
    assert view.cost.per_step is None


def test_an_error_in_one_section_costs_that_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("surprise\x1b[2J")

    monkeypatch.setattr(build, "memory_view", fail)
    view = report(tmp_path)
    assert view.memory is None
    assert view.steps is not None
    assert "memory: could not be analysed (KeyError: 'surprise\\x1b[2J')" in view.run.notes


def test_the_machines_limits_are_among_the_notes(tmp_path: Path) -> None:
    assert "no NVIDIA GPU: no energy counter" in report(tmp_path, device="cpu").run.notes


def work_of_a_report(path: Path, layers: int) -> int:
    run = Run(write_example_run(path / str(layers), layers=layers, ranks=2))
    with counted() as work:
        view = build_report(run)
    assert view.fusion is not None
    assert view.fusion.rate is not None
    assert (view.fusion.rate.n or 0) > 1700 * layers / 96
    return work.calls


def test_the_work_of_a_report_grows_no_faster_than_the_layers(tmp_path: Path) -> None:
    build_report(Run(write_example_run(tmp_path / "small", layers=1)))  # imports pandas and pyarrow
    assert work_of_a_report(tmp_path, 96) < 2.2 * work_of_a_report(tmp_path, 48)


def test_reading_a_run_never_imports_torch_or_textual(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from costlab.app.store import Run;"
        "from costlab.app.analysis.build import build_report; from costlab.app.report import render_json;"
        f"render_json(build_report(Run(Path({str(path)!r}))));"
        "print([m for m in ('torch', 'textual', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_analysis_imports_no_pandas() -> None:
    modules = "costlab.app.analysis.build, costlab.app.report, costlab.app.diagnosis, costlab.app.analysis.compare"
    code = f"import sys, {modules}; print([m for m in ('pandas', 'pyarrow', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

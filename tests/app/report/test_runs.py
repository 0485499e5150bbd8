"""The list of runs as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from costlab.app.report.runs import runs_json, runs_text
from costlab.app.store import RunSummary, list_runs
from tests.app.make_run import write_example_run


def test_runs_are_lines_and_problems_stand_below(tmp_path: Path) -> None:
    for n, status in enumerate(("complete", "failed")):
        write_example_run(tmp_path / f"run-{n}", run_id=f"run-{n}", status=status, created=f"2026-11-2{n}T14:02:00Z")
    (tmp_path / "run-9").mkdir()
    text = runs_text(list_runs(tmp_path))
    assert "● complete" in text and "✗ failed" in text and "! damaged" in text
    assert "2026-11-21 14:02" in text
    assert "- run-1: rank 1 ran out of GPU memory" in text
    assert max(map(len, text.splitlines())) <= 120
    assert max(map(len, runs_text(list_runs(tmp_path), 80).splitlines())) <= 80


def test_json_is_one_array_with_paths_as_text(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run-0", run_id="run-0")
    (entry,) = json.loads(runs_json(list_runs(tmp_path)))
    assert (entry["id"], entry["status"], entry["path"]) == ("run-0", "complete", str(tmp_path / "run-0"))
    assert json.loads(runs_json([])) == []


def test_hostile_titles_stay_text() -> None:
    summary = RunSummary(id="x\x1b[2J", path=Path("/x"), status="complete", title="a\nb\u202e", problem="c\x1b]0;t\x07")
    text = runs_text([summary])
    assert "\x1b" not in text and "\u202e" not in text

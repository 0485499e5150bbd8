"""The schedules that a run chose: from its manifest, also a stranger's, into view, report and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.schedules import MOST, schedules
from costlab.app.analysis.views import RunReport
from costlab.app.report.json import render_json
from costlab.app.report.markdown import render_markdown
from costlab.app.report.terminal import render_text
from costlab.app.store import Run
from costlab.probes.schedule_choice import EXTRA, ScheduleChoice
from tests.app.make_run import write_example_run

MIB = 1 << 20


def choice(nbytes: int, schedule: str, used: bool = False, **more: Any) -> ScheduleChoice:
    given = {
        "asked": "auto",
        "seconds": {"ring in 4 chunks": 0.002, "backend": 0.003},
        "library": "gloo",
        "ranks": 4,
        "hosts": 1,
    }
    return ScheduleChoice(nbytes=nbytes, schedule=schedule, used=used, **{**given, **more})


def recorded(path: Path, rows: list[ScheduleChoice], **options: Any) -> RunReport:
    run = write_example_run(path / "run", **options)
    manifest = json.loads((run / "manifest.json").read_bytes())
    manifest.setdefault("extra", {})[EXTRA] = msgspec.to_builtins(rows)
    (run / "manifest.json").write_text(json.dumps(manifest))
    return build_report(Run(run))


def test_messages_of_the_step_come_first_and_the_librarys_own_has_its_name() -> None:
    rows, how = schedules(
        msgspec.to_builtins(
            [choice(MIB, "backend"), choice(25 * MIB, "ring in 4 chunks", used=True), choice(4, "ring")]
        )
    )
    assert [(r.bytes, r.schedule, r.used) for r in rows] == [
        (25 * MIB, "ring in 4 chunks", True),
        (4, "ring", False),
        (MIB, "gloo's own", False),
    ]
    assert (rows[0].ms, rows[0].library_ms) == (2.0, 3.0)
    assert (rows[1].ms, rows[2].ms) == (None, 3.0)
    assert "--schedule auto over 4 ranks on 1 host:" in how


@pytest.mark.parametrize(
    "stored",
    [None, "x", 7, {}, [], [1], [{"nbytes": 1}], [{**msgspec.to_builtins(choice(8, "ring")), "seconds": "fast"}],
     msgspec.to_builtins([choice(0, "ring"), choice(-4, "ring")])],
)  # fmt: skip
def test_what_is_no_choice_is_none(stored: object) -> None:
    assert schedules(stored) == ([], "")


def test_a_strangers_manifest_is_bounded_and_bare() -> None:
    wild = choice(
        8, "\x1b[31mring", asked="a" * 500, seconds={"\x1b[31mring": float("inf"), "backend": -1.0}, library=""
    )
    rows, how = schedules(msgspec.to_builtins([wild] * 500))
    assert len(rows) == MOST
    assert (rows[0].schedule, rows[0].ms, rows[0].library_ms) == ("ring", None, None)
    assert len(how) < 200


def test_the_report_shows_them_in_all_forms(tmp_path: Path) -> None:
    report = recorded(tmp_path, [choice(25 * MIB, "ring <b>|x|</b>", used=True), choice(MIB, "backend")])
    text, markdown, data = render_text(report), render_markdown(report), json.loads(render_json(report))
    assert "gloo's own" in text
    assert "25 MiB" in text or "26.2 MB" in text
    assert "All-reduce schedules" in markdown
    assert "<b>" not in markdown
    assert [s["used"] for s in data["collectives"]["schedules"]] == [True, False]


def test_they_are_shown_where_no_collective_was_recorded(tmp_path: Path) -> None:
    report = recorded(tmp_path, [choice(MIB, "backend")], omit=frozenset({"collectives", "parts"}))
    assert report.collectives is not None
    assert report.collectives.rows == []
    assert "gloo's own" in render_text(report)


def test_a_run_that_planned_nothing_says_nothing_of_schedules(tmp_path: Path) -> None:
    report = build_report(Run(write_example_run(tmp_path / "run")))
    assert report.collectives is not None
    assert report.collectives.schedules == []
    assert "All-reduce schedules" not in render_markdown(report)

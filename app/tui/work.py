"""Slow work, run in threads: plain functions that read, analyse, write or delete, and know nothing of Textual."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costlab.app.analysis.views import RunReport
from costlab.app.store import RunSummary, StoreError, list_runs, open_run, open_sample, sample_names
from costlab.app.tui.live import KEPT_EVENTS
from costlab.app.tui.messages import Loaded

if TYPE_CHECKING:
    from costlab.app.analysis.compare import Comparison

FORMATS = ("md", "text", "json")
SUFFIXES = {"md": ".md", "text": ".txt", "json": ".json"}


def load(path: Path | str) -> Loaded:
    """Open and analyse a run given by directory or id; StoreError says in one line why not."""
    from costlab.app.analysis.build import build_report

    run = open_run(path)
    events = deque(run.events(), maxlen=KEPT_EVENTS)
    return Loaded(path=run.path, report=build_report(run), events=list(events))


def load_sample(name: str) -> Loaded:
    """Open and analyse a sample."""
    from costlab.app.analysis.build import build_report

    run = open_sample(name)
    return Loaded(path=run.path, report=build_report(run), events=list(run.events()), sample=name)


def listing(extra: Sequence[Path]) -> tuple[list[RunSummary], list[str], str]:
    """Stored runs and those opened by path, samples, and what could not be read."""
    problem = ""
    try:
        runs = list_runs()
    except StoreError as error:
        runs, problem = [], str(error)
    known = {summary.path.resolve() for summary in runs}
    for path in extra:
        if path.resolve() not in known:
            runs += [s for s in list_runs(path.parent) if s.path.resolve() == path.resolve()]
    return runs, sample_names(), problem


def newest(runs: Sequence[RunSummary]) -> Path | None:
    """The run to open first: the newest complete one, else the newest readable one."""
    usable = [s for s in runs if s.status not in ("damaged", "running")]
    complete = [s for s in usable if s.status == "complete"]
    return next((s.path for s in (*complete, *usable)), None)


def compare(first: Path, second: Path) -> Comparison:
    """Read two runs and compare the second with the first."""
    from costlab.app.analysis.compare import compare_reports

    return compare_reports(load(first).report, load(second).report)


def rendered(report: RunReport, form: str) -> str:
    """The report in one of FORMATS."""
    from costlab.app.report import render_json, render_markdown, render_text

    if form == "json":
        return render_json(report).decode()
    return render_text(report) if form == "text" else render_markdown(report)


def export(report: RunReport, form: str, path: Path, *, overwrite: bool, text: str = "") -> None:
    """Write the report, or `text` where given; FileExistsError unless `overwrite` when the file is there."""
    text = text or rendered(report, form)
    with path.open("w" if overwrite else "x", encoding="utf-8") as sink:
        sink.write(text if text.endswith("\n") else text + "\n")


def delete(path: Path) -> None:
    """Remove a run directory, and nothing that is not one."""
    if path.is_symlink() or not (path / "manifest.json").is_file():
        raise StoreError(f"{path} is no run directory and was not deleted")
    doomed = path.with_name(f".deleted-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)

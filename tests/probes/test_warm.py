"""Runs forked from a template: complete, failing, killed, cancelled, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from costlab.probes.launch import Launcher
from costlab.probes.records import AnyEvent, Hello, StepEvent
from costlab.probes.spec import RunSpec
from costlab.probes.warm import Template, TemplateError, WarmLauncher

TROUBLE = Path(__file__).parent / "workload_files" / "trouble.py"


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as running:
        yield running


def spec(**options: object) -> RunSpec:
    given = {"workload": "llama", "size": "tiny", "ranks": 2, "device": "cpu", "compile": "none", "dtype": "fp32"}
    quick = {"steps": 3, "warmup": 1, "profile_steps": 0, "checkpoint": False, "lean": True}
    return RunSpec(**{**given, **quick, **options})  # type: ignore[arg-type]


def test_a_forked_run_is_a_run(template: Template, tmp_path: Path) -> None:
    seen: list[AnyEvent] = []
    manifest = WarmLauncher(template, spec(), tmp_path / "run").run(seen.append)
    assert manifest.status == "complete"
    assert manifest.ranks == 2
    pids = {e.pid for e in seen if isinstance(e, Hello)}
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert sum(isinstance(e, StepEvent) and e.role == "timed" for e in seen) == 6


def test_each_forked_group_is_fresh(template: Template, tmp_path: Path) -> None:
    pids = []
    for name in ("a", "b"):
        seen: list[AnyEvent] = []
        assert WarmLauncher(template, spec(ranks=1), tmp_path / name).run(seen.append).status == "complete"
        pids += [e.pid for e in seen if isinstance(e, Hello)]
    assert len(set(pids)) == 2


def test_a_killed_rank_ends_the_group_and_is_named(template: Template, tmp_path: Path) -> None:
    def kill(event: AnyEvent) -> None:
        if isinstance(event, StepEvent) and event.rank == 1:
            os.kill(pids[1], signal.SIGKILL)

    pids: dict[int, int] = {}

    def told(event: AnyEvent) -> None:
        if isinstance(event, Hello):
            pids[event.rank] = event.pid
        kill(event)

    manifest = WarmLauncher(template, spec(steps=2000), tmp_path / "run").run(told)
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert manifest.failure.rank == 1
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_cancelling_ends_all_processes(template: Template, tmp_path: Path) -> None:
    launcher, pids = WarmLauncher(template, spec(steps=5000), tmp_path / "run"), []

    def told(event: AnyEvent) -> None:
        if isinstance(event, Hello):
            pids.append(event.pid)
        if isinstance(event, StepEvent):
            launcher.cancel()

    assert launcher.run(told).status == "cancelled"
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_without_its_template_a_run_is_started_by_torchrun(tmp_path: Path) -> None:
    gone = Template()
    gone.close()
    with pytest.raises(TemplateError):
        gone.start(tmp_path, 1, {})
    launcher = WarmLauncher(gone, spec(ranks=1), tmp_path / "run")
    assert isinstance(launcher, Launcher)
    assert launcher.run(lambda _: None).status == "complete"


def test_a_template_ends_with_whoever_started_it(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        running = Template()
        (tmp_path / "pid").write_text(str(running._process.pid))
        os._exit(0)
    os.waitpid(pid, 0)
    child, until = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < until:
        threading.Event().wait(0.1)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE

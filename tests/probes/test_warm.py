"""Runs forked from a template: complete, failing, killed, cancelled, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from costlab.probes.launch import Launcher
from costlab.probes.records import AnyEvent, Finished, Hello, StepEvent
from costlab.probes.spec import RunSpec
from costlab.probes.template import HIDDEN, unfit
from costlab.probes.warm import Template, TemplateError, WarmLauncher

TROUBLE = Path(__file__).parent / "workload_files" / "trouble.py"
FORKED = TROUBLE.with_name("forked.py")
SPOILT = """
import os, sys

def spoil():
    if "torch.cuda" in sys.modules:
        sys.modules["torch.cuda"]._is_in_bad_fork = lambda: True

os.register_at_fork(after_in_child=spoil)
"""
ALONE = """
import sys, threading, time
from pathlib import Path
from costlab.probes.records import Hello, StepEvent
from costlab.probes.spec import RunSpec
from costlab.probes.warm import Template, WarmLauncher

folder = Path(sys.argv[1])
spec = RunSpec(workload="llama", size="tiny", ranks=2, device="cpu", compile="none", dtype="fp32", steps=100000,
               warmup=1, profile_steps=0, checkpoint=False, lean=True)
with Template() as template:
    def told(event):
        if isinstance(event, (Hello, StepEvent)):
            (folder / f"{type(event).__name__}-{event.rank}").touch()
    (folder / "template").write_text(str(template._process.pid))
    WarmLauncher(template, spec, folder / "run").run(told)
"""


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


def family(pid: int) -> list[psutil.Process]:
    """A process and all that came from it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def ended(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether all are gone, or zombies that their adopter has not waited for, before so many seconds are over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes if p.is_running()):
            return True
        threading.Event().wait(0.1)
    return False


@pytest.mark.parametrize("victim", ["launcher", "template"])
def test_sigkill_of_either_ends_every_process(tmp_path: Path, victim: str) -> None:
    alone = subprocess.Popen(
        [sys.executable, "-P", "-c", ALONE, str(tmp_path)], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "StepEvent-1").exists() and time.monotonic() < until and alone.poll() is None:
            threading.Event().wait(0.1)
        template = int((tmp_path / "template").read_text())
        below = family(template)
        assert len(below) == 4  # the template, an agent, two ranks
        os.kill(alone.pid if victim == "launcher" else template, signal.SIGKILL)
        assert ended(below)
    finally:
        alone.kill()
        alone.wait()


@pytest.mark.parametrize("trouble", ["raises", "killed"])
def test_a_fork_that_fails_at_once_is_started_again_by_torchrun_and_so_are_those_after_it(
    template: Template, tmp_path: Path, trouble: str
) -> None:
    notes: list[str] = []
    seen: list[AnyEvent] = []
    options = {"workload": f"{FORKED}:{trouble}", "ranks": 1, "size": ""}
    try:
        manifest = WarmLauncher(template, spec(**options), tmp_path / "run", note=notes.append).run(seen.append)
        assert manifest.status == "complete"
        assert manifest.run_id == "run"
        assert [e.status for e in seen if isinstance(e, Finished) and e.rank < 0] == ["complete"]
        assert (tmp_path / "run-forked" / "raw" / "logs" / "forked" / "0" / "stderr.log").exists()
        assert (tmp_path / "run" / "raw" / "torchrun.log").exists()
        assert len(notes) == 1
        assert notes[0].startswith("a forked leg ended before its first measured step (rank 0 ")
        again = WarmLauncher(template, spec(**options), tmp_path / "again", note=notes.append)
        assert again.run(lambda _: None).status == "complete"
        assert not (tmp_path / "again-forked").exists()
        assert not again._forked
        assert len(notes) == 1
    finally:
        template.given_up = ""


@pytest.mark.parametrize("workload", [f"{TROUBLE}:out_of_memory", f"{FORKED}:killed_late"])
def test_what_no_fork_is_to_blame_for_is_the_result(template: Template, tmp_path: Path, workload: str) -> None:
    notes: list[str] = []
    launcher = WarmLauncher(template, spec(workload=workload, ranks=1, size=""), tmp_path / "run", note=notes.append)
    assert launcher.run(lambda _: None).status == "failed"
    assert notes == []
    assert not (tmp_path / "run-forked").exists()


def test_a_run_that_fails_by_torchrun_too_keeps_the_fork_for_the_next(template: Template, tmp_path: Path) -> None:
    notes: list[str] = []
    failing = spec(workload=f"{TROUBLE}:raises_in_make", ranks=1, size="")
    launcher = WarmLauncher(template, failing, tmp_path / "run", note=notes.append)
    assert launcher.run(lambda _: None).status == "failed"
    assert (tmp_path / "run-forked").exists()
    after = WarmLauncher(template, spec(ranks=1), tmp_path / "after", note=notes.append)
    assert after.run(lambda _: None).status == "complete"
    assert after._forked
    assert notes == []


def test_a_rank_whose_template_has_initialised_cuda_says_so_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    notes: list[str] = []
    with Template() as spoilt:
        launcher = WarmLauncher(spoilt, spec(ranks=1), tmp_path / "run", note=notes.append)
        assert launcher.run(lambda _: None).status == "complete"
    assert len(notes) == 1
    log = tmp_path / "run-forked" / "raw" / "logs" / "forked" / "0" / "stderr.log"
    assert "RuntimeError: the process that this rank was forked from had initialised CUDA" in log.read_text()


def test_a_template_that_cannot_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TemplateError, match=r"ImportError: libcudart\.so\.13: not found"):
        Template()


def test_a_thread_of_python_makes_a_process_unfit_to_be_forked() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert unfit() == "an import started a thread"
    finally:
        release.set()
        thread.join()


def test_gpus_are_hidden_from_the_template_and_not_from_its_ranks(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    (tmp_path / "looks.py").write_text(
        "import os\nfrom pathlib import Path\nfrom trouble import fine\n"
        "def make(ctx):\n"
        "    said = [os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')]\n"
        f"    Path({str(tmp_path / 'said')!r}).write_text(repr(said))\n"
        "    return fine(ctx)\n"
    )
    (tmp_path / "trouble.py").write_text(TROUBLE.read_text())
    assert HIDDEN["CUDA_VISIBLE_DEVICES"] == ""
    run = WarmLauncher(template, spec(workload=f"{tmp_path / 'looks.py'}:make", ranks=1, size=""), tmp_path / "run")
    assert run.run(lambda _: None).status == "complete"
    assert (tmp_path / "said").read_text() == "['5,7', None]"

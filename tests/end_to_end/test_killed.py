"""Killed at any phase: the run stays readable and marked, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from costlab.app.store import open_run
from costlab.probes.launch import Launcher
from costlab.probes.records import AnyEvent, Hello, PhaseEvent
from costlab.probes.spec import RunSpec

PHASES = ["check-in", "build", "compile", "warm-up", "measure", "profile", "checkpoint", "write"]
pytestmark = pytest.mark.xdist_group("killed")


def spec() -> RunSpec:
    return RunSpec(
        device="cpu", ranks=1, compile="none", dtype="fp32", steps=4, warmup=2, profile_steps=1, checkpoint_steps=2
    )


@pytest.mark.parametrize("phase", PHASES)
def test_rank_killed_in(phase: str, tmp_path: Path) -> None:
    pids: list[int] = []

    def on_event(event: AnyEvent) -> None:
        if isinstance(event, Hello):
            pids.append(event.pid)
        if isinstance(event, PhaseEvent) and event.phase == phase:
            os.kill(pids[-1], signal.SIGKILL)

    manifest = Launcher(spec(), tmp_path / "run").run(on_event)
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert "SIGKILL (most often the kernel's out-of-memory killer)" in manifest.failure.message
    entered = [*PHASES, "done"]
    assert manifest.failure.phase in entered[entered.index(phase) : entered.index(phase) + 2]  # the kill takes a moment
    assert_readable(tmp_path / "run", "failed", phase)
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("phase", ["build", "measure", "checkpoint"])
def test_launcher_killed_in(phase: str, tmp_path: Path) -> None:
    process, pids = start(tmp_path, phase)
    tree = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(running(p) for p in {*pids, *tree}):
        time.sleep(0.1)
    assert not any(running(p) for p in {*pids, *tree})
    assert_readable(tmp_path / "run", "incomplete", phase)


def test_interrupt_marks_the_run_cancelled(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "costlab.app", "run", "--device", "cpu", "-n", "1", "--compile", "none"]
    options = ["--steps", "100000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_phase(tmp_path / "run", "measure")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 4, err
    assert out.strip() == str(tmp_path / "run")
    assert_readable(tmp_path / "run", "cancelled", "measure")


def start(tmp_path: Path, phase: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    code = (
        "import sys, msgspec; from pathlib import Path\n"
        "from costlab.probes.launch import Launcher; from costlab.probes.spec import RunSpec\n"
        "Launcher(msgspec.json.decode(sys.argv[1], type=RunSpec), Path(sys.argv[2])).run(lambda e: None)"
    )
    asked = msgspec.json.encode(msgspec.structs.replace(spec(), steps=60, checkpoint_steps=60)).decode()
    process = subprocess.Popen([sys.executable, "-P", "-c", code, asked, str(tmp_path / "run")])
    return process, wait_for_phase(tmp_path / "run", phase)


def wait_for_phase(run: Path, phase: str) -> list[int]:
    """Block until rank 0 has entered the phase; its pid."""
    path = run / "rank-00000" / "events.jsonl"
    until = time.monotonic() + 150
    while time.monotonic() < until:
        if path.exists():
            events = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
            if any(e["event"] == "phase" and e["phase"] == phase for e in events):
                return [e["pid"] for e in events if e["event"] == "hello"]
        time.sleep(0.02)
    raise AssertionError(f"phase {phase} did not begin")


def assert_readable(path: Path, status: str, phase: str) -> None:
    """The store opens it; what was measured before the phase is there."""
    from costlab.app.analysis.build import build_report
    from costlab.app.report import render_text

    report = build_report(open_run(str(path)))
    assert report.run.status == status
    assert status in render_text(report)
    if PHASES.index(phase) > PHASES.index("measure"):
        assert report.steps is not None
        assert report.steps.step_ms.value


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_list_of_runs_fits_the_terminal(tmp_path: Path) -> None:
    from tests.app.make_run import write_example_run

    write_example_run(tmp_path / "runs" / "20261129-1402-llama-example-a1b2")
    for columns in ("80", "120"):
        environment = {**os.environ, "COSTLAB_HOME": str(tmp_path), "COLUMNS": columns}
        command = [sys.executable, "-P", "-m", "costlab.app", "runs"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert max(map(len, done.stdout.splitlines())) <= int(columns)

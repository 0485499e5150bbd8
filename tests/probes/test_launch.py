"""Every way a run can end, with real processes: one clear sentence, a readable run, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from costlab.probes.launch import Launcher, LaunchError, last_lines
from costlab.probes.records import AnyEvent, Hello, Manifest, PhaseEvent
from costlab.probes.spec import RunSpec, SpecError

T = TypeVar("T")
FILES = Path(__file__).parent / "workload_files"
pytestmark = pytest.mark.xdist_group("launch")


def spec(function: str, **changes: object) -> RunSpec:
    options: dict[str, object] = {
        "workload": f"{FILES / 'trouble.py'}:{function}",
        "ranks": 1,
        "device": "cpu",
        "compile": "none",
        "dtype": "fp32",
        "steps": 3,
        "warmup": 0,
        "profile_steps": 0,
        "checkpoint": False,
    }
    return RunSpec(**(options | changes))  # type: ignore[arg-type]


def launch(tmp_path: Path, asked: RunSpec, seen: list[AnyEvent] | None = None, **kwargs: float) -> Manifest:
    events = seen if seen is not None else []
    manifest = Launcher(asked, tmp_path / "run", **kwargs).run(events.append)
    assert_no_survivors(events)
    stored = msgspec.json.decode((tmp_path / "run" / "manifest.json").read_bytes(), type=Manifest)
    assert stored.status == manifest.status
    return manifest


def assert_no_survivors(events: list[AnyEvent]) -> None:
    pids = [e.pid for e in events if isinstance(e, Hello)]
    assert pids
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("killed", "host-out-of-memory", ["rank 0", "SIGKILL", "phase '"]),
        ("segfault", "segfault", ["rank 0", "SIGSEGV"]),
        ("exits", "error", ["rank 0", "exit code 17"]),
        ("raises", "error", ["rank 0", "the data on shard 7 is empty"]),
        ("out_of_memory", "out-of-memory", ["rank 0", "Tried to allocate 2.00 GiB"]),
        ("raises_in_make", "workload", ["trouble.py:raises_in_make", "KeyError", "trouble.py:"]),
        ("wrong_shape_of_result", "workload", ["returned int", "(model, batches, loss)"]),
        ("no_such_function", "workload", ["no function 'no_such_function'", "it defines:"]),
        ("quits", "workload", ["the licence server said no"]),
    ],
)
def test_failure_is_one_sentence(tmp_path: Path, function: str, kind: str, words: list[str]) -> None:
    manifest = launch(tmp_path, spec(function))
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert manifest.failure.kind == kind
    assert "\n" not in manifest.failure.message
    assert manifest.failure.advice
    for word in words:
        assert word in manifest.failure.message


def test_import_error_names_the_file_and_module(tmp_path: Path) -> None:
    manifest = launch(tmp_path, spec("x", workload=f"{FILES / 'broken_import.py'}:make"))
    assert manifest.failure is not None
    assert manifest.failure.kind == "workload"
    assert "broken_import.py:3" in manifest.failure.message
    assert "a_module_nobody_has" in manifest.failure.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    manifest = launch(tmp_path, spec("x", workload="/nowhere/model.py:make"))
    assert manifest.failure is not None
    assert "no such file: /nowhere/model.py" in manifest.failure.message


def test_a_rank_that_dies_is_blamed_not_its_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE_RANK", "1")
    manifest = launch(tmp_path, spec("raises", ranks=2))
    assert manifest.failure is not None
    assert manifest.failure.rank == 1
    assert "shard 7" in manifest.failure.message


def test_silent_rank_is_ended_with_its_stack(tmp_path: Path) -> None:
    # Long enough for a slow machine's imports, which are silent too.
    manifest = launch(tmp_path, spec("hangs", silence_timeout_s=20.0), grace_s=1.0)
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert manifest.failure.kind == "silent"
    assert "made no progress" in manifest.failure.message
    assert any("_sleep" in line for line in manifest.failure.log_tail)


def test_collective_timeout_names_the_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE_RANK", "1")
    manifest = launch(tmp_path, spec("hangs", ranks=2, collective_timeout_s=3.0), grace_s=1.0)
    assert manifest.failure is not None
    assert manifest.failure.kind in ("collective-timeout", "communication")
    assert manifest.failure.rank == 0


def test_cancel_keeps_the_run(tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    launcher = Launcher(spec("hangs"), tmp_path / "run", grace_s=1.0)

    def on_event(event: AnyEvent) -> None:
        events.append(event)
        if isinstance(event, PhaseEvent) and event.phase == "measure":
            launcher.cancel()

    backstop = threading.Timer(60, launcher.cancel)
    backstop.start()
    manifest = launcher.run(on_event)
    backstop.cancel()
    assert manifest.status == "cancelled"
    assert manifest.failure is None
    assert_no_survivors(events)


def test_good_run_is_complete(tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    manifest = launch(tmp_path, spec("fine", ranks=2), events)
    assert manifest.status == "complete", manifest.failure
    assert manifest.environment is not None
    assert manifest.workload is not None
    assert manifest.workload.units_per_step == 8
    assert (tmp_path / "run" / "rank-00001" / "steps.parquet").exists()


def test_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    code = (
        "import sys, msgspec; from pathlib import Path\n"
        "from costlab.probes.launch import Launcher; from costlab.probes.spec import RunSpec\n"
        "Launcher(msgspec.json.decode(sys.argv[1], type=RunSpec), Path(sys.argv[2])).run(lambda e: None)"
    )
    run_dir = tmp_path / "run"
    asked = msgspec.json.encode(spec("hangs", ranks=2)).decode()
    process = subprocess.Popen([sys.executable, "-P", "-c", code, asked, str(run_dir)])
    pids = wait_for(lambda: rank_pids(run_dir, 2))
    children = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone = wait_for(lambda: not any(alive(pid) for pid in {*pids, *children}) or None)
    assert gone
    manifest = msgspec.json.decode((run_dir / "manifest.json").read_bytes(), type=Manifest)
    assert manifest.status == "running"  # the store shows it as incomplete, since its launcher is gone


def rank_pids(run_dir: Path, count: int) -> list[int] | None:
    found = []
    for path in run_dir.glob("rank-*/events.jsonl"):
        first = path.read_bytes().partition(b"\n")[0]
        if first:
            found.append(int(msgspec.json.decode(first)["pid"]))
    return found if len(found) == count else None


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(get: Callable[[], T | None], seconds: float = 40.0) -> T:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = get()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def test_occupied_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    with pytest.raises(LaunchError, match="not empty"):
        Launcher(spec("fine"), tmp_path / "run").run(lambda _: None)
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps"),
        ({"ranks": -1}, "--ranks"),
        ({"cudagraphs": True}, "--compile"),
        ({"workload": "lama"}, "no workload 'lama'"),
        ({"nnodes": 2}, "--rdzv-endpoint"),
        ({"parallel": "hsdp", "ranks": 3, "shard_size": 2}, "does not divide"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Launcher(spec("fine", **changes), Path("unused"))


def test_last_lines_reads_only_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 200_000 + b"\nlast \xff line\n\n")
    assert last_lines(log, 1) == ["last � line"]
    assert last_lines(tmp_path / "absent", 3) == []

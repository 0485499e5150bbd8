"""Children that answer once: their output, and that neither they nor what they started outlive the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from costlab.probes.child import ChildCancelled, ask, last_words

# Starts a grandchild and says both pids in a file.
FAMILY = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as out: out.write(f"{os.getpid()} {grandchild.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
WATCHED = "from costlab.probes.session import die_with_launcher; die_with_launcher()\n" + FAMILY


def pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def all_gone(found: list[int], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        alive = [p for p in found if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_output_is_text_whatever_bytes_it_has() -> None:
    done = ask([sys.executable, "-c", "import sys; sys.stderr.buffer.write(b'a\\nb\\xff\\n'); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "a\nb\ufffd\n")
    assert last_words(done) == "b\ufffd"


def test_lines_are_told_as_they_come_and_errors_kept() -> None:
    code = """
import sys, time
print("one", flush=True)
time.sleep(0.3)
sys.stdout.buffer.write(b"two\\xff\\n")
sys.exit("three")
"""
    heard: list[tuple[str, float]] = []
    done = ask([sys.executable, "-c", code], told=lambda text: heard.append((text, time.monotonic())))
    assert [text for text, _ in heard] == ["one", "two\ufffd"]
    assert heard[1][1] - heard[0][1] > 0.2, "while it runs"
    assert (done.returncode, done.stdout, last_words(done)) == (1, "", "three")


def test_how_it_ended_where_it_said_nothing() -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert "SIGKILL: was memory short?" in last_words(ask([sys.executable, "-c", kill]))
    assert "ended with 7" in last_words(ask([sys.executable, "-c", "raise SystemExit(7)"]))


def test_time_ends_it_and_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ask([sys.executable, "-c", FAMILY, str(tmp_path / "pids")], timeout_s=3.0)
    found = pids(tmp_path / "pids")
    assert len(found) == 2 and all_gone(found)


def test_cancelling_ends_it_and_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    with pytest.raises(ChildCancelled):
        ask([sys.executable, "-c", FAMILY, str(path)], cancelled=path.exists)
    assert len(pids(path)) == 2 and all_gone(pids(path))


def test_an_interrupt_ends_it_and_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "pids"

    def interrupted() -> bool:
        if path.exists():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        ask([sys.executable, "-c", FAMILY, str(path)], cancelled=interrupted)
    assert len(pids(path)) == 2 and all_gone(pids(path))


def test_it_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    script = (
        f"import sys; from costlab.probes.child import ask; ask([sys.executable, '-c', {WATCHED!r}, {str(path)!r}])"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    assert len(pids(path)) == 2 and all_gone(pids(path))

"""The terminal is given back however the interface ends; a real pseudo-terminal, a real kill."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import termios
import time

import pytest

from costlab.app.guard import RESTORE

CODE = """
import os, signal, sys, time, tty
from costlab.app.guard import guarded
def interface():
    tty.setraw(0)
    sys.stdout.write("\\x1b[?1049hREADY %d" % os.getpid()); sys.stdout.flush()
    if sys.argv[1] == "normal":
        return 3
    time.sleep(60)
    return 0
sys.exit(guarded(interface))
"""


def start(mode: str) -> tuple[int, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-P", "-c", CODE, mode])
    return pid, terminal


def read_until(terminal: int, word: str, seconds: float = 20.0) -> str:
    text, until = "", time.monotonic() + seconds
    while time.monotonic() < until and word not in text:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                text += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                break
    return text


def test_killed_interface_leaves_a_sane_terminal() -> None:
    pid, terminal = start("sleep")
    before = termios.tcgetattr(terminal)
    child = int(read_until(terminal, "READY ").split("READY ")[1].split()[0] or read_until(terminal, " "))
    os.kill(child, signal.SIGKILL)
    text = read_until(terminal, "is kept")
    assert RESTORE in text
    assert "SIGKILL" in text
    after = termios.tcgetattr(terminal)
    assert after[3] & termios.ECHO
    assert after[3] & termios.ICANON
    assert before[:3] == after[:3]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGKILL


def test_normal_end_keeps_the_exit_code_and_writes_nothing() -> None:
    pid, terminal = start("normal")
    text = read_until(terminal, "never", seconds=3)
    assert RESTORE not in text
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_the_parent_ends_the_interface(number: signal.Signals) -> None:
    pid, terminal = start("sleep")
    text = read_until(terminal, "READY ")
    time.sleep(0.2)
    child = int((text + read_until(terminal, "never", seconds=0.3)).split("READY ")[1].split()[0])
    os.kill(pid, number)
    os.waitpid(pid, 0)
    until = time.monotonic() + 10
    while time.monotonic() < until and alive(child):
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

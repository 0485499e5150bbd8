"""On a real pseudo-terminal: signals end the app cleanly, and the terminal is as before."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from costlab.app.tui import recording
from tests.app.tui.driving import StepLauncher
class Told(StepLauncher):
    def run(self, on_event):
        manifest = super().run(on_event)
        open({marker!r}, "w").write(manifest.status)
        return manifest
from costlab.app.tui import app
app.Launcher = Told
app.CostlabApp.__init__.__kwdefaults__["launcher_factory"] = Told
def broken(self):
    raise ZeroDivisionError("a defect")
app.CostlabApp.action_theme = broken
sys.exit(app.run_tui([]))
"""
ALTERNATE_OFF = b"\x1b[?1049l"
CURSOR_ON = b"\x1b[?25h"


class Terminal:
    """The app on a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, home: Path) -> None:
        self.marker = home / "ended"
        home.mkdir(parents=True, exist_ok=True)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        code = PROGRAM.format(root=str(ROOT), marker=str(self.marker))
        env = {**os.environ, "COSTLAB_HOME": str(home), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        self.output = b""

    def read(self, until: bytes = b"", seconds: float = 30.0) -> bytes:
        """Collect output until `until` was seen or, without it, the process has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.output += os.read(self.master, 65536)
                except OSError:
                    break
            if until and until in self.output:
                return self.output
            if not until and self.process.poll() is not None and not select.select([self.master], [], [], 0.05)[0]:
                return self.output
        if until:
            raise AssertionError(f"{until!r} did not come")
        return self.output

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self.master, self.slave):
            os.close(descriptor)


@pytest.fixture
def terminal(tmp_path: Path) -> object:
    one = Terminal(tmp_path / "home")
    yield one
    one.close()


def check_restored(terminal: Terminal) -> None:
    """The alternate screen was left, the cursor shown, the line discipline put back."""
    assert ALTERNATE_OFF in terminal.output
    assert CURSOR_ON in terminal.output
    assert termios.tcgetattr(terminal.slave)[3] == terminal.before[3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_a_sane_terminal(terminal: Terminal, number: signal.Signals) -> None:
    terminal.read(until=b"record a run")
    terminal.process.send_signal(number)
    terminal.read()
    assert terminal.process.wait(20) == 128 + number
    check_restored(terminal)
    assert b"Traceback" not in terminal.output


def test_a_signal_cancels_the_active_run_and_waits_for_it(terminal: Terminal) -> None:
    terminal.read(until=b"record a run")
    os.write(terminal.master, b"n")
    terminal.read(until=b"--preset smoke")
    os.write(terminal.master, b"\r")
    terminal.read(until=b"14/20")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.read()
    assert terminal.process.wait(20) == 128 + signal.SIGTERM
    assert terminal.marker.read_text() == "cancelled"
    check_restored(terminal)


def test_a_crash_restores_the_terminal_and_ends_the_run(terminal: Terminal) -> None:
    terminal.read(until=b"record a run")
    os.write(terminal.master, b"n")
    terminal.read(until=b"--preset smoke")
    os.write(terminal.master, b"\r")
    terminal.read(until=b"14/20")
    os.write(terminal.master, b"t")
    terminal.read()
    assert terminal.process.wait(20) != 0
    assert terminal.marker.read_text() == "cancelled"
    assert b"ZeroDivisionError" in terminal.output
    check_restored(terminal)


def test_q_leaves_with_zero(terminal: Terminal) -> None:
    terminal.read(until=b"record a run")
    os.write(terminal.master, b"q")
    terminal.read()
    assert terminal.process.wait(20) == 0
    check_restored(terminal)

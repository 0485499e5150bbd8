"""Runs the terminal interface in a child process and gives the terminal back however that child ends.

A process killed by SIGKILL cannot restore the terminal it had switched to raw mode, the alternate screen and mouse
reports. The parent does no drawing: it waits, and cleans up after a child that died by a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import termios
from collections.abc import Callable
from typing import Any

# Mouse and focus reports, bracketed paste, kitty keys and alternate screen off; cursor and wrapping on.
RESTORE = (
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l\x1b[<u"
    "\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
)
PR_SET_PDEATHSIG = 1


def guarded(interface: Callable[[], int]) -> int:
    """Run `interface` in a child; returns its exit code, or 128 + the signal that killed it."""
    terminal = sys.stdin.fileno()
    saved = termios.tcgetattr(terminal)
    child = os.fork()
    if child == 0:
        os._exit(_be_child(interface))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: _forward(child, n))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
    status = _wait(child)
    if os.WIFSIGNALED(status):
        give_back(terminal, saved)
        name = signal.Signals(os.WTERMSIG(status)).name
        print(f"costlab: the interface was ended by {name}; a run it was recording is kept", file=sys.stderr)
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _be_child(interface: Callable[[], int]) -> int:
    """Run the interface; ask for SIGTERM should the parent be killed, so that it still restores the terminal."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        return interface()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _wait(child: int) -> int:
    while True:
        try:
            return os.waitpid(child, 0)[1]
        except InterruptedError:
            continue


def give_back(terminal: int, saved: list[Any]) -> None:
    """Restore the terminal's modes and screen."""
    with contextlib.suppress(termios.error):
        termios.tcsetattr(terminal, termios.TCSADRAIN, saved)
        termios.tcflush(terminal, termios.TCIFLUSH)
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), RESTORE.encode())

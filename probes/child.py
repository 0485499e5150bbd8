"""A process that is asked once and answers: it never outlives its caller. Torch-free.

It leads a process group of its own, so that what it starts ends with it. The caller holds the write end of its stdin:
a child that calls `session.die_with_launcher` also ends when the caller was killed outright.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

POLL_S = 0.1


class ChildCancelled(Exception):
    """The caller no longer wants the answer; the process was ended."""


def ask(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    told: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The ended process with its output as text, bytes that are none replaced.

    With `told` each line of its standard output goes there as it comes, on a thread, and the result holds none.

    Raises ChildCancelled, subprocess.TimeoutExpired after `timeout_s`, OSError where it cannot be started. However
    this is left, by KeyboardInterrupt too, the process and those it started have ended.
    """
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    theirs, ours = os.pipe()
    try:
        process = _start(command, theirs)
        teller = None if told is None else _teller(process, told)
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    if cancelled():
                        raise ChildCancelled from None
                    if ends is not None and time.monotonic() > ends:
                        raise subprocess.TimeoutExpired(command, timeout_s or 0.0) from None
                    continue
                return subprocess.CompletedProcess(command, process.returncode, out or "", err)
        finally:
            _end(process)
            if teller is not None:
                teller.join(10)  # what the process started may hold its output open
    finally:
        os.close(ours)


def _start(command: Sequence[str], stdin: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=os.environ | {"COSTLAB_WATCH_STDIN": "1"}, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(stdin)


def _teller(process: subprocess.Popen[str], told: Callable[[str], None]) -> threading.Thread:
    stream, process.stdout = process.stdout, None  # `communicate` then reads the errors alone

    def tell() -> None:
        with stream or contextlib.nullcontext(()) as lines:
            for text in lines:
                told(text.rstrip("\n"))

    thread = threading.Thread(target=tell, name="costlab-child-output", daemon=True)
    thread.start()
    return thread


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of its errors, or how it ended where it said nothing."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"its process was ended by {name}" + (": was memory short?" if name == "SIGKILL" else "")
    return lines[-1] if lines else f"its process ended with {done.returncode} without a word"

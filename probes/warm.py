"""Starts run after run without importing torch for each: ranks are forked from a template that has. Torch-free.

Every run still has its own processes, process group, device contexts and memory; what it is spared is about two imports
of torch, by torchrun and by the rank. Ranks of one template share the addresses of their code, as ranks of two starts
do not: what that is worth to a step's time is the same for all legs of a what-if, and is not part of its noise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from costlab.probes.launch import Launcher
from costlab.probes.spec import RunSpec

READY_S = 120.0


class TemplateError(Exception):
    """The template could not be started or is unfit; runs can be started without it."""


class Template:
    """The process that forks. A context manager; `start` may be called from several threads."""

    def __init__(self) -> None:
        """Raises TemplateError if it does not come up."""
        self._channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "costlab.probes.template", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel.settimeout(READY_S)
        try:
            said = self._line()
        except TemplateError:
            self.close()
            raise
        if said != "ready":
            self.close()
            raise TemplateError(said)

    def __enter__(self) -> Template:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the template; groups that run go on."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def start(self, run_dir: Path, ranks: int, env: dict[str, str]) -> Group:
        """Fork a group; raises TemplateError if the template is gone."""
        stdin, our_stdin = os.pipe()
        our_output, output = os.pipe()
        our_status, status = os.pipe()
        request = json.dumps({"run_dir": str(run_dir), "ranks": ranks, "env": env}).encode() + b"\n"
        try:
            with self._lock:
                sent = socket.send_fds(self._channel, [request], [stdin, output, status])
                self._channel.sendall(request[sent:])
                pid = int(self._line())
        except (OSError, ValueError, TemplateError) as error:
            for descriptor in (our_stdin, our_output, our_status):
                os.close(descriptor)
            raise TemplateError(f"the template is gone: {error}") from error
        finally:
            for descriptor in (stdin, output, status):
                os.close(descriptor)
        return Group(pid, our_stdin, our_output, our_status)

    def _line(self) -> str:
        data = b""
        while not data.endswith(b"\n"):
            try:
                more = self._channel.recv(4096)
            except OSError as error:
                raise TemplateError(f"the template was silent: {error}") from error
            if not more:
                raise TemplateError("the template ended")
            data += more
        return data.decode().strip()


class Group:
    """A forked group, as much like a Popen as the launcher needs."""

    def __init__(self, pid: int, stdin: int, output: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(output, "rb", buffering=0)
        self._status = os.fdopen(status, "rb", buffering=0)
        os.set_blocking(status, False)

    def poll(self) -> int | None:
        """The exit code, None while the agent lives; -9 where it was killed before it could say one."""
        if self.returncode is None:
            said = self._status.read(16)
            if said is not None:  # None: nothing written and not closed
                self.returncode = int(said) if said else -signal.SIGKILL
                self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Block until the agent has ended; subprocess.TimeoutExpired as of a Popen."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("template", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the agent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class WarmLauncher(Launcher):
    """A launcher whose ranks are forked; by torchrun where the template has gone or the run spans hosts."""

    def __init__(self, template: Template, spec: RunSpec, run_dir: Path) -> None:
        super().__init__(spec, run_dir)
        self.template = template

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self.spec.nnodes > 1:
            return super()._spawn()
        try:
            group = self.template.start(self.run_dir.resolve(), self.ranks, self._environment())
        except TemplateError:
            return super()._spawn()
        return group  # type: ignore[return-value]

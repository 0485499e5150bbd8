"""Starts run after run without importing torch for each: ranks are forked from a template that has. Torch-free.

Every run still has its own processes, process group, device contexts and memory; what it is spared is about two imports
of torch, by torchrun and by the rank. Ranks of one template share the addresses of their code, as ranks of two starts
do not: what that is worth to a step's time is the same for all legs of a what-if, and is not part of its noise.

A run that ends before its first measured step may owe that to the fork, so it is started once more by torchrun. Where
that one gets further, the fork was to blame, and all runs after it are started by torchrun too.
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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from costlab.probes.failures import one_line
from costlab.probes.launch import Launcher, LaunchError
from costlab.probes.records import AnyEvent, FailureInfo, Finished, Log, Manifest, StepEvent
from costlab.probes.spec import RunSpec

READY_S = 120.0


class TemplateError(Exception):
    """The template could not be started or is unfit; runs can be started without it."""


class Template:
    """The process that forks. A context manager; `start` may be called from several threads.

    `given_up` says why it is no longer used, "" while it is.
    """

    def __init__(self) -> None:
        """Raises TemplateError if it does not come up."""
        self.given_up = ""
        self._channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "costlab.probes.template", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._channel.close()
                raise TemplateError(f"it could not be started: {error}") from error
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
        """End the template and the groups that run."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def start(self, run_dir: Path, ranks: int, env: dict[str, str]) -> Group:
        """Fork a group; raises TemplateError if the template is gone or was given up."""
        if self.given_up:
            raise TemplateError(self.given_up)
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
            self.given_up = f"the template is gone: {error}"
            self._channel.close()  # a late answer must not be taken for that to another request
            raise TemplateError(self.given_up) from error
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


class _Progress:
    """Whether a run has come to its first measured step."""

    def __init__(self) -> None:
        self.measured = False

    def see(self, event: AnyEvent) -> None:
        """Take note of an event."""
        self.measured = self.measured or (isinstance(event, StepEvent) and event.role == "timed")


class WarmLauncher(Launcher):
    """A launcher whose ranks are forked; by torchrun where the template has gone or the run spans hosts.

    `note` is told once, in a sentence, when the template is given up. What the ranks of a failed fork left is kept
    beside the run's directory, under its name with "-forked".
    """

    def __init__(
        self, template: Template, spec: RunSpec, run_dir: Path, *, note: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(spec, run_dir)
        self.template = template
        self.note = note
        self._forked = False
        self._second: Launcher | None = None
        self._second_progress = _Progress()

    def cancel(self) -> None:
        """Ask the run to end, whichever start of it is under way. Thread-safe."""
        super().cancel()
        if self._second is not None:
            self._second.cancel()

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """Run to the end; once more by torchrun where the forked ranks failed before they had measured a step."""
        first, last = _Progress(), None

        def told(event: AnyEvent) -> None:
            nonlocal last
            first.see(event)
            if isinstance(event, Finished) and event.rank < 0:
                last = event  # whether it is the run's end is not known yet
            else:
                on_event(event)

        manifest = super().run(told)
        failure = manifest.failure
        if not self._forked or first.measured or failure is None or _same_without_fork(failure):
            if last is not None:
                on_event(last)
            return manifest
        on_event(Log(t=time.time(), level="warning", text="the forked ranks failed: started again by torchrun"))
        again = self._again(on_event)
        if again.status != "cancelled" and (again.failure is None or self._second_progress.measured):
            self._give_up(f"a forked leg ended before its first measured step ({one_line(failure.message, 160)})")
        return again

    def _again(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """The same run by torchrun, in the same directory."""
        try:
            self.run_dir.rename(_free(self.run_dir))
        except OSError as error:
            raise LaunchError(f"cannot move {self.run_dir} aside: {error.strerror}") from error
        self._second = Launcher(self.spec, self.run_dir, grace_s=self.grace_s)
        if self._cancel.is_set():  # it was asked for before there was a second one to ask
            self._second.cancel()

        def told(event: AnyEvent) -> None:
            self._second_progress.see(event)
            on_event(event)

        return self._second.run(told)

    def _give_up(self, reason: str) -> None:
        self.template.given_up = reason
        self.note(f"{reason}: it and the legs after it were started by torchrun")

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self.spec.nnodes > 1 or self.template.given_up:
            return super()._spawn()
        try:
            group = self.template.start(self.run_dir.resolve(), self.ranks, self._environment())
        except TemplateError as error:
            self._give_up(f"a leg could not be forked ({error})")
            return super()._spawn()
        self._forked = True
        return group  # type: ignore[return-value]


def _same_without_fork(failure: FailureInfo) -> bool:
    """Whether a failure is a result, worth no second start: too little memory, or options that do not go together.

    An option that is refused at check-in may be the device, which a fork can lose.
    """
    return failure.kind == "out-of-memory" or (failure.kind == "spec" and failure.phase != "check-in")


def _free(run_dir: Path) -> Path:
    """Where the leavings of a forked run go."""
    path, tries = run_dir.with_name(f"{run_dir.name}-forked"), 2
    while path.exists():
        path, tries = run_dir.with_name(f"{run_dir.name}-forked-{tries}"), tries + 1
    return path

"""One rank's identity and its voice: where it runs, and the event file through which it speaks to the launcher."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from costlab.probes import failures
from costlab.probes.records import (
    Event,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Log,
    PhaseEvent,
    Progress,
    StepEvent,
    encode_event,
)
from costlab.probes.sources import installed, position

HEARTBEAT_S = 2.0
EVENTS_FILE = "events.jsonl"


def rank_dir(run_dir: Path, rank: int) -> Path:
    """Folder of one rank's tables and events."""
    return run_dir / f"rank-{rank:05d}"


@dataclass
class Voice:
    """Appends events to `rank-NNNNN/events.jsonl`; one write per line, so a killed rank leaves whole lines."""

    run_dir: Path
    rank: int
    phase: str = "start"
    _sink: BinaryIO | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Create the file, announce the process, and start the heartbeat."""
        directory = rank_dir(self.run_dir, self.rank)
        directory.mkdir(parents=True, exist_ok=True)
        self._sink = (directory / EVENTS_FILE).open("ab", buffering=0)
        self.say(Hello(t=time.time(), rank=self.rank, pid=os.getpid()))
        threading.Thread(target=self._beat, name="costlab-heartbeat", daemon=True).start()

    def say(self, event: Event) -> None:
        """Append one event; silent when the file could not be opened."""
        if self._sink is not None:
            with self._lock:
                self._sink.write(encode_event(event))

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            self.say(Heartbeat(t=time.time(), rank=self.rank, phase=self.phase))

    def enter(self, phase: str, detail: str = "") -> None:
        """Say that a phase begins."""
        self.phase = phase
        self.say(PhaseEvent(t=time.time(), rank=self.rank, phase=phase, detail=detail))

    def progress(self, done: int, total: int, detail: str = "", eta_s: float | None = None) -> None:
        """Say how far the current phase is."""
        event = Progress(
            t=time.time(), rank=self.rank, phase=self.phase, done=done, total=total, detail=detail, eta_s=eta_s
        )
        self.say(event)

    def step(self, index: int, ms: float, role: str, loss: float | None = None) -> None:
        """Say that a step ended."""
        self.say(StepEvent(t=time.time(), rank=self.rank, step=index, ms=ms, loss=loss, role=role))

    def log(self, text: str, level: str = "info") -> None:
        """Add a line to the log pane."""
        self.say(Log(t=time.time(), rank=self.rank, text=text, level=level))  # type: ignore[arg-type]

    def fail(self, kind: str, message: str, traceback: str = "", advice: str = "") -> None:
        """Say why this rank cannot go on."""
        event = Failure(
            t=time.time(),
            rank=self.rank,
            kind=kind,
            phase=self.phase,
            message=message,
            traceback=traceback,
            advice=advice,
        )
        self.say(event)

    def finish(self) -> None:
        """Say that all tables are written."""
        self.say(Finished(t=time.time(), rank=self.rank))


def as_rank(run_dir: Path, body: Callable[[int, Voice], None]) -> int:
    """A rank's main around `body`: every exception becomes a Failure event and exit code 1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_launcher()
    rank = int(os.environ.get("RANK", "0"))
    voice = Voice(run_dir, rank)
    voice.open()
    try:
        body(rank, voice)
    except Exception as error:  # reported to the launcher, which ends the other ranks
        message = str(error) or type(error).__name__
        kind = failures.classify(f"{type(error).__module__}.{type(error).__name__}", message)
        said = f"{type(error).__name__}: {message}" if kind in ("error", "dtype") else message
        voice.fail(kind, said, traceback.format_exc(), failures.advice(kind, own_line(error)))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # destroying a process group whose peers are stuck would hang here
    voice.finish()
    return 0


def own_line(error: BaseException) -> str:
    """`file.py:line` of the innermost frame of the user's own code under an error, "" if it passed none."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    root = Path(__file__).resolve().parents[1]
    ours = tuple(f"{root / part}{os.sep}" for part in ("app", "kernels", "probes"))
    files = [f for f in frames if not f[0].startswith("<")]
    own = [f for f in files if not (installed(f[0]) or os.path.realpath(f[0]).startswith(ours))]
    return position(*own[-1]) if own else ""


def die_with_launcher() -> None:
    """End this rank when the launcher is gone, however it went.

    The launcher holds the write end of the pipe that every rank inherits as stdin; a closed pipe means that
    nobody is left to read the results. torchrun puts each rank in its own session, so signals do not reach it.
    """
    if os.environ.get("COSTLAB_WATCH_STDIN") != "1":
        return

    def watch() -> None:
        while True:
            try:
                data = os.read(0, 4096)
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(OSError):  # whoever read these errors is gone too
                    print("costlab: the launcher is gone; this rank ends", file=sys.stderr, flush=True)
                end_own_group()

    threading.Thread(target=watch, name="costlab-watch", daemon=True).start()


def end_own_group() -> None:
    """Kill this rank and its helpers (compile workers, data loaders)."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)


def loopback_interface() -> str | None:
    """Name of the loopback interface, for gloo on one host."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else next((n for n in names if n.startswith("lo")), None)

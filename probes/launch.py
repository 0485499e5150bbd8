"""Starts torchrun, follows the ranks' events, and accounts for every way the run can end. Torch-free.

Ranks append events to their own files; the launcher merges them into `events.jsonl` and calls `on_event`. It holds
the write end of a pipe that the ranks inherit as stdin, so that they end when it is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from costlab.probes import failures
from costlab.probes.clocks import ClockReading
from costlab.probes.records import (
    AnyEvent,
    Environment,
    Failure,
    FailureInfo,
    Finished,
    Heartbeat,
    Hello,
    Log,
    Manifest,
    PhaseEvent,
    WorkloadFacts,
    decode_event,
    encode_event,
)
from costlab.probes.schedule_choice import EXTRA as SCHEDULES
from costlab.probes.schedule_choice import ScheduleChoice
from costlab.probes.spec import RunSpec, validate
from costlab.probes.tables import write_bytes

POLL_S = 0.05
GRACE_S = 10.0
SPEC_FILE = "spec.json"
FACTS_FILE = "facts.json"
MANIFEST_FILE = "manifest.json"
TAIL_LINES = 24  # a stack from the innermost frame, which comes first, to the entry point has to fit


class LaunchError(Exception):
    """The run could not be started; the message says why and what to do."""


class Facts(msgspec.Struct, kw_only=True):
    """What rank 0 learns about machine and workload, written once known."""

    environment: Environment
    workload: WorkloadFacts | None = None
    ranks: int = 0
    clocks: list[ClockReading] = []
    schedules: list[ScheduleChoice] = []


@dataclass
class RankState:
    """What the launcher knows of one rank."""

    pid: int | None = None
    born: float = 0.0  # when it announced itself: a process younger than this is another one with a reused pid
    phase: str = "start"
    progressed: float = field(default_factory=time.monotonic)
    finished: bool = False
    offset: int = 0
    pending: bytes = b""


def resolve_ranks(spec: RunSpec) -> int:
    """Ranks on this host: as asked, else one per visible GPU, else 2 on CPU."""
    if spec.ranks:
        return spec.ranks
    return (count_gpus() or 2) if spec.device != "cpu" else 2


def count_gpus() -> int:
    """NVIDIA GPUs this process may use, by NVML and CUDA_VISIBLE_DEVICES; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no module, no driver, or no permission: there is no usable GPU in any of these cases
        return 0


class Launcher:
    """One run: `run` blocks until the ranks have ended; `cancel` may be called from another thread."""

    def __init__(self, spec: RunSpec, run_dir: Path, *, grace_s: float = GRACE_S) -> None:
        """`run_dir` must not exist or be empty; raises SpecError for options that cannot work."""
        validate(spec)
        self.spec = spec
        self.run_dir = run_dir
        self.grace_s = grace_s
        self.ranks = resolve_ranks(spec)
        self._cancel = threading.Event()
        self._states: dict[int, RankState] = {}
        self._failures: list[Failure] = []
        self._output: list[str] = []
        self._spawned = 0.0

    def cancel(self) -> None:
        """Ask the run to end; it is kept and marked cancelled. Thread-safe."""
        self._cancel.set()

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        """Run to the end and return the final manifest; raises LaunchError if nothing could be started."""
        manifest = self._prepare()
        started = time.monotonic()
        with (self.run_dir / "events.jsonl").open("ab", buffering=0) as sink:

            def told(event: AnyEvent) -> None:
                sink.write(encode_event(event))
                on_event(event)

            process = self._spawn()
            self._spawned = time.time()
            reader = threading.Thread(target=self._read_output, args=(process.stdout,), daemon=True)
            reader.start()
            try:
                failure = self._follow(process, manifest, told)
            finally:
                self._end(process)
                reader.join(timeout=5)
                self._drain(told)
            if failure is None and not self._cancel.is_set():
                failure = self._verdict(process.returncode)
            self._conclude(manifest, failure, time.monotonic() - started)
            told(Finished(t=time.time(), status=manifest.status))
        return manifest

    def _prepare(self) -> Manifest:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if any(self.run_dir.iterdir()):
                raise LaunchError(f"{self.run_dir} is not empty; give --out a new folder")
            (self.run_dir / "raw").mkdir()
            write_bytes(self.run_dir / SPEC_FILE, msgspec.json.encode(self.spec))
        except OSError as error:
            raise LaunchError(f"cannot write to {self.run_dir}: {error.strerror}; point --out elsewhere") from error
        manifest = Manifest(
            run_id=self.run_dir.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            spec=msgspec.to_builtins(self.spec),
            ranks=self.ranks * self.spec.nnodes,
            pid=os.getpid(),
            pid_started=process_start(os.getpid()),
        )
        self._save(manifest)
        return manifest

    def _save(self, manifest: Manifest) -> None:
        write_bytes(self.run_dir / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    def command(self) -> list[str]:
        """The torchrun command line."""
        spec = self.spec
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
        if spec.nnodes > 1:
            rendezvous = [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={spec.rdzv_endpoint}",
                f"--node-rank={spec.node_rank}",
            ]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={spec.nnodes}",
            f"--nproc-per-node={self.ranks}",
            f"--rdzv-id={self.run_dir.name}",
            *rendezvous,
            "--max-restarts=0",
            "--redirects=3",
            f"--log-dir={self.run_dir / 'raw' / 'logs'}",
            "--module",
            "costlab.probes.worker",
            str(self.run_dir),
        ]

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env["COSTLAB_WATCH_STDIN"] = "1"
        env["PYTHONUNBUFFERED"] = "1"
        env["PYTHONFAULTHANDLER"] = "1"
        threads = self.spec.threads or max(1, (os.cpu_count() or 1) // self.ranks)
        env.setdefault("OMP_NUM_THREADS", str(threads))
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        return env

    def _spawn(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start torchrun: {error}; run `costlab doctor`") from error

    def _read_output(self, stream: IO[bytes] | None) -> None:
        """Keep torchrun's own output: it names the exit code of a rank that died without a word."""
        if stream is None:
            return
        with (self.run_dir / "raw" / "torchrun.log").open("wb") as log:
            for line in stream:
                log.write(line)
                log.flush()
                self._output.append(line.decode(errors="replace"))
                del self._output[:-400]

    def _follow(
        self, process: subprocess.Popen[bytes], manifest: Manifest, told: Callable[[AnyEvent], None]
    ) -> FailureInfo | None:
        """Stream events until the group ends, is cancelled, fails or falls silent."""
        facts_known = False
        while True:
            ended = process.poll() is not None
            self._drain(told)
            if not facts_known:
                facts_known = self._adopt_facts(manifest)
            if ended or self._cancel.is_set():
                return None
            if self._failures:
                self._await_peers(process, told)
                return None
            silent = self._silent_rank()
            if silent is not None:
                rank, seconds = silent
                self._dump_stack(rank)
                told(Log(t=time.time(), rank=rank, level="error", text=f"silent for {seconds:.0f} s, ending the run"))
                return failures.silent(rank, self._states[rank].phase, seconds, self._tail(rank))
            time.sleep(POLL_S)

    def _await_peers(self, process: subprocess.Popen[bytes], told: Callable[[AnyEvent], None]) -> None:
        """One rank failed: give the others a moment to fail too, since theirs may be the cause."""
        until = time.monotonic() + 2.0
        while process.poll() is None and time.monotonic() < until:
            time.sleep(POLL_S)
            self._drain(told)

    def _drain(self, told: Callable[[AnyEvent], None]) -> None:
        for directory in sorted(self.run_dir.glob("rank-*")):
            rank = int(directory.name.removeprefix("rank-"))
            state = self._states.setdefault(rank, RankState())
            for event in self._read_new(directory / "events.jsonl", state):
                self._note(state, event)
                if not isinstance(event, Heartbeat):
                    told(event)

    def _read_new(self, path: Path, state: RankState) -> list[AnyEvent]:
        try:
            with path.open("rb") as source:
                source.seek(state.offset)
                data = source.read()
        except FileNotFoundError:
            return []
        state.offset += len(data)
        *lines, state.pending = (state.pending + data).split(b"\n")
        events = []
        for line in lines:
            try:
                events.append(decode_event(line))
            except msgspec.MsgspecError:
                events.append(Log(t=time.time(), level="warning", text="a damaged event line was dropped"))
        return events

    def _note(self, state: RankState, event: AnyEvent) -> None:
        if not isinstance(event, Heartbeat):
            state.progressed = time.monotonic()
        if isinstance(event, Hello):
            state.pid, state.born = event.pid, event.t
        elif isinstance(event, PhaseEvent):
            state.phase = event.phase
        elif isinstance(event, Failure):
            self._failures.append(event)
        elif isinstance(event, Finished):
            state.finished = True

    def _adopt_facts(self, manifest: Manifest) -> bool:
        """Copy what rank 0 found into the manifest as soon as it is known, so a killed run has it too."""
        path = self.run_dir / FACTS_FILE
        if not path.exists():
            return False
        facts = msgspec.json.decode(path.read_bytes(), type=Facts)
        manifest.environment, manifest.workload = facts.environment, facts.workload
        manifest.ranks = facts.ranks or manifest.ranks
        if facts.clocks:
            manifest.extra["clocks"] = msgspec.to_builtins(facts.clocks)
        if facts.schedules:
            manifest.extra[SCHEDULES] = msgspec.to_builtins(facts.schedules)
        self._save(manifest)
        return facts.workload is not None

    def _silent_rank(self) -> tuple[int, float] | None:
        now = time.monotonic()
        for rank, state in self._states.items():
            quiet = now - state.progressed
            if not state.finished and quiet > self.spec.silence_timeout_s:
                return rank, quiet
        return None

    def _dump_stack(self, rank: int) -> None:
        """Ask the silent rank for its Python stack; faulthandler writes it to the rank's log."""
        pid = self._states[rank].pid
        if pid is not None:
            try:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
            except ProcessLookupError:
                return

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Leave no process behind: ask torchrun, then kill every rank's session and torchrun's own."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=self.grace_s)
        if process.stdin is not None:
            process.stdin.close()
        for state in self._states.values():
            if state.pid is not None:
                kill_group(state.pid, state.born)
        kill_group(process.pid, self._spawned)
        process.wait()

    def _verdict(self, code: int) -> FailureInfo | None:
        """Why the group ended, None if it ended well."""
        if self._failures:
            event = min(self._failures, key=_blame)
            return failures.from_event(event, self._tail(event.rank))
        exits = failures.torchrun_exits("".join(self._output))
        bad = [(rank, status) for rank, status in exits if status != 0]
        if bad:
            rank, status = bad[-1]
            phase = self._states[rank].phase if rank in self._states else "start"
            return failures.from_exit(rank, status, phase, self._tail(rank))
        if code == 0 and self._states and all(s.finished for s in self._states.values()):
            return None
        last = next((line.strip() for line in reversed(self._output) if line.strip()), "it printed nothing")
        message = f"torchrun ended with exit code {code} before the ranks had finished: {failures.one_line(last)}"
        return FailureInfo(
            kind="launcher",
            rank=-1,
            phase="start",
            message=message,
            advice=failures.KINDS["launcher"],
            log_tail=[line.rstrip() for line in self._output[-TAIL_LINES:]],
        )

    def _tail(self, rank: int) -> list[str]:
        """Last lines the rank wrote to its log."""
        lines: list[str] = []
        for name in ("stdout.log", "stderr.log"):
            for path in sorted((self.run_dir / "raw" / "logs").rglob(name)):
                if path.parent.name == str(rank):
                    lines += last_lines(path, TAIL_LINES)
        return lines[-TAIL_LINES:]

    def _conclude(self, manifest: Manifest, failure: FailureInfo | None, seconds: float) -> None:
        self._adopt_facts(manifest)
        manifest.duration_s = seconds
        manifest.failure = failure
        if self._cancel.is_set():
            manifest.status = "cancelled"
        else:
            manifest.status = "failed" if failure else "complete"
        self._save(manifest)


def _blame(event: Failure) -> tuple[int, float]:
    """Earliest failure first; a peer's broken connection is a consequence, not the cause."""
    consequence = event.kind in ("communication", "collective-timeout")
    return (1 if consequence else 0, event.t)


def kill_group(pid: int, born: float) -> None:
    """SIGKILL the process group led by `pid`, unless `pid` now belongs to a process younger than `born`."""
    started = process_start(pid)
    if started is not None and started > born + 1.0:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def process_start(pid: int) -> float | None:
    """Start time of a process in unix seconds, None if it is gone; tells a reused pid from the same process."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` non-empty lines of a log, read from its end."""
    try:
        with path.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - 65536))
            text = source.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]

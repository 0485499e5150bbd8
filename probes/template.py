"""A process that has imported what ranks need, and forks them: the other half of costlab.probes.warm.

Run as `-m costlab.probes.template FD`, FD being a Unix socket. It says "ready" once everything is imported, or why it
is unfit, and then forks a group for every request: an agent in a session of its own that stands where torchrun stands
otherwise, and its ranks, each in a session of its own, with the environment, stdin and logs that torchrun would give
them. The template itself never touches a device: GPUs are hidden from it while it imports, and a rank of a template
that has initialised CUDA all the same ends with an error. It ends when the socket closes, and its groups with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.profiler",
    "torch.utils.flop_counter",
    "pyarrow.parquet",
    "psutil",
    "costlab.kernels.fused.registry",
    "costlab.probes.worker",
    "costlab.probes.ceilings",
    "costlab.probes.checkin",
    "costlab.probes.compile_events",
    "costlab.probes.energy",
    "costlab.probes.environment",
    "costlab.probes.fusion.inductor",
    "costlab.probes.memory",
    "costlab.probes.parallel",
    "costlab.probes.parity",
    "costlab.probes.profiling",
    "costlab.probes.schedule",
    "costlab.probes.steps",
    "costlab.probes.topology",
    "costlab.probes.workloads.gpt2",
    "costlab.probes.workloads.llama",
    "costlab.probes.workloads.loader",
    "costlab.probes.workloads.resnet",
)
MOST_REQUEST = 1 << 20
GRACE_S = 10.0
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> int:
    """Import, say so, serve until the socket closes."""
    with socket.socket(fileno=int(argv[1])) as channel:
        os.environ.update(HIDDEN)  # an import that asks for devices is told "none", and the driver is left alone
        try:
            for name in MODULES:
                importlib.import_module(name)
            prepare_compiles()
            reason = unfit()
        except Exception as error:  # whoever started this process sees no traceback of it
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        channel.sendall((reason or "ready").encode() + b"\n")
        if not reason:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the agents report by themselves
            serve(channel)
    return 0


def prepare_compiles() -> None:
    """Find out what every rank's first compile would ask for again, as far as that needs no device."""
    from costlab.probes import compile_internals

    compile_internals.read_cache_keys()
    if not Path("/dev/nvidiactl").exists():
        compile_internals.probe_cpu_vectors()


def unfit() -> str:
    """Why this process must not be forked, "" if it may: a driver in use or a thread of Python's would be missed."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return "an import opened the GPU's driver"
    if threading.active_count() > 1:
        return "an import started a thread"
    return ""


def serve(channel: socket.socket) -> None:
    """Fork an agent for every request: a line of JSON with the descriptors of stdin, output and status."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MOST_REQUEST, 3)
        if not data:
            return
        while not data.endswith(b"\n"):
            more = channel.recv(MOST_REQUEST)
            if not more:
                return
            data += more
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the ranks can be ended with it
            end_with(own)
            channel.close()
            become_agent(json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(f"{pid}\n".encode())


def end_with(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, by SIGKILL or otherwise; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it could be asked for
            os._exit(1)


def become_agent(request: dict[str, Any], descriptors: list[int]) -> None:
    """Start the ranks, wait for them, report as torchrun does; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stdin, output, status = descriptors
        request["status"] = status
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(stdin)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["env"])
        code = run_group(request)
        os.write(status, str(code).encode())
    except BaseException:  # os._exit says nothing
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_group(request: dict[str, Any]) -> int:
    """All ranks to their end; the first that fails ends the others."""
    count, port = int(request["ranks"]), free_port()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count)
    )
    running = {start_rank(request, rank): rank for rank in range(count)}
    signal.signal(signal.SIGTERM, lambda *_: end(running))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    failed: list[tuple[int, int]] = []
    while running:
        pid, status = os.wait()
        rank = running.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is not None and code:
            failed.append((rank, code))
            end(running)
    if failed:
        rank, code = failed[0]
        print(f"rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 0)", flush=True)
    return 1 if failed else 0


def end(running: dict[int, int]) -> None:
    """Ask the ranks to end, and kill those that do not."""
    for sign, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
        for pid in list(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, sign)
        until = time.monotonic() + patience
        while time.monotonic() < until and any(alive(pid) for pid in running):
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a child is neither gone nor a zombie; leaves it to be waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_rank(request: dict[str, Any], rank: int) -> int:
    """Fork one rank; the pid."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # so that it can be ended before it has a session
        return pid
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(request["status"])  # its end says that the agent has ended, whatever became of the ranks
        code = run_rank(Path(request["run_dir"]), rank)
    except BaseException:  # nobody else would say it
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_rank(run_dir: Path, rank: int) -> int:
    """The worker's main with this rank's logs and environment. RuntimeError if the template spoilt CUDA for it."""
    import torch

    from costlab.probes import worker

    logs = run_dir / "raw" / "logs" / "forked" / str(rank)
    logs.mkdir(parents=True, exist_ok=True)
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        descriptor = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # Python read its own at the start
    faulthandler.enable()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # OpenMP read its variable at the import
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # ranks and legs would otherwise draw alike where a workload sets no seed
    if torch.cuda._is_in_bad_fork():  # "no device" would be believed, and the rank run on the CPU
        raise RuntimeError("the process that this rank was forked from had initialised CUDA")
    return worker.main(["worker", str(run_dir)])


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Eight gloo processes that live for a test session and run functions sent to them, so that thousands of cases share
one start-up. Smaller world sizes are the first n of them."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT = 120.0
CLONE_NEWNET = 0x40000000
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"]
worlds: dict[int, Any] = {}  # in a rank: the group of ranks 0..n-1, by n


class RankFailure(AssertionError):
    """A function failed on some ranks; the text holds every rank's traceback."""


def serve(rank: int, size: int, store: str, pipe: Connection, interface: str, namespace: str | None) -> None:
    """Child: join the group, then run (function, arguments) pairs until None arrives."""
    if namespace is not None:
        enter_namespace(namespace)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    rendezvous = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    for n in range(1, size + 1) if namespace is None else (size,):
        worlds[n] = dist.group.WORLD if n == size else dist.new_group(list(range(n)))
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send(("ok", function(rank, *arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
    dist.destroy_process_group()


def enter_namespace(path: str) -> None:
    """Move this thread, and those it starts, to a network namespace (os.setns comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(handle)


class RankPool:
    """`run(function, n, *arguments)` calls function(rank, *arguments) on ranks 0..n-1 and returns their results.

    Args:
        size: processes.
        namespaces: for each rank the path of the network namespace to live in, with an interface `e0`.
    """

    def __init__(self, size: int, namespaces: list[str] | None = None) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            space, interface = (namespaces[rank], "e0") if namespaces else (None, "lo")
            process = context.Process(target=serve, args=(rank, size, store, there, interface, space), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(size):
            self._receive(rank)

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        for pipe in self._pipes[:size]:
            pipe.send((function, arguments))
        replies = [self._receive(rank) for rank in range(size)]
        failed = [f"rank {r}:\n{text}" for r, (state, text) in enumerate(replies) if state == "failed"]
        if failed:
            raise RankFailure("\n".join(failed))
        return [value for _, value in replies]

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def _receive(self, rank: int) -> tuple[str, Any]:
        if not self._pipes[rank].poll(LIMIT):
            self.close()
            raise RankFailure(f"rank {rank} did not answer within {LIMIT:g} s")
        try:
            state, value = self._pipes[rank].recv()
        except EOFError:
            return "failed", "the process ended"
        return state, value

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

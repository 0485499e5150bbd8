"""Saves in forked children that die at their n-th system call that changes the disk, for every n.

A process of its own with one thread: a child forked from a process whose torch already has a thread pool waits for
threads that it does not have. usage: dying.py ROOT; prints the number of deaths and exits with 0 if all were survived.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, latest

MIB = 1 << 20


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.full((100, 257), value) for i in range(10)}


def save(root: Path, step: int) -> None:
    checkpointer = AsyncCheckpointer(root, slab_bytes=MIB)
    checkpointer.save(step, state(float(step)))
    checkpointer.wait()


def die_at(root: Path, fatal: int) -> None:
    """Count the calls that change the disk and be killed at the one numbered `fatal`."""
    count = 0

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return call

    for name in ("pwrite", "fsync", "posix_fallocate", "ftruncate", "mkdir", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    save(root, 2)
    os._exit(0)


def newest(root: Path) -> tuple[Path, int]:
    """The newest checkpoint and its step, every byte verified."""
    path = latest(root)
    assert path is not None
    with Checkpoint.open(path) as checkpoint:
        checkpoint.verify()
        step = checkpoint.manifest.step
        assert all((checkpoint.tensor(name) == step).all() for name in state(0.0))
    return path, step


def first_save(root: Path) -> None:
    """In a child as well, so that this process never starts a thread."""
    child = os.fork()
    if child == 0:
        save(root, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(root: Path) -> int:
    torch.set_num_threads(1)
    first_save(root)
    for fatal in range(1, 40):
        child = os.fork()
        if child == 0:
            die_at(root, fatal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        path, step = newest(root)
        if code == 0:
            assert step == 2
            print(fatal - 1)
            return 0
        assert code == -signal.SIGKILL
        # The rename of the manifest is the commit: before it the old checkpoint is the newest, after it the new one.
        assert step in (1, 2)
        if step == 2:
            shutil.rmtree(path)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

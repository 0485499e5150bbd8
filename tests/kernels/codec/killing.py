"""kill -9 at random moments: a forked child saves without end, and after each kill the last checkpoint must be whole.

    python killing.py DIRECTORY MOMENTS SEED        prints {"moments": ..., "newest": ...}

Forking after the imports makes a moment cost a tenth of a second. Never run it in a process that has started CUDA.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.manifest import committed, latest, read_manifest
from costlab.kernels.codec.pipeline import AsyncCheckpointer

TENSORS = 40


def _save_without_end(root: Path, told: int) -> None:
    found = latest(root)
    step = read_manifest(found).step + 1 if found else 0
    parameters = {f"p{i}": torch.zeros(100 + i, 257) for i in range(TENSORS)}
    checkpointer = AsyncCheckpointer(root, slab_bytes=1 << 20)
    while True:
        for value in parameters.values():
            value.fill_(step)
        checkpointer.save(step, {**parameters, "step": step})
        checkpointer.wait()
        os.write(told, step.to_bytes(8, "little"))
        step += 1


def _check(root: Path, told: int, before: int) -> int:
    """The newest checkpoint is whole, of one step, and no older than what the child was told is durable."""
    directory = latest(root)
    assert directory is not None
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.verify()
        step = checkpoint.manifest.step
        assert step >= told and step >= before, (step, told, before)
        assert checkpoint.value("step") == step
        assert all(bool((checkpoint.tensor(f"p{i}") == step).all()) for i in range(TENSORS))
    for old, manifest in committed(root):
        if manifest.step < step:
            shutil.rmtree(old)
    return step


def killed_at_random(root: Path, moments: int, seed: int) -> int:
    """Kill `moments` children; the newest step saved. Raises where a checkpoint is torn or lost."""
    rng, newest = random.Random(seed), -1
    for _ in range(moments):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _save_without_end(root, writer)
        os.close(writer)
        told = int.from_bytes(os.read(reader, 8), "little")
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 8):
            told = int.from_bytes(more, "little")
        os.close(reader)
        newest = _check(root, told, newest)
    return newest


if __name__ == "__main__":
    last = killed_at_random(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"moments": int(sys.argv[2]), "newest": last}))

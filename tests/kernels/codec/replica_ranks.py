"""What the ranks of `test_replica` run: usage: replica_ranks.py SCENARIO ROOT, with torchrun's environment variables.

Each scenario writes what its rank saw to `<root>/seen-<rank>.json`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, CheckpointError, Replica, files
from costlab.kernels.codec.files import AtomicFile
from costlab.kernels.codec.replica import PIECE

SIZE = 5 * PIECE // 2 + 12345
CHUNK = PIECE + 4096


def data_of(rank: int, save: int, size: int = SIZE) -> Any:
    return np.random.default_rng([rank, save]).integers(0, 256, size, dtype=np.uint8)


def exchange(replica: Replica, save: int, size: int | None = SIZE) -> Future[Path | None]:
    """Both directions at once: chunks from four threads in any order, as the writers of a save send them."""
    taken = replica.begin(f"step-{save}", replica.source_name)
    data = data_of(replica.rank, save)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda at: replica.send(data[at : at + CHUNK], at), range(0, SIZE, CHUNK)))
    replica.end(size)
    taken.exception()
    return taken


def arrived(replica: Replica, save: int, taken: Future[Path | None]) -> str:
    """ "same", "other" bytes, "none" or the error."""
    if (error := taken.exception()) is not None:
        return type(error).__name__
    if (path := taken.result()) is None:
        return "none"
    peer = (replica.rank + replica.world_size // 2) % replica.world_size
    return "same" if path.read_bytes() == data_of(peer, save).tobytes() else "other"


def everything(root: Path) -> dict[str, Any]:
    """Exchanges over groups that `create` made: whole, given up by the last rank, not writable at the last rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seen: dict[str, Any] = {"errors": [_refusal(lambda: Replica.create(root, "nccl"))]}
    seen["errors"].append(_refusal(lambda: Replica.create(root, "mpi")))  # type: ignore[arg-type]
    replica = Replica.create(root / f"peer-{rank}", timeout=timedelta(seconds=60))
    last = rank == world - 1
    seen["label"] = replica.label
    with Requests() as requests:
        seen["whole"] = arrived(replica, 1, exchange(replica, 1))
    seen |= {"writes": requests.count, "direct": requests.direct}
    seen["given up"] = arrived(replica, 2, exchange(replica, 2, None if last else SIZE))
    if last:
        replica.decline("step-3", replica.source_name)
    else:
        seen["declined"] = arrived(replica, 3, exchange(replica, 3))
    proper = replica.root
    if last:
        (root / "a file").touch()
        replica.root = root / "a file"
    seen["no root"] = arrived(replica, 4, exchange(replica, 4))
    replica.root = proper
    if last:
        with FullDisk():
            seen["full disk"] = arrived(replica, 5, exchange(replica, 5))
    else:
        seen["full disk"] = arrived(replica, 5, exchange(replica, 5))
    seen["again"] = arrived(replica, 6, exchange(replica, 6))
    seen["failed"] = replica.failed
    seen["left"] = sorted(str(p.relative_to(proper)) for p in proper.rglob("*") if p.is_file())
    replica.close()
    seen["group"] = _alive(replica)
    return seen


def lanes(root: Path) -> dict[str, Any]:
    """A group for each direction, as NCCL needs; one rank that doesn't close keeps the groups of all."""
    rank = dist.get_rank()
    made = (dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
    replica = Replica(dist.new_group(backend="gloo"), root / f"peer-{rank}", made)
    found = arrived(replica, 1, exchange(replica, 1))
    replica.close()
    return {"whole": found, "group": _alive(replica)}


def gone(root: Path) -> dict[str, Any]:
    """The last rank ends without a word in the middle of a save.

    Gloo tells most waits that the connection broke; one that begins meanwhile can miss it and ends by the time-out.
    """
    rank = dist.get_rank()
    replica = Replica.create(root / f"peer-{rank}", timeout=timedelta(seconds=15))
    taken = replica.begin("step-1", replica.source_name)
    replica.send(data_of(rank, 1, CHUNK), 0)
    if rank == dist.get_world_size() - 1:
        os._exit(0)
    for at in range(1, 20):
        replica.send(data_of(rank, 1, CHUNK), at * CHUNK)
    replica.end(20 * CHUNK)
    seen = {"failed": bool(replica.failed), "taken": arrived(replica, 1, taken)}
    seen["next"] = arrived(replica, 2, exchange(replica, 2))
    seen["left"] = [p.name for p in replica.root.rglob("*") if p.is_file()]
    replica.close()
    return {**seen, "group": _alive(replica)}


def on_gpus(root: Path) -> dict[str, Any]:
    """Over NCCL while the default stream computes and the default group reduces; then through the checkpointer."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    replica = Replica.create(root / f"peer-{rank}")
    seen: dict[str, Any] = {"label": replica.label}
    sender = threading.Thread(target=lambda: seen.update(whole=arrived(replica, 1, exchange(replica, 1))))
    square, total = torch.randn(4096, 4096, device=device), torch.ones(1 << 20, device=device)
    sender.start()
    for number in range(300):  # a fixed number, so that both ranks reduce equally often
        square = torch.nn.functional.normalize(square @ square)
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if number % 50 == 49:
            torch.cuda.synchronize()
    sender.join()
    seen["sum"] = float(total.mean())
    state = {"w": torch.randn(40 << 20, device=device)}
    with AsyncCheckpointer(root / "runs", replica=replica, per_rank=["w"], commit_timeout=60) as checkpointer:
        report = checkpointer.save(1, state).result(60)
    assert report is not None
    seen["replica"] = report.replica_error
    dist.barrier()
    with Checkpoint.open(report.directory) as checkpoint:
        seen["saved"] = torch.equal(checkpoint.tensor(f"w@{rank}"), state["w"].cpu())
    original = report.directory / replica.source_name
    seen["copy"] = report.replica is not None and report.replica.read_bytes() == original.read_bytes()
    replica.close()
    seen["failed"] = replica.failed
    return seen


class Requests:
    """Notes the writes of `AtomicFile`s and how many went to a descriptor with O_DIRECT."""

    def __enter__(self) -> Requests:
        self.real, self.count, self.direct, self.lock = files.pwrite_all, 0, 0, threading.Lock()
        files.pwrite_all = self.write
        return self

    def write(self, fd: int, data: Any, offset: int) -> None:
        with self.lock:
            self.count += 1
            self.direct += bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.real(fd, data, offset)

    def __exit__(self, *_: object) -> None:
        files.pwrite_all = self.real


class FullDisk:
    """Every second write fails for want of space."""

    def __enter__(self) -> None:
        self.real, self.count = AtomicFile.write, 0
        AtomicFile.write = self.write  # type: ignore[method-assign, assignment]

    def write(self, *_: Any) -> None:
        self.count += 1
        if self.count % 2 == 0:
            raise OSError(errno.ENOSPC, "full")

    def __exit__(self, *_: object) -> None:
        AtomicFile.write = self.real  # type: ignore[method-assign]


def _refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except CheckpointError as error:
        return str(error)
    return ""


def _alive(replica: Replica) -> bool:
    """Whether torch still knows the replica's group."""
    return replica.group in dist.distributed_c10d._world.pg_map


def main(scenario: str, root: Path) -> None:
    rank = int(os.environ["RANK"])
    if scenario == "on_gpus":
        torch.cuda.set_device(rank)
        bound = torch.device("cuda", rank) if os.environ.get("BOUND") else None
        dist.init_process_group("nccl", device_id=bound)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    work: Callable[[Path], dict[str, Any]] = globals()[scenario]
    (root / f"seen-{rank}.json").write_text(json.dumps(work(root)))
    if scenario == "gone":
        os._exit(0)  # gloo's threads of a broken connection may end the process as the interpreter takes them down
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""A copy of every rank's file on a peer, sent while it is written.

Rank r sends to rank (r + W / 2) mod W, so that a replica is as far away as ranks are numbered: give ranks so
that these are different hosts, for a copy in the same host, rack or power domain is lost with the original. The
peer writes what it gets under the same directory and file name below its own root (a local disk, say), where
`Checkpoint.open(replicas=...)` finds it.

Every rank takes part in every save, also one that fails (it says so to its peer). A peer that is gone shows when the
group times out: give the group a timeout of minutes.

The messages go through a process group of their own. With NCCL they use whatever transport NCCL has (RDMA where
the network does); with gloo they go over TCP. `label` says which; nothing here can tell whether NCCL chose RDMA
(NCCL_DEBUG=INFO does).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, sync_directory
from costlab.kernels.codec.manifest import rank_name

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

PIECE = 8 << 20
_END, _ABORT = -1, -2


class Replica:
    """Sends this rank's file to its peer and receives another's below `root`."""

    def __init__(self, group: ProcessGroup, root: Path | str) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.world_size < 2 or self.world_size % 2:
            raise CheckpointError(f"replicas need an even number of ranks, not {self.world_size}")
        self.group, self.root = group, Path(root)
        shift = self.world_size // 2
        self._to, self._from = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
        backend = dist.get_backend(group)
        self.label = f"{backend} over its own transport" if backend == "nccl" else f"{backend} over TCP"
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._lock = threading.Lock()
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-replica")
        self.failed: str | None = None

    def begin(self, directory: str, name: str) -> Future[Path | None]:
        """Start receiving into `<root>/<directory>/<name>`; gives the path, or None if the sender gave up."""
        self.failed = None
        return self._receiver.submit(self._receive, self.root / directory, name)

    def send(self, data: NDArray[np.uint8], offset: int) -> None:
        """Send bytes of the file. A failure is kept in `failed` and ends the replica, not the save."""
        if self.failed is None:
            try:
                with self._lock:
                    self._message(offset, data.size)
                    for at in range(0, data.size, PIECE):
                        self._bytes(data[at : at + PIECE])
            except RuntimeError as error:
                self.failed = str(error)

    def end(self, size: int | None) -> None:
        """Say that the file is complete with this size; None says that it never will be."""
        if self.failed is None:
            try:
                with self._lock:
                    self._message(_ABORT if size is None else _END, size or 0)
            except RuntimeError as error:
                self.failed = str(error)

    def decline(self, directory: str, name: str) -> None:
        """Take part in a save that this rank has given up: take what the peer sends, send nothing."""
        taken = self.begin(directory, name)
        self.end(None)
        taken.exception()

    @property
    def source_name(self) -> str:
        """Name of the file that is received here."""
        return rank_name(self._from)

    def close(self) -> None:
        """End the receiving thread."""
        self._receiver.shutdown(wait=False)

    def _message(self, kind: int, size: int) -> None:
        import torch.distributed as dist

        dist.send(torch.tensor([kind, size], device=self._device), group=self.group, group_dst=self._to)

    def _bytes(self, data: NDArray[np.uint8]) -> None:
        import torch.distributed as dist

        dist.send(torch.from_numpy(data).to(self._device), group=self.group, group_dst=self._to)

    def _receive(self, directory: Path, name: str) -> Path | None:
        """Everything the peer sends is taken, also when it can't be written here: the sender must not block."""
        file: AtomicFile | None = None
        problem: OSError | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = AtomicFile(directory / name)
        except OSError as error:
            problem = error
        try:
            size, problem = self._take(file, problem)
            if problem is not None:
                raise problem
            if size is None or file is None:
                return None
            file.commit(size)
            sync_directory(directory.parent)
            return directory / name
        finally:
            if file is not None:
                file.abort()

    def _take(self, file: AtomicFile | None, problem: OSError | None) -> tuple[int | None, OSError | None]:
        """Write what arrives until the sender ends; the size it stated, and the first error of writing."""
        import torch.distributed as dist

        head = torch.zeros(2, dtype=torch.int64, device=self._device)
        buffer = torch.empty(PIECE, dtype=torch.uint8, device=self._device)
        while True:
            dist.recv(head, group=self.group, group_src=self._from)
            kind, size = (int(v) for v in head.tolist())
            if kind in (_END, _ABORT):
                return (size if kind == _END else None), problem
            for at in range(0, size, PIECE):
                piece = buffer[: min(PIECE, size - at)]
                dist.recv(piece, group=self.group, group_src=self._from)
                try:
                    if file is not None and problem is None:
                        file.write(piece.cpu().numpy(), kind + at)
                except OSError as error:
                    problem = error

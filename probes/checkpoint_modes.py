"""The ways torch.distributed.checkpoint can save, from the plain one to a process of its own.

The one place that touches DCP's stagers and its checkpoint process. Tried on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

State = dict[str, Any]
MOST_THREADS = 4
START_S = 40.0  # for the checkpoint process to import torch and to meet its peers


@dataclass
class Pending:
    """A save under way: `done` ends it (None: it ended with the call); `staged` is when the state may change again."""

    done: Future[Any] | None = None
    staged: Future[Any] | None = None


class Saver:
    """One way to save. `host_copies` is host memory it takes, in copies of the rank's state."""

    name = ""
    host_copies = 0.0
    shared = False  # whether those copies lie in /dev/shm
    lossy = False  # whether values may come back changed, within a stated bound

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """What a training does once, before its first save; returns a note for the report. Every rank calls it."""
        del state, scratch, group
        return ""

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Start (or do) the save; every rank calls it."""
        raise NotImplementedError

    def close(self) -> None:
        """Give buffers, threads and processes back."""

    def written(self, folder: Path, rank: int) -> int:
        """Bytes of this rank's files; the metadata counts for rank 0."""
        mine = sum(f.stat().st_size for f in folder.glob(f"__{rank}_*"))
        return mine + (sum(f.stat().st_size for f in folder.glob(".metadata")) if rank == 0 else 0)

    def read(self, target: State, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Load into the tensors of `target`; every rank calls it."""
        from torch.distributed.checkpoint.state_dict_loader import load

        load(target, checkpoint_id=folder, process_group=group)

    def accepts(self, name: str, saved: Any, restored: Any) -> bool:
        """Whether a value that did not come back bit by bit came back as promised."""
        del name, saved, restored
        return False


class Sync(Saver):
    """`dcp.save`: training waits until the files are durable."""

    name = "sync"
    host_copies = 0.1

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Nothing to prepare; says how many threads write."""
        del state, scratch, group
        return f"{self._threads} writer threads" if self._threads > 1 else ""

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Save and wait."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path, storage_writer=file_writer(path, self._threads), process_group=group)
        return Pending()


def file_writer(path: Path, threads: int) -> Any:
    """DCP's file writer with several threads; None for its default of one."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(path, thread_count=threads) if threads > 1 else None


class Staged(Saver):
    """`dcp.async_save` in a thread, with a stager of ours or DCP's default."""

    host_copies = 1.1

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self._threads = threads
        self._stager: Any = None

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Start the save; returns once the state is copied, or at once where staging has its own thread."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        response = async_save(
            state,
            checkpoint_id=path,
            storage_writer=file_writer(path, self._threads),
            process_group=group,
            async_stager=self._stager,
            **self._options(),
        )
        if isinstance(response, Future):
            return Pending(done=response)
        return Pending(done=response.upload_completion, staged=response.staging_completion)

    def _options(self) -> dict[str, Any]:
        return {}

    def _about_threads(self) -> str:
        return f"{self._threads} writer threads; " if self._threads > 1 else ""

    def close(self) -> None:
        """Close the stager; DCP closes the one it made itself."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


class Pinned(Staged):
    """A pinned host copy that is kept between saves; the call waits for the copy only."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__("async:pinned", threads)

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Allocate and pin the buffers, as the first save of a training does."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        del scratch, group
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._stager.stage(state)
        return f"{self._about_threads()}pinned buffers made before the save and kept"


class Background(Staged):
    """Staging in a thread and on a stream of its own, overlapped with the next forward and backward pass."""

    def __init__(self, pinned: bool, threads: int = 1) -> None:
        super().__init__("async:background-pinned" if pinned else "async:background", threads)
        self._pinned = pinned

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Make the stager; where it may be used again, fill its buffers once, as the first save of a training does."""
        del scratch, group
        self._stager = _default_stager(pinned=self._pinned, shared=False, background=True)
        if not stager_is_reusable():
            return f"{self._about_threads()}this torch's DefaultStager serves one save: buffers are made during it"
        self._stager.stage(state).result()
        return f"{self._about_threads()}buffers made before the save and kept"


class Process(Staged):
    """A process of its own writes the files from shared memory, so that Python's lock is not shared with training."""

    shared = True

    def __init__(self, pinned: bool, threads: int = 1) -> None:
        super().__init__("async:process", threads)
        self._pinned = pinned
        self._children: list[Any] = []

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Make the stager and start the process with a save of one number."""
        import torch

        began = time.perf_counter()
        before = set(multiprocessing.active_children())
        self._stager = _default_stager(pinned=False, shared=True, background=False)
        try:
            started = super().save({"started": torch.zeros(1)}, scratch, group).done
            if started is not None:
                started.result(timeout=START_S)
        finally:
            self._children = [c for c in multiprocessing.active_children() if c not in before]
        self._stager = _default_stager(pinned=self._pinned, shared=True, background=False)
        if stager_is_reusable():
            self._stager.stage(state)
        seconds = time.perf_counter() - began
        return f"{self._about_threads()}checkpoint process started before the save, in {seconds:.1f} s"

    def _options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def close(self) -> None:
        """Close the stager and end the checkpoint process, which otherwise lives as long as the trainer."""
        from torch.distributed.checkpoint import _async_process_executor as executor

        super().close()
        executor._CHECKPOINT_PROCESS = None  # its finaliser asks the process to end and waits 5 s
        for child in self._children:
            child.join(timeout=5)
            if child.is_alive():
                child.kill()  # whoever waits for its answer then gets an error instead of hanging


def _default_stager(*, pinned: bool, shared: bool, background: bool) -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=shared,
            use_async_staging=background,
            use_non_blocking_copy=pinned,
        )
    )


def stager_is_reusable() -> bool:
    """Whether DefaultStager can stage twice: in torch 2.11 it empties itself after the first time."""
    import torch

    stager = _default_stager(pinned=False, shared=False, background=False)
    try:
        stager.stage({"x": torch.zeros(1)})
        stager.stage({"x": torch.zeros(1)})
    except KeyError:
        return False
    return True

"""The ways torch.distributed.checkpoint can save, from the plain one to a process of its own.

The one place that touches DCP's stagers and its checkpoint process. Tried on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

State = dict[str, Any]
START_S = 60.0  # for the checkpoint process to import torch and to meet its peers


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

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """What a training does once, before its first save; returns a note for the report. Every rank calls it."""
        del state, scratch, group
        return ""

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Start (or do) the save; every rank calls it."""
        raise NotImplementedError

    def close(self) -> None:
        """Give buffers, threads and processes back."""


class Sync(Saver):
    """`dcp.save`: training waits until the files are durable."""

    name = "sync"
    host_copies = 0.1

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Save and wait."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path, process_group=group)
        return Pending()


class Staged(Saver):
    """`dcp.async_save` in a thread, with a stager of ours or DCP's default."""

    host_copies = 1.1

    def __init__(self, name: str) -> None:
        self.name = name
        self._stager: Any = None

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Start the save; returns once the state is copied, or at once where staging has its own thread."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        response = async_save(
            state, checkpoint_id=path, process_group=group, async_stager=self._stager, **self._options()
        )
        if isinstance(response, Future):
            return Pending(done=response)
        return Pending(done=response.upload_completion, staged=response.staging_completion)

    def _options(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Close the stager; DCP closes the one it made itself."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


class Pinned(Staged):
    """A pinned host copy that is kept between saves; the call waits for the copy only."""

    def __init__(self) -> None:
        super().__init__("async:pinned")

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Allocate and pin the buffers, as the first save of a training does."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        del scratch, group
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._stager.stage(state)
        return "pinned buffers made before the save and kept"


class Background(Staged):
    """Staging in a thread and on a stream of its own, overlapped with the next forward and backward pass."""

    def __init__(self, pinned: bool) -> None:
        super().__init__("async:background-pinned" if pinned else "async:background")
        self._pinned = pinned

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Make the stager; where it may be used again, fill its buffers once, as the first save of a training does."""
        del scratch, group
        self._stager = _default_stager(pinned=self._pinned, shared=False, background=True)
        if not stager_is_reusable():
            return "this torch's DefaultStager serves one save: its buffers are made during the save"
        self._stager.stage(state).result()
        return "buffers made before the save and kept"


class Process(Staged):
    """A process of its own writes the files from shared memory, so that Python's lock is not shared with training."""

    shared = True

    def __init__(self, pinned: bool) -> None:
        super().__init__("async:process")
        self._pinned = pinned

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Make the stager and start the process with a save of one number."""
        import torch

        began = time.perf_counter()
        self._stager = _default_stager(pinned=False, shared=True, background=False)
        started = super().save({"started": torch.zeros(1)}, scratch, group).done
        if started is not None:
            started.result(timeout=START_S)
        self._stager = _default_stager(pinned=self._pinned, shared=True, background=False)
        if stager_is_reusable():
            self._stager.stage(state)
        return f"checkpoint process started before the save, in {time.perf_counter() - began:.1f} s"

    def _options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def close(self) -> None:
        """Close the stager and end the checkpoint process."""
        super().close()
        end_checkpoint_process()


def savers(device: torch.device) -> list[Saver]:
    """All configurations for this device, the plain ones first and the slow one last."""
    if device.type == "cuda":
        return [Sync(), Staged("async:default"), Pinned(), Background(pinned=True), Process(pinned=True)]
    return [Sync(), Staged("async:default"), Background(pinned=False), Process(pinned=False)]


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


def end_checkpoint_process() -> None:
    """End DCP's checkpoint process, which otherwise lives as long as the trainer."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    process = executor._CHECKPOINT_PROCESS
    executor._CHECKPOINT_PROCESS = None
    if process is None:
        return
    child = process._save_process
    del process  # its finaliser asks the child to end and waits 5 s
    if child.is_alive():
        child.join(timeout=5)
    if child.is_alive():
        child.kill()

"""Snapshots for which the device has no room after all: the save goes another way, or fails whole."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_pipeline_interpreted import FakeEvent, FakeStream

from costlab.kernels.codec import pipeline, stage
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.manifest import latest
from costlab.kernels.codec.pipeline import AsyncCheckpointer
from costlab.kernels.codec.snapshot import DeviceCopy

STATE = {
    "w.weight": torch.randn(300, 1000), "v": torch.arange(5000.0).view(50, 100), "step": 7, "name": "run",
    "none": torch.empty(0, 4),
}  # fmt: skip


class Allocator:
    """A device's memory that holds nothing: a snapshot of any size is refused `times` times, `at` where it is made."""

    def __init__(self, at: str, times: int) -> None:
        self.at, self.left, self.refused = at, times, 0
        self.enqueue, self.init = DeviceCopy.enqueue, DeviceCopy.__init__

    def refuse(self, length: int) -> None:
        if length and self.left:
            self.left, self.refused = self.left - 1, self.refused + 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {length} bytes")


def without_device(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> None:
    """Streams and events that do nothing, a budget that promises much, and the allocator in place of the device's."""

    def init(self: Any, plan: Any, device: torch.device, direct: int) -> None:
        if allocator.at == "tables":
            allocator.refuse(0 if direct > len(plan.fixed) else 1)
        allocator.init(self, plan, device, direct)

    def enqueue(self: Any) -> Any:
        if allocator.at == "arena":
            allocator.refuse(self.length)
        return allocator.enqueue(self)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: FakeStream())
    monkeypatch.setattr(stage, "cuda_device", lambda _items: torch.device("cpu"))
    monkeypatch.setattr(stage, "device_budget", lambda _device: 1 << 40)
    monkeypatch.setattr(DeviceCopy, "__init__", init)
    monkeypatch.setattr(DeviceCopy, "enqueue", enqueue)


def assert_saved(root: Path, step: int) -> None:
    directory = latest(root)
    assert directory is not None
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.verify()
        assert checkpoint.manifest.step == step
        for name, value in STATE.items():
            got = checkpoint.value(name)
            same = torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value  # type: ignore[arg-type]
            assert same, name


@pytest.mark.parametrize("at", ["tables", "arena"])
def test_auto_streams_to_the_host_when_the_device_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Literal["tables", "arena"]
) -> None:
    allocator = Allocator(at, 1)
    without_device(monkeypatch, allocator)
    with AsyncCheckpointer(tmp_path, "exact", slab_bytes=1 << 20) as checkpointer:
        for step in range(3):
            report = checkpointer.save(step, STATE).result()
            assert report is not None and report.snapshot_bytes == 0
            assert_saved(tmp_path, step)
        assert not checkpointer.failures
    assert allocator.refused == 1  # the plan is kept, and with it the way that worked


def test_no_memory_to_code_in_is_told_to_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with AsyncCheckpointer(tmp_path, "fp8", slab_bytes=1 << 20, gate_every=0) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "encode", full)
            patch.setattr(checkpointer, "world_size", 2)
            with pytest.raises(CheckpointError, match=r"planning .*: OutOfMemoryError: CUDA out of memory"):
                checkpointer.save(0, STATE)
        assert [p.name for p in tmp_path.rglob("*.failed")] == ["rank-00000.failed"]
        report = checkpointer.save(1, STATE).result()
        assert report is not None and latest(tmp_path) == report.directory


@pytest.mark.parametrize("at", ["tables", "arena"])
def test_device_insists_and_fails_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    without_device(monkeypatch, Allocator(at, 99))
    checkpointer = AsyncCheckpointer(tmp_path, "exact", slab_bytes=1 << 20, snapshot="device")
    with pytest.raises(CheckpointError, match="does not fit into what cpu has free"):
        checkpointer.warm_up(STATE)
    with pytest.raises(CheckpointError, match="does not fit into what cpu has free"):
        checkpointer.save(0, STATE).result()
    with pytest.raises(CheckpointError, match="does not fit into what cpu has free"):
        checkpointer.before_step()
    checkpointer.close()
    assert latest(tmp_path) is None
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "failed" not in p.name.lower()]
    assert len(checkpointer.pool._free) * checkpointer.pool.slab_bytes == checkpointer.pool.allocated_bytes

"""costlab's own checkpoint engine as one of the measured ways to save, with its timeline beside measured ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costlab.probes import checkpoint_error as errors
from costlab.probes import checkpoint_state as states
from costlab.probes.checkpoint_modes import Pending, Saver, State
from costlab.probes.records import CheckpointRow, CheckpointStageRow

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from costlab.kernels.codec import AsyncCheckpointer, Replica, SaveReport
    from costlab.kernels.codec.layout import Entry

PREFIX = "costlab:"
COMMIT_S = 60.0
PEER_TIMEOUT = timedelta(seconds=2 * COMMIT_S)
DISK_SAMPLE = 256 << 20
COPY_SAMPLE = 128 << 20
PIECE = 8 << 20
THREADS = 8
DISK = "to disk"
_MOVERS = ("write", "checksum", "replica", "pack")


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, GB/s of one rank while all do the same: a durable write, a copy to host memory."""

    disk_gbps: float | None = None
    disk: str = ""
    host_gbps: float | None = None
    host: str = ""


class Engine(Saver):
    """`AsyncCheckpointer` with a preset: staging behind the compute stream, O_DIRECT writes, a manifest."""

    host_copies = 1.1

    def __init__(self, preset: str, replica: bool = False) -> None:
        from costlab.kernels.codec.policy import preset as policy_of

        self.policy = policy_of(preset)
        self.lossy = self.policy.lossy
        self.name = f"{PREFIX}{preset}{'+replica' if replica else ''}"
        self.report: SaveReport | None = None
        self.errors: errors.CodecErrors | None = None
        self._with_replica = replica
        self._replica: Replica | None = None
        self._checkpointer: AsyncCheckpointer | None = None
        self._waiters = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-probe")
        self._entries: dict[str, list[Entry]] = {}
        self._values = 0  # in this rank's part

    def prepare(self, state: State, scratch: Path, group: dist.ProcessGroup | None) -> str:
        """Pin the staging memory, compile the kernels and, for a lossy preset, measure its error.

        Raises `CheckpointRefused` where the first resumed update would be off by more than the engine's threshold.
        """
        import torch

        from costlab.kernels.codec import AsyncCheckpointer, Replica
        from costlab.kernels.codec.state import parts_of

        if self._with_replica and group is not None:
            self._replica = Replica.create(scratch / "peer", timeout=PEER_TIMEOUT)
        # The gate runs at one save in 50: it is measured here, so that the save measured is an ordinary one.
        self._checkpointer = AsyncCheckpointer(
            scratch, self.policy, gate_every=0, commit_timeout=COMMIT_S, replica=self._replica
        )
        began = time.perf_counter()
        self._checkpointer.warm_up(state)
        took = time.perf_counter() - began
        parts = parts_of(state, self._checkpointer.rank, self._checkpointer.world_size)
        self._values = sum(p.value.numel() for p in parts if isinstance(p.value, torch.Tensor))
        notes = [f"replica by {self._replica.label}"] if self._replica else []
        notes.append(f"memory pinned and kernels compiled in {took:.1f} s before the save")
        return "; ".join([*notes, *([self._accept(state)] if self.lossy else [])])

    def _accept(self, state: State) -> str:
        from costlab.kernels.codec import CheckpointRefused
        from costlab.kernels.codec.gate import DEFAULT_THRESHOLD
        from costlab.kernels.codec.state import flatten

        assert self._checkpointer is not None
        began = time.perf_counter()
        self.errors = errors.codec_errors(flatten(state), self.policy, self._checkpointer.rank, self.name)
        took = time.perf_counter() - began
        worst = self.errors.update_error
        if worst is None:
            return "no Adam moments: the first resumed update was not judged"
        if worst > DEFAULT_THRESHOLD:
            raise CheckpointRefused(
                f"the first update after a restore would be off by {worst:.1%} for {self.errors.worst}, more than "
                f"{DEFAULT_THRESHOLD:.0%}: a lossy save is refused, save exactly"
            )
        return f"first resumed update off by at most {worst:.2%}, measured before the save in {took:.1f} s"

    def save(self, state: State, path: Path, group: dist.ProcessGroup | None) -> Pending:
        """Start the save; it goes below the folder that `prepare` was given."""
        del path, group
        assert self._checkpointer is not None
        handle = self._checkpointer.save(1, state)
        done: Future[Any] = self._waiters.submit(self._finish, handle.result)
        return Pending(done=done, staged=self._waiters.submit(handle.wait_staged))

    def _finish(self, result: Callable[[], SaveReport | None]) -> None:
        self.report = result()

    def written(self, folder: Path, rank: int) -> int:
        """Bytes of this rank's file."""
        del folder, rank
        return self.report.file_bytes if self.report else 0

    def read(self, target: State, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Load every value, checked against its checksums; a rank reads only what it holds."""
        from costlab.kernels.codec import Checkpoint

        del folder, group
        assert self.report is not None and self._checkpointer is not None
        with Checkpoint.open(self.report.directory) as checkpoint:
            self._entries = {n: [e for _, e in places] for n, places in checkpoint.places.items()}
            checkpoint.load(target, rank=self._checkpointer.rank)

    def accepts(self, name: str, saved: Any, restored: Any) -> bool:
        """Whether a value of a lossy save lies within the bound its file states; exact saves must be bit-equal."""
        import torch

        from costlab.kernels.codec.state import is_dtensor, shard_box

        if not self.lossy or not isinstance(saved, torch.Tensor) or not isinstance(restored, torch.Tensor):
            return False
        local = states.local(restored)
        start = shard_box(restored).start if is_dtensor(restored) else (0,) * restored.ndim
        return any(
            errors.within_bound(saved, local, entry.choice, entry.bound)
            for entry in self._entries.get(name, ())
            if (entry.shape, entry.start) == (tuple(saved.shape), start)
        )

    def describe(self, row: CheckpointRow) -> None:
        """What only the engine tells of a save: size before coding, bits a value, update error."""
        if self.report is not None and self._values:
            row.state_bytes, row.bits = self.report.state_bytes, 8 * self.report.file_bytes / self._values
        row.update_error = self.errors.update_error if self.errors else None

    def close(self) -> None:
        """End the engine's threads."""
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
        finally:
            if self._replica is not None:
                self._replica.close()
            self._waiters.shutdown(wait=False)


def stage_rows(saver: Engine, rank: int, ceilings: Ceilings, copy_gbps: float | None) -> list[CheckpointStageRow]:
    """The timeline of a finished save, each stage with the bytes it moved and what the machine could have done."""
    report = saver.report
    if report is None:
        return []
    row = partial(CheckpointStageRow, rank=rank, mode=saver.name, op="save")
    rows = [_encode_row(saver, row, copy_gbps)] if saver.errors and saver.errors.rows else []
    for stage in dict.fromkeys(s for s, _, _ in report.timeline):
        spans = [(a, b) for s, a, b in report.timeline if s == stage]
        rows.append(
            row(stage=stage, start_ms=1e3 * min(a for a, _ in spans), end_ms=1e3 * max(b for _, b in spans),
                busy_ms=1e3 * _union(spans), bytes=report.file_bytes if stage in _MOVERS else None)
        )  # fmt: skip
    copied = next((r for r in rows if r.stage == ("launch" if report.device_s is None else "stage")), None)
    if copied is not None:
        if report.device_s is not None:
            copied.start_ms, copied.end_ms, copied.busy_ms = 0.0, 1e3 * report.staged_s, 1e3 * report.device_s
        copied.bytes, copied.ceiling_gbps, copied.ceiling = report.file_bytes, ceilings.host_gbps, ceilings.host
    return [*rows, *_to_disk(report, row, ceilings)]


def _encode_row(saver: Engine, row: Callable[..., CheckpointStageRow], copy_gbps: float | None) -> CheckpointStageRow:
    """Coding measured apart: bytes read and written over time, as a copy counts them."""
    assert saver.errors is not None
    rows = [r for r in saver.errors.rows if r.encode_gbps]
    original = [r.values * r.bits * r.ratio / 8 for r in rows]
    seconds = sum(n / (r.encode_gbps or 1.0) / 1e9 for n, r in zip(original, rows, strict=True))
    moved = sum(n + r.values * r.bits / 8 for n, r in zip(original, rows, strict=True))
    return row(
        stage="encode", busy_ms=1e3 * seconds, bytes=round(moved), ceiling_gbps=copy_gbps,
        ceiling="copy within the device's memory, read + write; the sample of the error table, coded apart",
    )  # fmt: skip


def _to_disk(
    report: SaveReport, row: Callable[..., CheckpointStageRow], ceilings: Ceilings
) -> list[CheckpointStageRow]:
    """From the first write to the sync: what is compared with the disk's own pace."""
    spans = [(a, b) for s, a, b in report.timeline if s in ("write", "pack", "sync")]
    if not spans:
        return []
    start, end = min(a for a, _ in spans), max(b for _, b in spans)
    return [
        row(stage=DISK, start_ms=1e3 * start, end_ms=1e3 * end, busy_ms=1e3 * (end - start), bytes=report.file_bytes,
            ceiling_gbps=ceilings.disk_gbps, ceiling=ceilings.disk)
    ]  # fmt: skip


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def ceilings_of(folder: Path, size: int, device: torch.device) -> Ceilings:
    """Measure both; `size` is the rank's part of the state in bytes. Raises `OSError` for a `folder` it can't write."""
    sample = min(max(size, 1 << 20), DISK_SAMPLE) // 4096 * 4096
    folder.mkdir(parents=True, exist_ok=True)
    direct, seconds = _write_sample(folder, sample)
    how = "O_DIRECT" if direct else "through the page cache"
    disk = f"{sample / 2**20:.0f} MiB, {THREADS} writers, {how}, synced"
    copied = min(max(size, 1 << 20), COPY_SAMPLE)
    host, words = _host_copy(copied, device)
    return Ceilings(sample / seconds / 1e9, disk, host, words)


def _write_sample(folder: Path, size: int) -> tuple[bool, float]:
    import numpy as np

    from costlab.kernels.codec.files import AtomicFile, aligned_buffer

    data = aligned_buffer(size)
    data[:] = np.random.default_rng(0).integers(0, 255, data.size, dtype=np.uint8)
    began = time.perf_counter()
    file = AtomicFile(folder / "ceiling", direct=True)
    try:
        file.allocate(size)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda at: file.write(data[at : at + PIECE], at), range(0, size, PIECE)))
        file.commit(size)
    finally:
        file.abort()
    return file.direct, time.perf_counter() - began


def _host_copy(size: int, device: torch.device) -> tuple[float, str]:
    """GB/s of bytes copied once, from the device into pinned memory or within host memory; best of five."""
    import torch

    cuda = device.type == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    target.copy_(source)
    best = float("inf")
    for _ in range(5):
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    where = "from the device into pinned memory" if cuda else "within host memory"
    return size / best / 1e9, f"copy of {size / 2**20:.0f} MiB {where}, bytes copied once, best of 5"

"""Extents read in pieces by several threads, with a device in main memory whose copies are made as late as may be."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from costlab.kernels.codec import device_load, htod
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.device_load import Cutter, DeviceLoader, Job, Piece, Run
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.interchange import save_plain
from costlab.kernels.codec.policy import preset
from costlab.kernels.codec.writing import write_container

MIB = 1 << 20


class _Stream:
    """Copies that were enqueued are made when somebody waits for them, not before."""

    def __init__(self, *_: Any) -> None:
        self.waiting: list[tuple[int, int, int]] = []
        self.enqueued = self.made = 0
        self._lock = threading.Lock()

    def enqueue(self, copy: tuple[int, int, int]) -> None:
        with self._lock:
            self.waiting.append(copy)
            self.enqueued += 1

    def make(self, count: int) -> None:
        with self._lock:
            while self.made < count:
                ctypes.memmove(*self.waiting.pop(0))
                self.made += 1

    def wait_stream(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.make(self.enqueued)


class _Event:
    def __init__(self, **_: Any) -> None:
        self._stream, self._count = _Stream(), 0

    def record(self, stream: _Stream) -> None:
        self._stream, self._count = stream, stream.enqueued

    @property
    def done(self) -> bool:
        return self._stream.made >= self._count

    def synchronize(self) -> None:
        self._stream.make(self._count)


class _Copies:
    """`htod.Copies` without a driver. `refuse`: the copies that fail, by number."""

    refuse: range = range(0)

    def __init__(self, *_: Any) -> None:
        self.stream = _Stream()

    def enter(self) -> None:
        pass

    def enqueue(self, target: int, source: int, size: int) -> None:
        if self.stream.enqueued in self.refuse:
            raise CheckpointError("a copy to the device failed: CUDA driver error 719")
        self.stream.enqueue((target, source, size))

    def event(self) -> _Event:
        return _Event()

    def record(self, event: _Event) -> None:
        event.record(self.stream)

    def done(self, event: _Event) -> bool:
        return event.done

    def wait(self, event: _Event) -> None:
        event.synchronize()


def _without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))  # noqa: ARG005, PLW0108
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: _Stream())
    monkeypatch.setattr(device_load, "Copies", _Copies)
    monkeypatch.setattr(device_load, "FIRST_PIECES", MIB)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader fill CPU tensors."""
    _without_device(monkeypatch)


def _loader(threads: int = 3) -> DeviceLoader:
    return DeviceLoader(torch.device("cuda", 0), threads, piece=2 * MIB)


def _file(path: Path) -> Container:
    values = {f"t{i}": torch.randn(400_000 * i + 3) for i in range(5)} | {"empty": torch.empty(0)}
    write_container(path, values)
    return Container.open(path)


def _jobs(file: Container) -> list[Job]:
    ordered = sorted(file.entries.values(), key=lambda entry: entry.offset)
    return [Job(file, e, torch.zeros(e.length, dtype=torch.uint8)) for e in ordered if e.length]


def _filled(jobs: list[Job]) -> bool:
    return all(torch.equal(j.target.view(torch.float32), j.container.tensor(j.entry.name)) for j in jobs)


def _damaged(path: Path, name: str, at: int) -> int:
    """Flip a bit `at` bytes into a tensor's extent; where that is in the file."""
    with Container.open(path) as file:
        at += file.entries[name].offset
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return at


def _pieces(jobs: list[Job], size: int, threads: int = 2) -> list[Piece]:
    return list(Cutter(size, threads, verify=True, run=Run(_Stream())).pieces(jobs))  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_device")
def test_pieces_hold_every_byte_once_and_whole_chunks(tmp_path: Path) -> None:
    with _file(tmp_path / "f") as file:
        jobs = _jobs(file)
        pieces = _pieces(jobs, 4 * MIB)
        assert max(piece.length for piece in pieces) > 2 * MIB >= pieces[0].length, "the first are small"
        assert all(piece.length <= 4 * MIB for piece in pieces)
        for job in jobs:
            parts = [(p, part) for p in pieces for part in p.parts if part.job is job]
            assert [part.start for _, part in parts] == [0, *(part.end for _, part in parts)][:-1]
            assert parts[-1][1].end == job.entry.length == sum(part.end - part.start for _, part in parts)
            assert all((job.entry.offset + part.start) % MIB == 0 for _, part in parts[1:])
            assert all(p.offset + part.at == job.entry.offset + part.start for p, part in parts)
            assert all(part.at + part.end - part.start <= p.length for p, part in parts)
            assert sum(part.chunks for _, part in parts) == len(job.entry.crcs)


@pytest.mark.usefixtures("no_device")
def test_what_lies_side_by_side_is_read_at_once_and_what_is_left_out_is_not(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {f"t{i:03}": torch.randn(100) for i in range(50)} | {"u": torch.randn(20_000)})
    with Container.open(tmp_path / "f") as file:
        jobs = _jobs(file)
        assert [len(piece.parts) for piece in _pieces(jobs, 2 * MIB)] == [51]
        assert [len(piece.parts) for piece in _pieces([*jobs[:20], *jobs[40:]], 2 * MIB)] == [20, 11]
        backwards = _pieces(jobs[::-1], 2 * MIB)
        assert sum(len(piece.parts) for piece in backwards) == len(backwards) == 51


@pytest.mark.usefixtures("no_device")
def test_threads_fill_the_targets_and_find_damage(tmp_path: Path) -> None:
    loader = _loader()
    with _file(tmp_path / "f") as file:
        jobs = _jobs(file)
        loader.load(jobs)
        assert _filled(jobs)
    _damaged(tmp_path / "f", "t4", 5 * MIB)
    with Container.open(tmp_path / "f") as file:
        with pytest.raises(CheckpointError, match="'t4' is damaged"):
            loader.load(_jobs(file))
    loader.close()


@pytest.mark.usefixtures("no_device")
def test_a_failed_load_makes_no_copy_afterwards_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = _loader()
    stream: Any = loader._copies.stream
    with _file(tmp_path / "f") as file:
        for refused in (0, 3):
            monkeypatch.setattr(_Copies, "refuse", range(stream.enqueued + refused, 1 << 30))
            with pytest.raises(CheckpointError, match="driver error 719"):
                loader.load(_jobs(file))
            assert not stream.waiting
            monkeypatch.setattr(_Copies, "refuse", range(0))
            jobs = _jobs(file)
            loader.load(jobs)
            assert _filled(jobs)
    loader.close()


@pytest.mark.usefixtures("no_device")
def test_an_interrupt_ends_the_readers_before_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, reading, read = _loader(threads=2), threading.Semaphore(0), Container._pread_into
    go_on = threading.Event()

    def slowly(file: Container, offset: int, out: Any) -> None:
        reading.release()
        go_on.wait(10)
        read(file, offset, out)

    def interrupted(jobs: list[Job]) -> Iterator[Job]:
        yield from jobs
        assert reading.acquire(timeout=10) and reading.acquire(timeout=10), "both read"
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    with _file(tmp_path / "f") as file:
        jobs = _jobs(file)
        monkeypatch.setattr(Container, "_pread_into", slowly)
        with pytest.raises(KeyboardInterrupt):
            loader.load(interrupted(jobs))
        assert go_on.is_set() and len(loader._buffers) == 4, "no reader has a buffer"
        assert not any(job.target.any() for job in jobs), "what was being read is not copied"
        monkeypatch.undo()
        _without_device(monkeypatch)
        loader.load(jobs)
        assert _filled(jobs)
    loader.close()


@pytest.mark.usefixtures("no_device")
def test_loads_from_several_threads_take_turns(tmp_path: Path) -> None:
    loader = _loader(threads=2)
    with _file(tmp_path / "f") as file:
        loads = [_jobs(file) for _ in range(4)]
        threads = [threading.Thread(target=loader.load, args=(jobs,)) for jobs in loads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(_filled(jobs) for jobs in loads)
    loader.close()


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 1 if name == "cuMemcpyHtoDAsync_v2" else 0

    class Stream:
        def __init__(self, *_: Any) -> None:
            self.cuda_stream = 7

    monkeypatch.setattr(htod, "_driver", lambda keep: Driver())  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    copies = htod.Copies(torch.device("cuda", 0))
    copies.enter()
    with pytest.raises(CheckpointError, match="a copy to the device failed: CUDA driver error 1"):
        copies.enqueue(0, 0, 1)


def checked_after_arrival(folder: Path) -> None:
    """What the interpreter process runs: checksums from the targets, whole, damaged on disk, damaged on the way."""
    from costlab.kernels.codec import crc, device_crc

    patch = pytest.MonkeyPatch()
    _without_device(patch)
    patch.setattr(device_load, "BATCH", MIB)
    assert device_crc.usable(torch.device("cpu"))
    values = {f"t{i}": torch.randn(n) for i, n in enumerate((1, 5000, 700_001, 40))}
    write_container(folder / "f", values)
    on_host = crc.chunk_crcs
    patch.setattr(crc, "chunk_crcs", None)
    loader = _loader()
    with Container.open(folder / "f") as file:
        jobs = _jobs(file)
        loader.load(jobs)
        assert all(torch.equal(job.target.view(torch.float32), values[job.entry.name]) for job in jobs)
        shifted = torch.zeros(jobs[-1].entry.length + 1, dtype=torch.uint8)[1:]
        patch.setattr(crc, "chunk_crcs", on_host)
        loader.load([Job(file, jobs[-1].entry, shifted)])
        assert torch.equal(shifted, jobs[-1].target), "words that lie anywhere are checked by the readers"
        patch.setattr(crc, "chunk_crcs", None)
        patch.setattr(_Copies, "enqueue", lambda self, t, s, n: self.stream.enqueue((t, s, n - 1)))
        with pytest.raises(CheckpointError, match="'t1' is damaged"):
            loader.load([job for job in _jobs(file) if job.entry.name == "t1"])
    patch.undo()
    _without_device(patch)
    at = _damaged(folder / "f", "t2", 2 * MIB)
    with Container.open(folder / "f") as file:
        with pytest.raises(CheckpointError, match="'t2' is damaged") as caught:
            loader.load([job for job in _jobs(file) if job.entry.name == "t2"])
        first, last = (int(word) for word in str(caught.value).split("bytes ")[1].split(" of")[0].split(" to "))
        assert first <= at < last <= first + MIB
    loader.close()
    patch.undo()


def test_checksums_are_computed_where_the_bytes_arrived(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = (
        f"import pathlib, runpy; runpy.run_path({__file__!r})['checked_after_arrival'](pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["exact", "fp8", "int8", "lossless"])
def test_loading_to_a_gpu_gives_what_the_cpu_gives(tmp_path: Path, name: str) -> None:
    state = {"w.weight": torch.randn(700, 900), "o.exp_avg_sq": torch.rand(300, 70), "norm.bias": torch.randn(33)}
    with Checkpoint.open(save_plain(tmp_path, state, 1, preset(name))) as checkpoint:
        there = {n: torch.zeros_like(t, device="cuda") for n, t in state.items()}
        checkpoint.load(there)
        for key in state:
            assert torch.equal(there[key].cpu(), checkpoint.tensor(key))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shift", [0, 1], ids=["checked on the GPU", "checked by the readers"])
def test_buffers_of_a_gpu_load_are_not_filled_before_they_are_copied(tmp_path: Path, shift: int) -> None:
    """Three readers bring 200 MiB through six buffers of 2 MiB, four times."""
    values = {f"t{i:02}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate((9, 77 * MIB, 4096) * 3)}
    write_container(tmp_path / "f", values)
    loader = DeviceLoader(torch.device("cuda"), threads=3, piece=2 * MIB)
    with Container.open(tmp_path / "f") as file:
        for _, verify in itertools.product(range(2), (True, False)):
            loader.verify = verify
            whole = {n: torch.zeros(v.numel() + shift, dtype=torch.uint8, device="cuda") for n, v in values.items()}
            entries = sorted(file.entries.values(), key=lambda entry: entry.offset)
            loader.load([Job(file, e, whole[e.name][shift:]) for e in entries])
            assert all(torch.equal(whole[n][shift:].cpu(), v) for n, v in values.items())
    _damaged(tmp_path / "f", "t04", 30 * MIB)
    with Container.open(tmp_path / "f") as file:
        target = torch.zeros(77 * MIB + shift, dtype=torch.uint8, device="cuda")[shift:]
        loader.verify = True
        with pytest.raises(CheckpointError, match="'t04' is damaged"):
            loader.load([Job(file, file.entries["t04"], target)])
    loader.close()


def test_the_buffer_that_was_done_last_is_filled_next_and_none_that_is_still_copied() -> None:
    stream = _Stream()
    copies: Any = _Copies()
    made = [device_load.Buffer(np.zeros(1, np.uint8), number, cast("Any", _Event())) for number in range(3)]
    buffers = device_load.Buffers(copies, made)
    first, second, third = (buffers.take() for _ in range(3))
    for buffer in (first, second, third):
        stream.enqueue((0, 0, 0))
        cast("_Event", buffer.copied).record(stream)
        buffers.give(buffer)
    stream.make(2)
    assert buffers.take() is second, "hot in the cache"
    assert buffers.take() is first
    assert buffers.take() is third and stream.made == 3, "waited for"

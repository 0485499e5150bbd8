"""Reading extents in pieces by several threads, with streams and events that do nothing where there is no GPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from costlab.kernels.codec import device_load
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.device_load import DeviceLoader, Job, cut
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.interchange import save_plain
from costlab.kernels.codec.policy import preset
from costlab.kernels.codec.writing import write_container

MIB = 1 << 20


class _Nothing:
    """A stream or an event of a device that has always finished."""

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))  # noqa: ARG005, PLW0108
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: _Nothing())
    monkeypatch.setattr(device_load, "PIECE", 2 * MIB)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader fill CPU tensors."""
    _without_device(monkeypatch)


def _file(path: Path) -> Container:
    values = {f"t{i}": torch.randn(400_000 * i + 3) for i in range(5)} | {"empty": torch.empty(0)}
    write_container(path, values)
    return Container.open(path)


def test_pieces_cover_an_extent_and_are_cut_by_the_file(tmp_path: Path) -> None:
    with _file(tmp_path / "f") as file:
        for entry in file.entries.values():
            pieces = cut(entry)
            assert pieces[0][0] == 0 and pieces[-1][1] == entry.length
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            assert all((entry.offset + start) % MIB == 0 for start, _ in pieces[1:])
            assert all(end - start <= device_load.buffer_bytes() for start, end in pieces)


@pytest.mark.usefixtures("no_device")
def test_threads_fill_the_targets_and_find_damage(tmp_path: Path) -> None:
    loader = DeviceLoader(torch.device("cuda", 0), threads=3)
    with _file(tmp_path / "f") as file:
        jobs = [Job(file, e, torch.zeros(e.length, dtype=torch.uint8)) for e in file.entries.values() if e.length]
        loader.load(jobs)
        for job in jobs:
            assert torch.equal(job.target.view(torch.float32), file.tensor(job.entry.name))
        at = file.entries["t4"].offset + 5 * MIB
    data = bytearray((tmp_path / "f").read_bytes())
    data[at] ^= 1
    (tmp_path / "f").write_bytes(data)
    with Container.open(tmp_path / "f") as file:
        jobs = [Job(file, e, torch.zeros(e.length, dtype=torch.uint8)) for e in file.entries.values() if e.length]
        with pytest.raises(CheckpointError, match="'t4' is damaged"):
            loader.load(jobs)
    loader.close()


def _targets(file: Container) -> list[Job]:
    return [Job(file, e, torch.zeros(e.length, dtype=torch.uint8)) for e in file.entries.values() if e.length]


def checked_after_arrival(folder: Path) -> None:
    """What the interpreter process runs: checksums from the targets, whole, damaged on disk, damaged on the way."""
    from costlab.kernels.codec import crc, device_crc

    patch = pytest.MonkeyPatch()
    _without_device(patch)
    patch.setattr(device_load, "BATCH", 3 * MIB)
    assert device_crc.usable(torch.device("cpu"))
    values = {f"t{i}": torch.randn(n) for i, n in enumerate((1, 5000, 700_001, 40, 300_000))}
    write_container(folder / "f", values)
    patch.setattr(crc, "chunk_crcs", None)
    loader = DeviceLoader(torch.device("cuda", 0), threads=3)
    with Container.open(folder / "f") as file:
        jobs = _targets(file)
        loader.load(jobs)
        assert all(torch.equal(job.target.view(torch.float32), values[job.entry.name]) for job in jobs)
        at = file.entries["t2"].offset + 2 * MIB
    data = bytearray((folder / "f").read_bytes())
    data[at] ^= 1
    (folder / "f").write_bytes(data)
    with Container.open(folder / "f") as file:
        with pytest.raises(CheckpointError, match="'t2' is damaged") as caught:
            loader.load(_targets(file))
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


def test_small_extents_side_by_side_are_read_at_once(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {f"t{i}": torch.randn(100) for i in range(50)} | {"u": torch.randn(200_000)})
    with Container.open(tmp_path / "f") as file:
        batches = device_load._Batches(lambda _: True)
        jobs = sorted(_targets(file), key=lambda job: job.entry.offset)
        pieces = list(batches.pieces(jobs))
        assert [len(piece.targets) for piece in pieces] == [50, 1]
        assert sum(batches.lengths) == sum(piece.length for piece in pieces)
        assert [job for batch in batches.jobs for job in batch] == jobs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["exact", "fp8", "int8", "lossless"])
def test_loading_to_a_gpu_gives_what_the_cpu_gives(tmp_path: Path, name: str) -> None:
    state = {"w.weight": torch.randn(700, 900), "o.exp_avg_sq": torch.rand(300, 70), "norm.bias": torch.randn(33)}
    with Checkpoint.open(save_plain(tmp_path, state, 1, preset(name))) as checkpoint:
        there = {n: torch.zeros_like(t, device="cuda") for n, t in state.items()}
        checkpoint.load(there)
        for key in state:
            assert torch.equal(there[key].cpu(), checkpoint.tensor(key))

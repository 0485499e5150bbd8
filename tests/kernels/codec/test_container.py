"""The checkpoint file: round trips, zero copy, privacy of the map, damage reports, atomic writing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec import files, layout
from costlab.kernels.codec.codecs import Choice, Codec, encode
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.layout import DTYPES
from costlab.kernels.codec.policy import preset
from costlab.kernels.codec.writing import Box, ContainerWriter, entry_of, extent_bytes, write_container


def _state() -> dict[str, torch.Tensor | int | float | str | bytes | bool | None]:
    return {
        "w.weight": torch.randn(100, 200), "w.weight.exp_avg": torch.randn(100, 200),
        "w.weight.exp_avg_sq": torch.rand(100, 200), "norm.weight": torch.randn(64),
        "empty": torch.empty(0, 3), "step": torch.tensor(7.0), "rng": torch.randint(0, 255, (16,), dtype=torch.uint8),
        "epoch": 3, "lr": 1e-4, "name": "größe", "done": False, "nothing": None, "blob": b"\0\1",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["map", "read"])
def test_everything_comes_back_exactly(tmp_path: Path, mode: str) -> None:
    state = _state()
    written = write_container(tmp_path / "f", state, step=12)
    assert written.size == (tmp_path / "f").stat().st_size
    with Container.open(tmp_path / "f", mode=mode) as file:  # type: ignore[arg-type]
        assert file.header.step == 12 and file.digest == written.digest
        assert list(file.entries) == sorted(state)
        for name, value in state.items():
            got = file.value(name)
            if isinstance(value, torch.Tensor):
                assert isinstance(got, torch.Tensor) and got.dtype == value.dtype and torch.equal(got, value)
            else:
                assert got == value and type(got) is type(value)
        file.verify()


@pytest.mark.parametrize("name", ["lossless", "fp8", "int8"])
def test_presets_come_back_within_their_bound(tmp_path: Path, name: str) -> None:
    state = _state()
    state["w.weight"][3, 5] = float("inf")  # type: ignore[index]
    write_container(tmp_path / "f", state, choose=preset(name).choose)
    with Container.open(tmp_path / "f") as file:
        for key in ("w.weight", "w.weight.exp_avg", "w.weight.exp_avg_sq"):
            want, got, entry = state[key], file.tensor(key), file.entries[key]
            assert isinstance(want, torch.Tensor)
            finite = torch.isfinite(want)
            limit = entry.bound * want[finite].abs().max()
            assert (got - want)[finite].abs().max() <= limit
            assert (got[~finite] == float("inf")).all()
        assert torch.equal(file.tensor("norm.weight"), state["norm.weight"])  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_dtype_and_shape(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("any") / "f"
    values = {}
    for number in range(data.draw(st.integers(0, 4))):
        dtype = data.draw(st.sampled_from(list(DTYPES.values())))
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
        size = int(np.prod(shape)) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
        values[f"t{number}"] = raw.view(dtype).view(shape)
    write_container(path, values)
    with Container.open(path) as file:
        for name, value in values.items():
            got = file.tensor(name)
            assert got.dtype == value.dtype and got.shape == value.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_raw_tensors_share_the_map_and_writing_into_them_never_reaches_the_file(tmp_path: Path) -> None:
    x = torch.randn(1000, 1000)
    write_container(tmp_path / "f", {"x": x})
    before = (tmp_path / "f").read_bytes()
    with Container.open(tmp_path / "f") as file:
        first, second = file.tensor("x"), file.tensor("x", verify=False)
    assert first.data_ptr() == second.data_ptr()
    first.add_(1)
    assert torch.equal(first, x + 1)
    assert (tmp_path / "f").read_bytes() == before


def test_an_open_file_survives_being_replaced_and_reports_being_rewritten(tmp_path: Path) -> None:
    x = torch.randn(100, 100)
    write_container(tmp_path / "f", {"x": x})
    write_container(tmp_path / "g", {"x": x + 1})
    with Container.open(tmp_path / "f") as file:
        (tmp_path / "g").replace(tmp_path / "f")
        assert torch.equal(file.tensor("x"), x)
    with Container.open(tmp_path / "f") as file:
        os.truncate(tmp_path / "f", 5000)
        with pytest.raises(CheckpointError, match="changed or truncated"):
            file.tensor("x")


def test_a_truncated_file_in_read_mode_is_an_error_not_a_signal(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {"x": torch.randn(100, 100)})
    with Container.open(tmp_path / "f", mode="read") as file:
        os.truncate(tmp_path / "f", 20000)
        with pytest.raises(CheckpointError, match="truncated"):
            file._bytes(16384, 20000)


def test_one_flipped_bit_is_reported_with_name_and_offset(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {"a": torch.randn(10), "big": torch.randn(1024, 1024)})
    with Container.open(tmp_path / "f") as file:
        offset = file.entries["big"].offset + 2_500_000
    data = bytearray((tmp_path / "f").read_bytes())
    data[offset] ^= 4
    (tmp_path / "f").write_bytes(data)
    with Container.open(tmp_path / "f") as file:
        assert file.tensor("a").shape == (10,)
        start = offset // 2**20 * 2**20
        with pytest.raises(CheckpointError, match=f"'big' is damaged: bytes {start} to {start + 2**20}"):
            file.tensor("big")
        with pytest.raises(CheckpointError, match="big"):
            file.verify()


def test_swapped_chunks_are_noticed(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {"x": torch.arange(2**19 + 2**17)})
    data = bytearray((tmp_path / "f").read_bytes())
    with Container.open(tmp_path / "f") as file:
        at = file.entries["x"].offset // 2**20 * 2**20 + 2**20
    first, second = data[at : at + 2**20], data[at + 2**20 : at + 2**21]
    data[at : at + 2**20], data[at + 2**20 : at + 2**21] = second, first
    (tmp_path / "f").write_bytes(data)
    with Container.open(tmp_path / "f") as file, pytest.raises(CheckpointError, match="damaged"):
        file.tensor("x")


def test_small_tensors_share_pages_and_large_ones_start_on_one(tmp_path: Path) -> None:
    values = {f"s{i}": torch.full((10,), float(i)) for i in range(50)} | {"z": torch.zeros(5000)}
    written = write_container(tmp_path / "f", values)
    with Container.open(tmp_path / "f") as file:
        assert file.entries["s1"].offset == file.entries["s0"].offset + 64
        assert file.entries["z"].offset % 4096 == 0
    assert written.size < 4096 * (1 + 6 + 1 + 6 + 1)


def test_shards_record_their_place(tmp_path: Path) -> None:
    box = Box((8, 6), (4, 0))
    write_container(tmp_path / "f", {"x": torch.zeros(4, 6)}, rank=1, world_size=2, boxes={"x": box})
    with Container.open(tmp_path / "f") as file:
        entry = file.entries["x"]
        assert (entry.global_shape, entry.start, file.header.rank, file.header.world_size) == ((8, 6), (4, 0), 1, 2)


def test_deltas_chain_to_their_keyframe_by_digest(tmp_path: Path) -> None:
    weights = [torch.randn(64, 64)]
    write_container(tmp_path / "0", {"w": weights[0]})
    digest, recon = Container.open(tmp_path / "0").digest, weights[0]
    known = {digest: tmp_path / "0"}
    for step in range(1, 4):
        weights.append(weights[-1] + 0.01 * torch.randn(64, 64))
        found = encode(weights[-1], Choice(Codec.DELTA4, (16, 16)), recon)
        writer = ContainerWriter(tmp_path / str(step), ["w"], step)
        writer.add(entry_of("w", found, base=digest, chain=step), extent_bytes(found))
        digest = writer.commit().digest
        known[digest] = tmp_path / str(step)
        with Container.open(tmp_path / str(step)) as file:
            recon = file.wide("w", resolve=lambda d: Container.open(known[d]))
    assert (recon - weights[-1]).abs().max() < 0.01
    with Container.open(tmp_path / "3") as file:
        with pytest.raises(CheckpointError, match="missing"):
            file.tensor("w")
        with pytest.raises(CheckpointError, match="not its base"):
            file.tensor("w", resolve=lambda _: Container.open(tmp_path / "0"))


@pytest.mark.parametrize(
    "name", ["", "a\0b", "../x", "a/../b", "/etc/x", "C:/x", "a\nb", "a\u202eb", "x" * 1025, "e\u0301", "a\ud800b"]
)
def test_unsafe_names_are_refused_when_writing(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="name"):
        write_container(tmp_path / "f", {name: torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_unstorable_values_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    for bad in (torch.zeros((1,) * 9), torch.zeros(1, dtype=torch.complex32), "x" * (2 << 20)):
        with pytest.raises(CheckpointError):
            write_container(tmp_path / "f", {"ok": torch.zeros(5), "x": bad})
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_or_missing_directory_is_an_error(tmp_path: Path) -> None:
    write_container(tmp_path / "f", {"x": torch.zeros(1)})
    before = (tmp_path / "f").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        write_container(tmp_path / "f", {"x": torch.ones(1)})
    assert (tmp_path / "f").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(CheckpointError, match="No such file"):
        write_container(tmp_path / "no" / "f", {"x": torch.ones(1)})


def test_the_file_appears_only_when_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), real_sync(fd))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append("rename"), real_rename(self, to))[1])
    write_container(tmp_path / "f", {"x": torch.zeros(10)})
    assert order == ["fsync", "fsync", "rename", "fsync"]


def test_aligned_buffers_and_sizes() -> None:
    buffer = files.aligned_buffer(5000)
    assert buffer.size == 8192 and buffer.ctypes.data % 4096 == 0
    assert layout.HEADER.size == 64 and layout.PREAMBLE.size == 64 and layout.RECORD.size == 384

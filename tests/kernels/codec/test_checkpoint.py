"""Checkpoint directories: commit by manifest, torn sets, resharding, loading into a state."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec import crc
from costlab.kernels.codec.checkpoint import Checkpoint, check_cover
from costlab.kernels.codec.codecs import Choice, Codec
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.interchange import save_plain
from costlab.kernels.codec.layout import Entry, Kind
from costlab.kernels.codec.manifest import (
    Manifest,
    RankFile,
    committed,
    directory_name,
    latest,
    new_manifest,
    rank_name,
    read_manifest,
    write_manifest,
)  # fmt: skip
from costlab.kernels.codec.policy import preset
from costlab.kernels.codec.state import flatten
from costlab.kernels.codec.writing import Box, write_container


def save_sharded(root: Path, tensors: dict[str, torch.Tensor], world: int, step: int = 1, name: str = "exact") -> Path:
    """Every tensor cut along its first dimension over `world` ranks, as FSDP2 does (uneven last shards)."""
    directory = root / directory_name(step, "0123abcd")
    directory.mkdir(parents=True)
    files = []
    for rank in range(world):
        values, boxes = {}, {}
        for key, tensor in tensors.items():
            rows = -(-tensor.shape[0] // world)
            low, high = min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0])
            if high > low:
                values[key] = tensor[low:high]
                boxes[key] = Box(tuple(tensor.shape), (low,) + (0,) * (tensor.ndim - 1))
        path = directory / rank_name(rank)
        written = write_container(path, values, step, preset(name).choose, rank, world, boxes)
        files.append(RankFile(path.name, written.size, written.digest.hex()))
    write_manifest(directory, new_manifest(step, name, files, None, None))
    return directory


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (8, 2), (3, 5), (1, 3)])
@pytest.mark.parametrize("name", ["exact", "fp8"])
def test_loading_on_another_world_size(tmp_path: Path, before: int, after: int, name: str) -> None:
    tensors = {"w.weight": torch.randn(37, 24), "b.bias": torch.randn(11)}
    directory = save_sharded(tmp_path, tensors, before, name=name)
    with Checkpoint.open(directory) as checkpoint:
        for key, tensor in tensors.items():
            whole = checkpoint.tensor(key)
            rows = -(-tensor.shape[0] // after)
            cuts = [(i, min(i + rows, tensor.shape[0])) for i in range(0, tensor.shape[0], rows)]
            shards = [
                checkpoint.box(key, (low, *[0] * (tensor.ndim - 1)), (high - low, *tensor.shape[1:]))
                for low, high in cuts
            ]
            assert torch.equal(torch.cat(shards), whole)
            if name == "exact" or key == "b.bias":
                assert torch.equal(whole, tensor)
            else:
                assert (whole - tensor).abs().max() < 0.04 * tensor.abs().max()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_a_two_dimensional_sharding(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = torch.arange(9 * 8).view(9, 8)
    root = tmp_path_factory.mktemp("grid")
    row, col = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 7))
    directory = root / directory_name(1, "0" * 8)
    directory.mkdir()
    files = []
    for rank, (r, c) in enumerate([(slice(0, row), slice(0, col)), (slice(0, row), slice(col, 8)),
                                   (slice(row, 9), slice(0, col)), (slice(row, 9), slice(col, 8))]):  # fmt: skip
        box = {"x": Box((9, 8), (r.start, c.start))}
        done = write_container(directory / rank_name(rank), {"x": whole[r, c]}, 1, None, rank, 4, box)
        files.append(RankFile(rank_name(rank), done.size, done.digest.hex()))
    write_manifest(directory, new_manifest(1, "exact", files, None, None))
    a, b = sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    c, d = sorted(data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8))))
    with Checkpoint.open(directory) as checkpoint:
        assert torch.equal(checkpoint.box("x", (a, c), (b - a, d - c)), whole[a:b, c:d])


def _entry(start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...] = (8, 8)) -> tuple[int, Entry]:
    return 0, Entry("x", Kind.TENSOR, Choice(), torch.float32, shape, whole, start)


@pytest.mark.parametrize(
    ("places", "match"),
    [
        ([_entry((0, 0), (4, 8))], "32 of 64"),
        ([_entry((0, 0), (5, 8)), _entry((4, 0), (4, 8))], "72 of 64"),
        ([_entry((0, 0), (4, 8)), _entry((0, 0), (4, 8))], "overlap"),
        ([_entry((0, 0), (4, 8)), _entry((2, 0), (4, 8))], "overlap"),
        ([_entry((0, 0), (4, 4)), _entry((0, 4), (4, 4)), _entry((2, 0), (4, 8))], "overlap"),
        ([_entry((0, 0), (4, 8)), _entry((4, 0), (4, 8), (9, 8))], "disagree"),
    ],
)
def test_25_shards_must_cover_their_tensor_once(places: list[tuple[int, Entry]], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        check_cover("x", places)
    check_cover("x", [_entry((0, 0), (4, 4)), _entry((0, 4), (4, 4)), _entry((4, 0), (4, 8))])


def test_25_and_29_torn_sets_are_refused(tmp_path: Path) -> None:
    a = save_sharded(tmp_path / "a", {"x": torch.zeros(8, 8)}, 2, step=1)
    b = save_sharded(tmp_path / "b", {"x": torch.ones(8, 8)}, 2, step=2)
    original = (a / rank_name(1)).read_bytes()
    shutil.copy(b / rank_name(1), a / rank_name(1))
    with pytest.raises(CheckpointError, match="another save"):
        Checkpoint.open(a)
    manifest = read_manifest(a)
    swapped = RankFile(rank_name(1), (b / rank_name(1)).stat().st_size, read_manifest(b).files[1].digest)
    (a / "manifest.json").unlink()
    write_manifest(a, Manifest(1, "exact", (manifest.files[0], swapped)))
    with pytest.raises(CheckpointError, match="is step 2"):
        Checkpoint.open(a)
    (a / rank_name(1)).write_bytes(original)
    (a / "manifest.json").unlink()
    write_manifest(a, Manifest(1, "exact", manifest.files[:1]))
    with pytest.raises(CheckpointError, match="rank 0 of 2"):
        Checkpoint.open(a)


def test_25_a_missing_rank_file_is_refused(tmp_path: Path) -> None:
    directory = save_sharded(tmp_path, {"x": torch.zeros(8, 8)}, 2)
    (directory / rank_name(0)).unlink()
    with pytest.raises(CheckpointError, match="rank-00000"):
        Checkpoint.open(directory)


def _mend(directory: Path, change: Any) -> None:
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("crc32c")
    change(body)
    body["crc32c"] = crc.of_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["files"][0].update(name="../../etc/passwd"),
        lambda b: b["files"][0].update(name="rank-00001.clck"),
        lambda b: b["files"][0].update(size=-1),
        lambda b: b["files"][0].update(size=True),
        lambda b: b["files"][0].update(digest="zz"),
        lambda b: b["files"][0].update(extra=1),
        lambda b: b.update(files=[]),
        lambda b: b.update(files={}),
        lambda b: b.update(step="1"),
        lambda b: b.update(step=-1),
        lambda b: b.update(version=2),
        lambda b: b.update(format="x"),
        lambda b: b.update(base="../x"),
        lambda b: b.update(update_error="x"),
        lambda b: b.update(preset=None),
    ],
)
def test_bad_manifests_are_refused(tmp_path: Path, change: Any) -> None:
    directory = save_sharded(tmp_path, {"x": torch.zeros(8, 8)}, 2)
    _mend(directory, dict)
    Checkpoint.open(directory).close()
    _mend(directory, change)
    with pytest.raises(CheckpointError):
        Checkpoint.open(directory)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b'{"format": "costlab-checkpoint"}', b"\xff"])
def test_manifests_that_are_no_manifests(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError):
        read_manifest(tmp_path)


def test_flipped_bits_of_a_manifest_are_refused_or_harmless(tmp_path: Path) -> None:
    directory = save_sharded(tmp_path, {"x": torch.zeros(8, 8)}, 1)
    path, good = directory / "manifest.json", read_manifest(directory)
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in (0, 2, 5):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            try:
                assert read_manifest(directory) == good
            except CheckpointError:
                continue


def test_27_a_symbolic_link_as_rank_file_is_refused(tmp_path: Path) -> None:
    directory = save_sharded(tmp_path, {"x": torch.zeros(8, 8)}, 1)
    (directory / rank_name(0)).rename(tmp_path / "elsewhere")
    (directory / rank_name(0)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        Checkpoint.open(directory)


def test_the_newest_committed_checkpoint_is_found_and_dead_saves_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest(tmp_path / "absent") is None and latest(tmp_path) is None
    for step in (1, 3, 2):
        save_plain(tmp_path, {"x": torch.zeros(1)}, step)
    (tmp_path / directory_name(9, "0" * 8)).mkdir()
    (tmp_path / "step-junk").mkdir()
    assert latest(tmp_path) == tmp_path / directory_name(3, "0" * 8)
    assert [m.step for _, m in committed(tmp_path)] == [3, 2, 1]
    (tmp_path / directory_name(3, "0" * 8) / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == tmp_path / directory_name(2, "0" * 8)
    assert "damaged" in caplog.text


def test_a_step_directory_is_never_written_twice(tmp_path: Path) -> None:
    save_plain(tmp_path, {"x": torch.zeros(1)}, 1)
    with pytest.raises(CheckpointError, match="exists"):
        save_plain(tmp_path, {"x": torch.ones(1)}, 1)


def _training_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "step": 3, "note": "a", "list": [1, 2.5]}


def test_a_model_and_its_optimizer_resume_exactly(tmp_path: Path) -> None:
    state = _training_state()
    directory = save_plain(tmp_path, flatten(state), 3)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flatten(state).items()}
    other = _training_state()
    with torch.no_grad():
        for parameter in other["model"].parameters():
            parameter.add_(1)
    other["optim"].step()
    other.update(step=99, note="b", list=[0, 0])
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.load(other) == []
    restored = flatten(other)
    assert restored.keys() == saved.keys()
    for name, value in saved.items():
        got = restored[name]
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, name


def test_loading_what_is_not_there_or_not_alike_says_so(tmp_path: Path) -> None:
    directory = save_plain(tmp_path, {"w": torch.zeros(4, 4), "n": 1}, 1)
    with Checkpoint.open(directory) as checkpoint:
        with pytest.raises(CheckpointError, match="has no 'v'"):
            checkpoint.load({"v": torch.zeros(1)})
        assert checkpoint.load({"v": torch.zeros(1)}, strict=False) == ["v"]
        with pytest.raises(CheckpointError, match="shape"):
            checkpoint.load({"w": torch.zeros(4, 5)})
        with pytest.raises(CheckpointError, match="knowingly"):
            checkpoint.load({"w": torch.zeros(4, 4, dtype=torch.bfloat16)})
        with pytest.raises(CheckpointError, match="value"):
            checkpoint.tensor("n")


def test_values_saved_per_rank_are_found_by_their_rank(tmp_path: Path) -> None:
    directory = save_plain(tmp_path, {"rng@0": torch.tensor([1]), "rng@1": torch.tensor([2])}, 1)
    state = {"rng": torch.tensor([0])}
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.load(state, rank=1)
    assert state["rng"].item() == 2


def test_states_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(CheckpointError, match="set"):
        flatten({"x": {1, 2}})
    with pytest.raises(CheckpointError, match="two values"):
        flatten({"a.b": 1, "a": {"b": 2}})


def test_lossy_presets_keep_the_small_tensors_exact(tmp_path: Path) -> None:
    state = {"w.weight": torch.randn(64, 64), "norm.weight": torch.randn(64), "step": torch.tensor(3.0)}
    with Checkpoint.open(save_plain(tmp_path, state, 1, preset("fp8"))) as checkpoint:
        assert checkpoint.places["w.weight"][0][1].choice.codec is Codec.FP8
        for name in ("norm.weight", "step"):
            assert torch.equal(checkpoint.tensor(name), state[name])
        checkpoint.verify()


def test_writing_needs_a_writable_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Not a directory"):
        (tmp_path / "file").write_text("")
        save_plain(tmp_path / "file", {"x": 1}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

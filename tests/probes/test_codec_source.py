"""Where `costlab codec` takes tensors from: every format read, and no file that gets to run code."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from costlab.kernels.codec import save_plain
from costlab.kernels.codec.safetensors_io import write_safetensors
from costlab.probes import codec_table
from costlab.probes.codec_source import SourceError, read
from costlab.probes.codec_spec import CodecRequest

STATE = {
    "w": torch.randn(32, 48, generator=torch.Generator().manual_seed(0)),
    "w.exp_avg": torch.randn(32, 48, generator=torch.Generator().manual_seed(1)) * 1e-3,
    "w.exp_avg_sq": torch.rand(32, 48, generator=torch.Generator().manual_seed(2)) * 1e-5,
    "w.step": torch.tensor(7.0),
    "norm.bias": torch.ones(48),
}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def dcp(folder: Path, state: dict[str, Any]) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def written(tmp_path: Path, kind: str) -> Path:
    if kind == "safetensors":
        write_safetensors(tmp_path / "x.safetensors", STATE)
        return tmp_path / "x.safetensors"
    if kind == "torch":
        torch.save(STATE, tmp_path / "x.pt")
        return tmp_path / "x.pt"
    if kind == "DCP":
        return dcp(tmp_path / "dcp", STATE | {"epoch": 3})
    return save_plain(tmp_path / "root", STATE, 5)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "DCP", "costlab"])
def test_every_format_gives_the_same_tensors(tmp_path: Path, kind: str) -> None:
    found, values = read(written(tmp_path, kind))
    assert found == kind
    assert all(torch.equal(values[name], tensor) for name, tensor in STATE.items())
    assert "epoch" not in values  # a pickle in DCP


def test_a_container_file_and_the_folder_above_it_are_found_too(tmp_path: Path) -> None:
    directory = written(tmp_path, "costlab")
    assert read(directory.parent)[0] == "costlab"
    (file,) = [f for f in directory.iterdir() if f.name.startswith("rank")]
    assert read(file)[0] == "costlab" and torch.equal(read(file)[1]["w"], STATE["w"])


def test_a_torch_file_that_could_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Bomb(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(SourceError, match="could run code: refused"):
        read(tmp_path / "x.pt")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(SourceError):
        read(tmp_path / "old.bin")
    assert not (tmp_path / "ran").exists()


def test_dcp_metadata_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    folder = dcp(tmp_path / "dcp", {"w": STATE["w"]})
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(SourceError, match="does not belong into DCP metadata"):
        read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.hub.load", "torch.serialization.load", "os.system", "builtins.eval"]
)
def test_no_function_can_be_named_in_dcp_metadata(tmp_path: Path, name: str) -> None:
    folder = dcp(tmp_path / "dcp", {"w": STATE["w"]})
    module, _, function = name.rpartition(".")
    (folder / ".metadata").write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(SourceError, match="not a readable DCP folder"):
        read(folder)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.bin", "x.txt"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x04."])
def test_what_is_no_such_file_is_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError):
        read(tmp_path / name)


def test_broken_archives_and_folders_are_one_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("data.pkl", b"nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.pt").touch()
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    for path in ("x.pt", "empty", "absent", "list.pt"):
        with pytest.raises(SourceError):
            read(tmp_path / path)


def test_the_table_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, "safetensors")
    result = codec_table.measure(CodecRequest(path=str(path), device="cpu", timing=False))
    assert (result.kind, result.tensors, result.exact, result.error) == ("safetensors", 5, 49, "")
    classes = dict.fromkeys(r.tensor_class for r in result.rows)
    assert list(classes) == ["weight", "first moment", "second moment"]
    log8 = next(r for r in result.rows if r.codec == "log8")
    assert log8.tensor_class == "second moment" and log8.update_error is not None and log8.update_error < 0.05
    assert result.claim is not None and result.claim.bitmap_zeros == pytest.approx(0.741, abs=1e-3)
    assert result.claim.zeros is not None and result.claim.zeros < 0.01


def test_a_file_without_matrices_is_said(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"bias": torch.ones(3)})
    with pytest.raises(SourceError, match="nothing that a codec would code"):
        codec_table.measure(CodecRequest(path=str(tmp_path / "x.safetensors"), device="cpu"))

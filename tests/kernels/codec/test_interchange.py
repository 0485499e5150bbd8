"""safetensors and DCP, both ways; what the safetensors reader refuses."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.codecs import Choice, Codec
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.interchange import (
    export_dcp,
    export_safetensors,
    import_dcp,
    import_safetensors,
    save_plain,
    tensor_names,
)  # fmt: skip
from costlab.kernels.codec.policy import Policy, preset
from costlab.kernels.codec.safetensors_io import DTYPES, read_safetensors, write_safetensors


def _tensors() -> dict[str, torch.Tensor]:
    made = {f"t.{code}": torch.randn(3, 5).abs().to(dtype) for code, dtype in DTYPES.items()}
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and bool((a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).all())


def test_safetensors_round_trip_and_the_published_package_agrees(tmp_path: Path) -> None:
    tensors = _tensors()
    write_safetensors(tmp_path / "s", tensors, {"format": "pt"})
    got = read_safetensors(tmp_path / "s")
    assert got.keys() == tensors.keys() and all(_equal(got[n], tensors[n]) for n in tensors)
    package = pytest.importorskip("safetensors.torch")
    theirs = package.load_file(tmp_path / "s")
    assert all(_equal(theirs[n], tensors[n]) for n in tensors)
    package.save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "theirs")
    assert all(_equal(t, tensors[n]) for n, t in read_safetensors(tmp_path / "theirs").items())


def _file(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _t(low: int, high: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [low, high]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 7,
        _file({"a": _t(0, 16), "b": _t(8, 24)}, bytes(24)),
        _file({"a": _t(0, 16), "b": _t(24, 40)}, bytes(40)),
        _file({"a": _t(0, 16)}, bytes(20)),
        _file({"a": _t(0, 16)}, bytes(8)),
        _file({"a": _t(16, 0)}, bytes(32)),
        _file({"a": _t(0, 16, [5])}, bytes(16)),
        _file({"a": _t(0, 16, [2**33, 2**33])}, bytes(16)),
        _file({"a": _t(0, 16, [-4])}, bytes(16)),
        _file({"a": _t(0, 0, [0, 2**60])}, b""),
        _file({"a": _t(0, 16)}, bytes(16), 2**63),
        _file({"a": _t(0, 16)}, bytes(16), 10000),
        _file(b'{"a":%b,"a":%b}' % ((json.dumps(_t(0, 16)).encode(),) * 2), bytes(16)),
        _file(b'{"\xff\xfe":%b}' % json.dumps(_t(0, 16)).encode(), bytes(16)),
        _file({"a\0b": _t(0, 16)}, bytes(16)),
        _file({"../../etc/x": _t(0, 16)}, bytes(16)),
        _file({"a": _t(0, 16, [4], "Q9")}, bytes(16)),
        _file({"a": {**_t(0, 16), "more": 1}}, bytes(16)),
        _file(b'{"__metadata__":' + b"[" * 100_000 + b"}", b""),
        _file(b' {"a":%b}' % json.dumps(_t(0, 16)).encode(), bytes(16)),
        _file([1, 2], b""), b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64,
    ],
)  # fmt: skip
def test_malformed_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_safetensors(tmp_path / "s")


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 400), junk=st.binary(min_size=1, max_size=30), size=st.integers(0, 600))
def test_damaged_safetensors_raise_one_exception_or_load(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.unlink(missing_ok=True)
    write_safetensors(path, {"a": torch.zeros(4), "b": torch.ones(5, 5)})
    data = path.read_bytes()
    path.write_bytes((data[:at] + junk + data[at + len(junk) :])[:size])
    with contextlib.suppress(CheckpointError):
        read_safetensors(path)


def test_a_checkpoint_survives_the_way_through_safetensors(tmp_path: Path) -> None:
    tensors = _tensors()
    with Checkpoint.open(save_plain(tmp_path / "a", {**tensors, "n": 1}, 5)) as checkpoint:
        assert "n" not in tensor_names(checkpoint)
        export_safetensors(checkpoint, tmp_path / "s")
    with Checkpoint.open(import_safetensors(tmp_path / "s", tmp_path / "b", 5)) as checkpoint:
        assert all(_equal(checkpoint.tensor(n), t) for n, t in tensors.items())


def test_fp8_codes_are_exported_with_their_scale_grid(tmp_path: Path) -> None:
    w = torch.randn(256, 300)
    policy = Policy("x", overrides=(("w", Choice(Codec.FP8, (128, 128))),))
    with Checkpoint.open(save_plain(tmp_path / "a", {"w": w, "n.bias": torch.ones(3)}, 1, policy)) as checkpoint:
        export_safetensors(checkpoint, tmp_path / "s", keep_fp8=True)
        decoded = checkpoint.tensor("w")
    got = read_safetensors(tmp_path / "s")
    assert got["w"].dtype is torch.float8_e4m3fn and got["w_scale_inv"].shape == (2, 3)
    scale = got["w_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:256, :300]
    assert torch.equal(got["w"].float() * scale, decoded)
    assert torch.equal(got["n.bias"], torch.ones(3))


def test_a_checkpoint_survives_the_way_through_dcp(tmp_path: Path) -> None:
    state = {"w": torch.randn(8, 8), "step": torch.tensor(3), "epoch": 4, "name": "x"}
    with Checkpoint.open(save_plain(tmp_path / "a", state, 7)) as checkpoint:
        export_dcp(checkpoint, tmp_path / "dcp")
    with Checkpoint.open(import_dcp(tmp_path / "dcp", tmp_path / "b", 7)) as checkpoint:
        assert torch.equal(checkpoint.tensor("w"), state["w"]) and checkpoint.value("epoch") == 4  # type: ignore[arg-type]
        assert checkpoint.value("name") == "x"


def test_what_is_no_dcp_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="DCP"):
        import_dcp(tmp_path, tmp_path / "b")


def test_deltas_need_the_pipeline(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pipeline"):
        save_plain(tmp_path, {"w": torch.zeros(4, 4)}, 1, preset("delta"))

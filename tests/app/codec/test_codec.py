"""`costlab codec` as a person types it, with its subprocess, and how its result reads."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from costlab.app.codec.render import needs, render
from costlab.probes.codec_spec import ClaimRow, CodecRequest, CodecResult, CodecTableRow, check
from costlab.probes.spec import SpecError

CLAIM = ClaimRow(
    bits=3.2,
    bitmap_zeros=0.741,
    csr16_zeros=0.873,
    csr32_zeros=0.924,
    least_error=0.109,
    zeros=1e-6,
    measured_bits=8.125,
)


def costlab(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "costlab.app", "codec", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)


def safetensors(path: Path, side: int = 32) -> Path:
    """A file with one fp32 matrix, by hand: this test may not need torch."""
    data = struct.pack(f"<{side * side}f", *((i * 2654435761 % 1000) / 500 - 1 for i in range(side * side)))
    head = json.dumps({"w": {"dtype": "F32", "shape": [side, side], "data_offsets": [0, len(data)]}}).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def test_a_file_gives_a_table_and_the_claim_beside_it(tmp_path: Path) -> None:
    done = costlab(str(safetensors(tmp_path / "m.safetensors")), "--device", "cpu", "--no-timing", "-f", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {r["codec"]: r for r in result["rows"]}
    assert rows["raw"]["bits"] == 32 and rows["raw"]["rel_l2"] == 0
    assert rows["fp8 16x16"]["bits"] == pytest.approx(8.125) and 0 < rows["fp8 16x16"]["rel_l2"] < 0.05
    assert result["claim"]["bits"] == 3.2
    assert result["notes"] == ["no Adam moments in it: the error of the first resumed update cannot be told"]
    assert str(tmp_path) not in done.stdout


def test_bad_input_is_one_line_and_code_5(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no")
    for path in (tmp_path / "x.safetensors", tmp_path / "absent"):
        done = costlab(str(path), "--device", "cpu")
        assert done.returncode == 5 and len(done.stderr.strip().splitlines()) == 1
        assert done.stderr.startswith("costlab: ") and not done.stdout


def test_what_is_no_file_is_one_line_and_code_5(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "neither a file nor a folder"), (tmp_path / ("a" * 300), "too long")):
        done = costlab(str(path), "--device", "cpu")
        assert done.returncode == 5 and done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize("output", ["absent/table.md", ".", "taken"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path: Path, output: str) -> None:
    (tmp_path / "taken").write_text("kept")
    began = time.monotonic()
    done = costlab("--model", "llama", "--steps", "1000000", "--output", str(tmp_path / output))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and time.monotonic() - began < 60
    assert (tmp_path / "taken").read_text() == "kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_and_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "costlab.app", "codec", "--model", "llama", "--steps", "1000000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (children := psutil.Process(done.pid).children(recursive=True)) and time.monotonic() < until:
        time.sleep(0.05)
    done.send_signal(number)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out, err) == (4, "", "costlab: cancelled\n")
    assert children and not psutil.wait_procs(children, timeout=20)[1]
    assert not list(tmp_path.glob("costlab-*"))


@pytest.mark.parametrize(
    "request_",
    [
        CodecRequest(), CodecRequest(path="x", model="llama"), CodecRequest(model="bert"),
        CodecRequest(model="llama:9b"), CodecRequest(model="llama", steps=0), CodecRequest(path="x", limit_mb=-1.0),
        CodecRequest(path="x", limit_mb=float("nan")), CodecRequest(path="x", limit_mb=float("inf")),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(request_: CodecRequest) -> None:
    with pytest.raises(SpecError):
        check(request_)


def row(kind: str, codec: str, error: float | None) -> CodecTableRow:
    return CodecTableRow(
        codec=codec, tensor_class=kind, values=1000, bits=8.1, ratio=3.9, rel_l2=0.02, max_abs=0.1, flushed=3,
        update_error=error, encode_gbps=None, decode_gbps=1.5,
    )  # fmt: skip


def test_a_harmful_codec_is_marked_and_the_claim_is_in_the_weights_table() -> None:
    rows = [
        row("weight", "fp8 16x16", None),
        row("second moment", "int8 16x16", 5.2),
        row("second moment", "log8", 0.01),
    ]
    result = CodecResult(
        source="x\x1b[31m.safetensors", kind="safetensors", values=10, sampled=5, rows=rows, claim=CLAIM
    )
    text = render(result, "text", 80)
    assert "! 520 %" in text and "! 1.0 %" not in text
    assert "claimed: fp8 + CSR  3.20" in text and "74 % of the values" in " ".join(text.split())
    assert "\x1b[31m" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "| log8 |" in render(result, "md")


def test_what_the_claim_needs_is_said_without_weights_too() -> None:
    import msgspec

    bare = msgspec.structs.replace(CLAIM, zeros=None, measured_bits=None)
    assert "FP8 makes" not in needs(bare) and "87 % with 16-bit CSR" in needs(bare)

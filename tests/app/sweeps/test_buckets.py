"""What the sweep of gradient layouts recommends and how it is shown, from rows whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costlab.app.cli import app
from costlab.app.exit_codes import Exit
from costlab.app.sweeps.buckets import best_bucket, keep, last_kept, recommendation, render_buckets
from costlab.probes.bucket_spec import DDP_BUCKET, MIB, BucketCase, BucketResult, BucketRow, Layout


def row(
    bucket: int, ms: float, dtype: str = "float32", layout: Layout = "view", every: int = 1, spread: float = 0.01
) -> BucketRow:
    seconds = ms / 1e3
    return BucketRow(
        case=BucketCase(bucket=bucket, dtype=dtype, layout=layout, every=every), collectives=4, bytes=64_000_000,
        seconds=seconds, low=seconds * (1 - spread), high=seconds * (1 + spread), reduce_seconds=seconds, repeats=9,
    )  # fmt: skip


def result(*rows: BucketRow) -> BucketResult:
    return BucketResult(
        date="2026-11-29T12:00:00+00:00", backend="nccl", device="NVIDIA H200", ranks=2, version="2.28.9",
        elements=16_000_000, tensors=30, complete=True, rows=list(rows),
    )  # fmt: skip


WHOLE = (
    row(0, 30.0), row(MIB, 20.0), row(4 * MIB, 10.2), row(DDP_BUCKET, 10.0), row(64 * MIB, 10.1),
    row(4 * MIB, 5.0, "bfloat16"), row(DDP_BUCKET, 14.0, layout="copy"), row(DDP_BUCKET, 16.0, every=4),
)  # fmt: skip


def test_the_smallest_of_the_fastest_buckets_is_named() -> None:
    best = best_bucket(result(*WHOLE))
    assert best is not None
    assert best.case.bucket == 4 * MIB
    assert recommendation(result(*WHOLE)) == (
        "Use buckets of 4 MiB (bucket_cap_mb=4) with gradients as their views: 10.2 ms to reduce 64.0 MB, 27 % less "
        "than 14.0 ms with copies into 25 MiB, DDP's default; if training allows, bfloat16 gradients take 5.00 ms and "
        "reducing every 4 micro-batches (no_sync) takes 4.00 ms a micro-batch instead of 10.0 ms."
    )


def test_what_the_rounds_do_not_tell_apart_is_not_claimed() -> None:
    noisy = result(row(DDP_BUCKET, 10.0, spread=0.3), row(DDP_BUCKET, 12.0, layout="copy", spread=0.3))
    text = recommendation(noisy)
    assert "not told apart from 12.0 ms" in text
    assert "rounds differ by up to 60 %: repeat it where nothing else runs" in text
    assert "bfloat16" not in recommendation(result(row(MIB, 10.0), row(MIB, 10.0, "bfloat16")))
    assert recommendation(result()) == "Nothing to recommend: no bucket size was measured."


@pytest.mark.parametrize("form", ["text", "md", "json"])
def test_every_format(form: str) -> None:
    shown = render_buckets(result(*WHOLE), form)
    assert "Use buckets of 4 MiB" in shown.replace("\n", " ")
    if form == "json":
        rows = json.loads(shown)["rows"]
        assert rows[3]["busbw_gbps"] == pytest.approx(6.4)
        assert rows[7]["seconds_per_batch"] == pytest.approx(0.004)
    else:
        assert "reducing every 4 micro-batches" in shown.replace("\n", " ")
        assert "1 MiB" in shown
        assert "6.40" in shown


def test_terminal_of_80_columns() -> None:
    assert max(map(len, render_buckets(result(*WHOLE), "text", 80).splitlines())) <= 80


def test_the_last_sweep_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["sweep", "buckets", "--last"])
    assert (done.exit_code, len(done.stderr.splitlines())) == (Exit.BAD_INPUT, 1)
    keep(result(*WHOLE), tmp_path)
    (tmp_path / "sweeps" / "buckets-99990101000000-2xgloo.json").write_text("{")
    assert last_kept(tmp_path) == result(*WHOLE)
    done = CliRunner().invoke(app, ["sweep", "buckets", "--last", "-f", "md"])
    assert done.exit_code == 0
    assert done.stdout == render_buckets(result(*WHOLE), "md")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gradients", "lots"], "--gradients 'lots'"),
        (["--gradients", "10"], "from 1K to 100B"),
        (["--gradients", "9" * 5000], "from 1K to 100B"),
        (["--gradients", "\x1b[31mM"], "--gradients 'M'"),
        (["--bucket", "x"], "--bucket 'x'"),
        (["--bucket", "-1"], "--bucket '-1'"),
        (["--dtype", "int7"], "no dtype 'int7'"),
        (["--every", "0"], "--every"),
        (["--seconds", "0"], "--seconds"),
        (["--ranks", "1"], "one rank reduces nothing"),
        (["--device", "tpu"], "no 'tpu'"),
    ],
)
def test_options_that_make_no_sense_are_one_line(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["sweep", "buckets", *options])
    assert done.exit_code == Exit.USAGE
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1

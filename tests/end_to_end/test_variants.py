"""Every parallelism and compile scope on real CPU ranks: bytes equal the formula, parts sum, spans are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_smoke import costlab

pytestmark = pytest.mark.xdist_group("variants")
FAST = [
    "--device",
    "cpu",
    "--dtype",
    "fp32",
    "--steps",
    "3",
    "--warmup",
    "1",
    "--profile-steps",
    "1",
    "--no-checkpoint",
]


@pytest.mark.parametrize(
    "options",
    [
        ["--parallel", "ddp", "--compile", "none"],
        ["--parallel", "hsdp", "--ranks", "4", "--compile", "none"],
        ["--compile", "model"],
        ["--recompute", "block"],
        ["-w", "resnet50", "--compile", "block"],
        ["-w", "gpt2", "--parallel", "ddp"],
    ],
    ids=" ".join,
)
def test_variant(options: list[str], tmp_path: Path) -> None:
    done = costlab("run", *FAST, *options, home=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(costlab("report", "last", "-f", "json", home=tmp_path).stdout)
    collectives = report["collectives"]
    measured, expected = collectives["bytes_per_step"]["value"], collectives["expected_bytes"]["value"]
    assert measured == pytest.approx(expected, rel=0.01)
    waterfall = report["waterfall"]
    assert sum(p["ms"] for p in waterfall["parts"]) == pytest.approx(waterfall["step_ms"], rel=0.01)
    assert report["fusion"]["quality"]["value"] > 0.98
    if "none" not in options:
        assert report["fusion"]["rate"]["value"] > 0.5
        split = "model" in options  # FSDP2's hooks cut a whole model at every block
        assert bool(report["compile"]["breaks"]) == split

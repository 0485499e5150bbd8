"""One what-if with real processes: a slower variant, one that dies, predictions, parity, everything stored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from costlab.app.report.whatif import render_whatif
from costlab.app.store import open_run
from costlab.app.whatif.commands import answer
from costlab.app.whatif.results import WhatIfResult
from costlab.app.whatif.spec import BASELINE, CONTROL, Variant, WhatIfSpec
from costlab.app.whatif.store import find_cached
from costlab.probes.spec import RunSpec

WORKLOAD = Path(__file__).with_name("workloads.py")
pytestmark = pytest.mark.xdist_group("whatif")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def result(home: Path) -> WhatIfResult:
    spec = RunSpec(
        workload=f"{WORKLOAD}:make",
        ranks=1,
        device="cpu",
        compile="none",
        dtype="fp32",
        steps=6,
        warmup=0,
        profile_steps=1,
        checkpoint=False,
    )
    variants = [Variant(name="slow", options={"size": "slow"}), Variant(name="dies", options={"size": "dies"})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSTLAB_HOME", str(home))
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        return answer(WhatIfSpec(baseline=spec, variants=variants, legs=2), quiet=True).result


def test_every_leg_was_a_run_of_its_own(result: WhatIfResult, home: Path) -> None:
    assert result.status == "complete"
    assert [leg.arm for leg in result.legs] == [BASELINE, "slow", "dies", CONTROL, CONTROL, "slow", BASELINE]
    runs = [open_run(home / "whatif" / result.id / leg.directory) for leg in result.legs]
    assert len({run.id for run in runs}) == len({leg.directory for leg in result.legs}) == 7
    assert [run.status for run in runs].count("complete") == 6


def test_the_slower_variant_is_measured_slower_by_what_it_sleeps(result: WhatIfResult) -> None:
    arm = result.arm("slow")
    assert arm.step_ms is not None
    assert arm.step_ms.value is not None
    assert result.baseline.step_ms is not None
    assert result.baseline.step_ms.value is not None
    assert arm.step_ms.value - result.baseline.step_ms.value > 5
    assert arm.change is not None
    assert arm.change.value is not None
    assert arm.change.value > 0.1


def test_the_variant_that_died_is_a_result(result: WhatIfResult) -> None:
    arm = result.arm("dies")
    assert arm.verdict == "invalid"
    assert "exit code 9" in arm.failure
    assert arm.fits
    assert result.legs[2].status == "failed"


def test_losses_at_equal_seeds_are_equal_to_the_last_bit(result: WhatIfResult) -> None:
    by = {(leg.round, leg.arm): leg.losses for leg in result.legs}
    assert len(by[0, BASELINE]) == 6
    assert by[0, BASELINE] == by[0, CONTROL] == by[0, "slow"]
    assert by[0, BASELINE] != by[1, BASELINE]
    assert result.control.parity is not None
    assert result.control.parity.verdict == "same"


def test_it_is_stored_and_rendered(result: WhatIfResult, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(home))
    found = find_cached(result.spec_key, result.environment_key)
    assert found is not None
    assert found[1] == result
    assert "dies failed" in render_whatif(result, "text")

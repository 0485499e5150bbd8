"""The gate: outcomes, exit codes, JUnit and JSON."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import RunReport
from costlab.app.store import open_run
from costlab.app.whatif.check import Limits, check, parse_share, to_json, to_junit, to_text
from costlab.app.whatif.cli import check_command
from costlab.probes.spec import SpecError
from tests.app.make_model import NASTY
from tests.app.make_run import write_example_run

gate = typer.Typer()
gate.command()(check_command)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "base": write_example_run(folder / "base", run_id="base"),
        "slow": write_example_run(folder / "slow", run_id="slow", speed=0.9, seed=1),
        "same": write_example_run(folder / "same", run_id="same", seed=2),
        "other": write_example_run(folder / "other", run_id="other", gpu="NVIDIA A100"),
        "empty": write_example_run(folder / "empty", run_id="empty", omit=frozenset({"steps"})),
    }


def report(path: Path) -> RunReport:
    return build_report(open_run(path))


def checked(runs: dict[str, Path], name: str, **limits: float) -> str:
    return check(report(runs["base"]), report(runs[name]), Limits(**limits)).outcome


def test_a_run_within_its_limits_passes_and_a_slower_one_fails(runs: dict[str, Path]) -> None:
    assert checked(runs, "same") == "passed"
    assert checked(runs, "slow") == "failed"
    assert checked(runs, "slow", step=0.5) == "passed"


def test_growth_within_the_noise_does_not_fail(runs: dict[str, Path]) -> None:
    base, other = report(runs["base"]), report(runs["same"])
    assert other.steps is not None
    wild = [ms * (1.3 if n % 2 else 0.8) for n, ms in enumerate(other.steps.series_ms)]
    step = msgspec.structs.replace(other.steps.step_ms, value=(other.steps.step_ms.value or 0) * 1.06)
    noisy = msgspec.structs.replace(other, steps=msgspec.structs.replace(other.steps, series_ms=wild, step_ms=step))
    result = check(base, noisy, Limits())
    assert result.outcome == "passed"
    assert "noise" in result.checks[-1].message


def test_runs_that_cannot_be_compared_are_an_error(runs: dict[str, Path]) -> None:
    assert checked(runs, "other") == "error"
    assert checked(runs, "empty") == "error"


def test_memory_is_checked_only_when_asked(runs: dict[str, Path]) -> None:
    result = check(report(runs["base"]), report(runs["same"]), Limits(memory=0.01, traffic=0.0))
    assert [c.name for c in result.checks] == ["comparable", "step time", "peak memory", "communicated bytes"]
    assert result.outcome == "passed"


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 2.5 % ", 0.025), ("0", 0.0)])
def test_limits_are_shares(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "five", "-1%", "nan", "inf"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_share(text)


def test_junit_is_well_formed_whatever_the_names(runs: dict[str, Path]) -> None:
    result = check(report(runs["base"]), report(runs["slow"]), Limits(memory=0.1))
    hostile = msgspec.structs.replace(result, run=f"slow{NASTY}")
    suite = ET.fromstring(to_junit(hostile))[0]
    assert suite.attrib["tests"] == "3"
    assert suite.attrib["failures"] == "1"
    (failure,) = suite.iter("failure")
    assert "allowed +5 %" in failure.attrib["message"]
    assert "\x1b" not in to_text(hostile)
    assert json.loads(to_json(result))["outcome"] == "failed"


@pytest.mark.parametrize(("name", "code"), [("same", 0), ("slow", 1), ("other", 5)])
def test_exit_codes(runs: dict[str, Path], name: str, code: int, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    done = CliRunner().invoke(gate, [str(runs["base"]), str(runs[name]), "--junit", str(junit)])
    assert done.exit_code == code, done.output
    assert ET.parse(junit).getroot().tag == "testsuites"


def test_bad_limits_and_absent_runs_have_their_own_codes(runs: dict[str, Path]) -> None:
    usage = CliRunner().invoke(gate, [str(runs["base"]), str(runs["same"]), "--max-step-regression", "much"])
    assert usage.exit_code == 2
    absent = CliRunner().invoke(gate, [str(runs["base"]), "/nowhere/at/all"])
    assert absent.exit_code == 5

"""The commands as a person types them, over legs of known speed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from costlab.app import cli
from costlab.app.whatif import commands
from costlab.app.whatif.cli import register
from costlab.app.whatif.toggles import Machine
from tests.app.whatif.fakes import FakeMachine, out_of_memory

ON_CPU = ["--device", "cpu", "--ranks", "1", "--dtype", "fp32", "--steps", "10"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("costlab.app.whatif.spec.this_machine", lambda: Machine(gpus=0))
    fake = FakeMachine(lambda s: 0.9 if s.optimizer == "sgd" else 1.0, noise=0.001)
    monkeypatch.setitem(commands.answer.__kwdefaults__, "launcher", fake)
    return fake


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    built = typer.Typer()
    register(built, cli.run_command, cli.make_spec)
    return built


def invoke(app: typer.Typer, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_a_whatif_prints_its_answer_and_narrates_on_stderr(app: typer.Typer, machine: FakeMachine) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = invoke(app, "whatif", *ON_CPU, "--what-if", "sgd", "--legs", "2", "--format", "json")
    assert code == 0, err
    result = json.loads(out)
    assert result["variants"][0]["verdict"] == "faster"
    assert result["spec"]["baseline"]["device"] == "cpu"
    assert "leg 6/6" in err
    assert "predicted  sgd" in err
    assert signal.getsignal(signal.SIGTERM) is before
    again = invoke(app, "whatif", *ON_CPU, "--what-if", "sgd", "--legs", "2", "--format", "json")
    assert json.loads(again[1]) == result
    assert "measured before" in again[2]
    assert len(machine.started) == 6


def test_settings_presets_and_factorials_reach_the_engine(app: typer.Typer, machine: FakeMachine) -> None:
    arguments = ["--preset", "smoke", "--device", "cpu", "--ranks", "1", "--legs", "2", "--steps", "10", "--factorial"]
    code, out, err = invoke(app, "whatif", *arguments, "--set", "optimizer=sgd", "--set", "recompute=block", "-q")
    assert code == 0, err
    assert err == ""
    assert "MAIN EFFECTS AND INTERACTIONS" in out
    assert {spec.steps for spec in machine.started} == {10}
    assert {spec.dtype for spec in machine.started} == {"fp32"}


def test_checkpoints_are_saved_only_when_asked(app: typer.Typer, machine: FakeMachine) -> None:
    invoke(app, "whatif", *ON_CPU, "--what-if", "sgd", "--legs", "2", "-q", "--checkpoint")
    assert [spec.checkpoint for spec in machine.started] == [True, True, False, False, False, False]


def test_files_are_not_overwritten_unasked(app: typer.Typer, machine: FakeMachine, tmp_path: Path) -> None:
    file = tmp_path / "answer.md"
    arguments = ["whatif", *ON_CPU, "--what-if", "sgd", "--legs", "2", "-q", "--format", "md", "-o", str(file)]
    assert invoke(app, *arguments)[0] == 0
    assert file.read_text().startswith("# What if: sgd")
    assert invoke(app, *arguments)[0] == 2
    assert invoke(app, *arguments, "--force")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--what-if", "cudagraphs"],
        ["--what-if", "warp"],
        ["--set", "bach=8"],
        ["--what-if", "sgd", "--format", "xml"],
    ],
)
def test_wrong_questions_are_usage_errors(app: typer.Typer, machine: FakeMachine, arguments: list[str]) -> None:
    code, out, err = invoke(app, "whatif", *ON_CPU, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("costlab: ")
    assert machine.started == []


def test_a_baseline_that_fails_has_the_failed_run_s_code(app: typer.Typer, machine: FakeMachine) -> None:
    machine.fail = lambda _: out_of_memory()
    assert invoke(app, "whatif", *ON_CPU, "--what-if", "sgd", "-q")[0] == 3


def test_static_vs_dynamic_takes_the_run_s_options(app: typer.Typer, machine: FakeMachine) -> None:
    code, out, err = invoke(app, "static-vs-dynamic", *ON_CPU, "--legs", "2", "-q", "--format", "json")
    assert code == 0, err
    assert [row["name"] for row in json.loads(out)["rows"]] == ["eager DDP", "eager FSDP2", "compiled FSDP2"]


def test_predictions_are_summed_up(app: typer.Typer, machine: FakeMachine) -> None:
    assert "no prediction" in invoke(app, "predictions")[1]
    invoke(app, "whatif", *ON_CPU, "--what-if", "sgd", "--legs", "2", "-q")
    assert "sgd" in invoke(app, "predictions")[1]

"""The whole path on this machine: run, report, compare, headless TUI; real processes, real gloo, real figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

KEYS = [
    "schema_version",
    "run",
    "environment",
    "steps",
    "waterfall",
    "fusion",
    "collectives",
    "checkpoint",
    "compile",
    "memory",
    "energy",
    "cost",
    "findings",
]
pytestmark = pytest.mark.xdist_group("smoke")


def costlab(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COSTLAB_HOME": str(home), **env}
    command = [sys.executable, "-P", "-m", "costlab.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=400)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def smoke(home: Path) -> Path:
    """One `costlab run --preset smoke`: 2 ranks, gloo, compiled FSDP2."""
    done = costlab("run", "--preset", "smoke", "--device", "cpu", home=home)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def report(smoke: Path, home: Path) -> Mapping[str, Any]:
    done = costlab("report", str(smoke), "--format", "json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_run_prints_its_directory_and_ends_in_time(smoke: Path, report: Mapping[str, Any]) -> None:
    assert (smoke / "manifest.json").is_file()
    assert report["run"]["status"] == "complete"
    assert report["run"]["duration_s"] < 180


def test_json_has_every_section(report: Mapping[str, Any]) -> None:
    assert list(report) == KEYS
    for section in ("steps", "waterfall", "fusion", "collectives", "checkpoint", "compile", "memory"):
        assert report[section] is not None, section


def test_step_time_is_of_all_timed_steps(report: Mapping[str, Any]) -> None:
    steps = report["steps"]
    assert steps["step_ms"]["n"] == 20 == len(steps["series_ms"])
    assert steps["step_ms"]["source"] == "measured"
    assert min(steps["series_ms"]) <= steps["step_ms"]["value"] <= max(steps["series_ms"])
    assert steps["throughput"]["value"] == pytest.approx(1024 / steps["step_ms"]["value"] * 1e3, rel=1e-6)


def test_waterfall_sums_to_the_step(report: Mapping[str, Any]) -> None:
    waterfall = report["waterfall"]
    total = sum(part["ms"] for part in waterfall["parts"])
    assert total == pytest.approx(waterfall["step_ms"], rel=0.01)
    assert waterfall["step_ms"] == pytest.approx(report["steps"]["step_ms"]["value"], rel=1e-9)
    by_name = {part["name"]: part["ms"] for part in waterfall["parts"]}
    assert by_name["matrix math"] > 0
    assert by_name["memory-bound kernels"] > 0


def test_collective_bytes_equal_the_formula(report: Mapping[str, Any]) -> None:
    collectives = report["collectives"]
    measured, expected = collectives["bytes_per_step"]["value"], collectives["expected_bytes"]["value"]
    assert measured == pytest.approx(expected, rel=0.01)
    assert {"all_gather", "reduce_scatter"} <= {row["kind"] for row in collectives["rows"]}
    assert collectives["transfer_ms"] is not None
    assert collectives["wait_ms"] is not None


def test_every_layer_has_a_status_and_blocks_are_measured(report: Mapping[str, Any]) -> None:
    fusion = report["fusion"]
    assert 0 < fusion["rate"]["value"] <= 1
    blocks = [row for row in fusion["layers"] if row["path"].startswith("layers")]
    assert blocks
    assert all(row["status"] in ("complete", "partial", "broken") for row in blocks)
    assert any(row["ms"] and row["ms"] > 0 for row in blocks)
    assert fusion["quality"]["value"] > 0.9


def test_generated_code_of_every_fused_kernel_is_kept_once(report: Mapping[str, Any], smoke: Path) -> None:
    """Rank 0 alone writes it; names are the profiler's, so that time and code meet."""
    from costlab.app.analysis.sources import kernel_source
    from costlab.app.store import Run

    assert [p.parent.name for p in smoke.glob("rank-*/kernel_sources.parquet")] == ["rank-00000"]
    run = Run(smoke)
    names = {(k["name"], k["phase"]) for k in report["fusion"]["kernels"] if "_fused_" in k["name"]}
    fused = {(name, phase) for name, phase in names if not name.startswith("aten::")}  # AdamW's is PyTorch's own
    assert len(fused) > 3
    for name, phase in fused:
        view = kernel_source(run, name, phase)
        assert view is not None, name
        assert view.language == "cpp" and not view.cut
        assert "kernel(" in view.source
        assert str(Path.home()) not in view.source
    times = [one["ms"] for one in report["fusion"]["sources"]]
    assert {one["name"] for one in report["fusion"]["sources"]} <= {name for name, _ in fused}
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert kernel_source(run, "aten::mm", "forward") is None


def test_compile_knows_cold_from_warm(report: Mapping[str, Any]) -> None:
    compiled = report["compile"]
    assert compiled["cold_s"]["value"] > compiled["warm_s"]["value"] > 0
    runs = {(c["rank"], c["run"], c["cache"]): (c["hit"], c["miss"]) for c in compiled["caches"]}
    for rank in (0, 1):
        assert runs[rank, "cold", "fx_graph"][1] > 0
        assert runs[rank, "warm", "fx_graph"][0] > 0


def test_checkpoint_is_restored_bit_by_bit(report: Mapping[str, Any]) -> None:
    lines = report["checkpoint"]["lines"]
    loads = [line for line in lines if line["op"] == "load" and line["ok"]]
    assert loads
    assert all(line["within_bound"] if line["lossy"] else line["identical"] for line in loads)
    assert {"costlab:exact", "costlab:fp8"} <= {line["mode"] for line in lines}
    assert any(line["mode"].startswith("async") and line["op"] == "save" for line in lines)
    assert not (Path(report["run"]["id"]) / "raw" / "checkpoints").exists()


@pytest.mark.parametrize("format", ["md", "text"])
def test_written_reports_have_every_section(smoke: Path, home: Path, format: str) -> None:
    done = costlab("report", str(smoke), "--format", format, home=home)
    assert done.returncode == 0
    for word in ("llama", "matrix math", "all_gather", "checkpoint", "layers", "measured"):
        assert word in done.stdout.lower(), word


def test_report_is_never_overwritten_unasked(smoke: Path, home: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    assert costlab("report", str(smoke), "-o", str(target), home=home).returncode == 0
    target.write_text("mine")
    refused = costlab("report", str(smoke), "-o", str(target), home=home)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert target.read_text() == "mine"
    assert costlab("report", str(smoke), "-o", str(target), "--force", home=home).returncode == 0
    assert target.read_text().startswith("#")


def test_tui_without_a_terminal_prints_the_report(smoke: Path, home: Path) -> None:
    done = costlab("tui", str(smoke), home=home)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "matrix math" in done.stdout
    bare = costlab("tui", home=home)
    assert bare.returncode == 2
    assert "costlab report" in bare.stderr


def test_runs_and_compare(smoke: Path, home: Path) -> None:
    assert smoke.name in costlab("runs", home=home).stdout
    assert costlab("runs", "--ids", home=home).stdout.splitlines()[0] == smoke.name
    same = costlab("compare", "last", str(smoke), "--format", "json", home=home)
    assert same.returncode == 0, same.stderr
    json.loads(same.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["report", "no-such-run"], 5, "no-such-run"),
        (["run", "--workload", "lama"], 2, "no workload 'lama'"),
        (["run", "--dtype", "fp8"], 2, "--dtype"),
        (["run", "--preset", "huge"], 2, "no preset 'huge'"),
        (["run", "--steps", "many"], 2, "steps"),
        (["tui", "--sample", "nothing"], 5, "nothing"),
        (["import", "/no/such/trace.json"], 5, "trace.json"),
    ],
)
def test_bad_input_is_one_line_and_a_documented_code(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    done = costlab(*arguments, home=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_users_own_file(tmp_path: Path) -> None:
    """The example of the README, as it stands there."""
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n# my_model.py\n", 1)[1].split("```", 1)[0]
    (tmp_path / "my_model.py").write_text(code)
    workload = f"{tmp_path / 'my_model.py'}:make"
    fast = ["--steps", "3", "--warmup", "1", "--profile-steps", "1", "--no-checkpoint"]
    options = ["--device", "cpu", "--ranks", "1", "--dtype", "fp32"]
    done = costlab("run", "-w", workload, *fast, *options, home=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(costlab("report", "last", "-f", "json", home=tmp_path).stdout)
    assert report["run"]["workload"] == "my_model"
    assert report["steps"]["throughput"]["value"] > 0
    assert report["steps"]["mfu"]["value"] > 0
    assert [g["name"] for g in report["compile"]["graphs"]]
    assert report["run"]["passed_over"] == {"Sequential": 1}
    assert report["fusion"]["rate"]["value"] > 0

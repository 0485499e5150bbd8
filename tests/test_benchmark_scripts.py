"""Benchmark scripts start where their own folder is not on the path, as under PYTHONSAFEPATH."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "benchmarks").glob("*_bench.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_script_finds_its_own_modules(script: Path) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='imported')"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_recorded_command_names_no_place_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS[0].parent))
    common = importlib.import_module("common")
    monkeypatch.setattr(sys, "argv", ["/srv/x_bench.py", "--out", "/tmp/a.json", "--ranks", "2", "results/b.json"])
    said = common.result("m", 1.0, "ms", n=1)["command"]
    assert said == "python tests/benchmarks/x_bench.py --out PLACE --ranks 2 results/b.json"

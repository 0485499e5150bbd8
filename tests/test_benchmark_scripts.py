"""Benchmark scripts start where their own folder is not on the path, as under PYTHONSAFEPATH."""

from __future__ import annotations

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

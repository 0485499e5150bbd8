"""Runs this folder's tests once more with the Triton kernels in the interpreter, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that run")
def test_kernels_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent),
        "-q",
        "-m",
        "not gpu",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) > 100, result.stdout[-500:]

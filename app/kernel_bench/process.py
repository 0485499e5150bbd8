"""Runs the kernels' benchmark in a process of its own, because it needs torch and may fail with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from costlab.probes.kernel_spec import RESULT_FILE, KernelBench, KernelSpec

MODULE = "costlab.probes.kernel_bench"


class BenchFailed(Exception):
    """The process ended without a result; the message holds its last words."""


def run(spec: KernelSpec, told: Callable[[str], None]) -> KernelBench:
    """Measure; `told` gets the name of each kernel as it begins. Raises BenchFailed.

    A process that dies on the way leaves what it had measured until then, which is returned.
    """
    with tempfile.TemporaryDirectory(prefix="costlab-") as folder:
        path, errors = Path(folder) / RESULT_FILE, Path(folder) / "errors.txt"
        command = [sys.executable, "-m", MODULE, str(path), msgspec.json.encode(spec).decode()]
        with errors.open("wb") as sink, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    told(line.decode("utf-8", "replace").strip())
            except KeyboardInterrupt:
                process.terminate()
                raise
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=KernelBench)
        words = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise BenchFailed(words[-1] if words else f"it ended with code {process.returncode}")

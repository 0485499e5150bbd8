"""Runs the kernels' benchmark in a process of its own, because it needs torch and may fail with it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from costlab.probes.child import ask, last_words
from costlab.probes.kernel_spec import RESULT_FILE, KernelBench, KernelSpec

MODULE = "costlab.probes.kernel_bench"


class BenchFailed(Exception):
    """The process ended without a result; the message holds its last words."""


def run(spec: KernelSpec, told: Callable[[str], None]) -> KernelBench:
    """Measure; `told` gets the name of each kernel as it begins. Raises BenchFailed.

    A process that dies on the way leaves what it had measured until then, which is returned.
    """
    with tempfile.TemporaryDirectory(prefix="costlab-") as folder:
        path = Path(folder) / RESULT_FILE
        command = [sys.executable, "-P", "-m", MODULE, str(path), msgspec.json.encode(spec).decode()]
        done = ask(command, told=told)
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=KernelBench)
        raise BenchFailed(last_words(done))

"""Runs the tests that need a GPU, and writes every failure down as it happens: a time limit then costs no report.

    python tests/benchmarks/gpu_tests.py OUT.txt [-n WORKERS] [PATH ...]

Without paths: the fusion truth set, then everything marked `gpu`. Exit code: pytest's, the worse of the two.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest


class Writer:
    """A pytest plugin: one line for each test that ended, the whole report of those that failed."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.monotonic()

    def write(self, text: str) -> None:
        """Append, so that what was written stays whatever comes."""
        with self.path.open("a", encoding="utf-8") as out:
            out.write(text + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called in the controlling process for each phase of each test."""
        if report.when == "call" or report.failed or report.skipped:
            self.write(f"{time.monotonic() - self.began:7.1f} s  {report.outcome:7} {report.nodeid}")
        if report.failed:
            self.write(report.longreprtext)
        elif report.skipped:
            self.write(f"           {report.longreprtext[-300:]}")


def run(paths: list[str], out: Path, workers: int, *more: str) -> int:
    """Pytest's exit code."""
    options = ["-q", "-p", "no:cacheprovider", "--dist", "loadgroup", "-n", str(workers), *more]
    return int(pytest.main([*options, *paths], plugins=[Writer(out)]))


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("-n", type=int, default=8)
    args = parser.parse_intermixed_args()
    root = Path(__file__).resolve().parents[1]
    if args.paths:
        return run(args.paths, args.out, args.n)
    truth = run([str(root / "fusion_truth")], args.out, args.n)
    return max(truth, run([str(root / "kernels"), str(root / "probes")], args.out, args.n, "-m", "gpu"))


if __name__ == "__main__":
    sys.exit(main())

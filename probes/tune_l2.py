"""L2 hit rate of every kernel of one replayed step, by NVIDIA's ncu in a process of its own. Torch-free.

ncu --metrics lts__t_sector_hit_rate.pct ... python -m costlab.probes.tune_step SPEC.json
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from costlab.probes.child import ChildCancelled, ask
from costlab.probes.spec import RunSpec
from costlab.probes.tune_records import CacheRow

METRIC = "lts__t_sector_hit_rate.pct"


class CountersUnavailable(Exception):
    """The hardware counters cannot be read here; the message says why."""


def measure(spec: RunSpec, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> list[CacheRow]:
    """Hit rates of one step of the workload. Raises CountersUnavailable."""
    tool = shutil.which("ncu")
    if tool is None:
        raise CountersUnavailable("ncu (NVIDIA Nsight Compute) is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="costlab-l2-") as folder:
        asked = Path(folder, "spec.json")
        asked.write_bytes(msgspec.json.encode(spec))
        command = [
            tool, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv",
            "--metrics", METRIC, sys.executable, "-m", "costlab.probes.tune_step", str(asked),
        ]  # fmt: skip
        try:
            done = ask(command, timeout_s=timeout_s, cancelled=cancelled)
        except subprocess.TimeoutExpired:
            raise CountersUnavailable(f"ncu took more than {timeout_s:.0f} s") from None
        except ChildCancelled:
            raise CountersUnavailable("cancelled") from None
        except OSError as error:
            raise CountersUnavailable(f"ncu cannot be started: {error.strerror}") from None
    rows = parse(done.stdout)
    if not rows:
        raise CountersUnavailable(reason(done.stdout + done.stderr))
    return rows


def reason(output: str) -> str:
    """Why ncu gave no figures, in its own words where it has some."""
    if "ERR_NVGPUCTRPERM" in output:
        return "the driver does not let this user read performance counters (ERR_NVGPUCTRPERM)"
    errors = [line for line in output.splitlines() if "==ERROR==" in line]
    return errors[0].replace("==ERROR==", "ncu:").strip()[:200] if errors else "ncu reported no kernels"


def parse(text: str) -> list[CacheRow]:
    """Kernel -> mean hit rate, from ncu's CSV; lines that are not CSV are passed over."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    sums: dict[str, tuple[float, int]] = {}
    for row in csv.DictReader(lines):
        name, metric, value = row.get("Kernel Name"), row.get("Metric Name"), row.get("Metric Value")
        if not name or metric != METRIC or value is None:
            continue
        try:
            rate = float(value.replace(",", "")) / 100
        except ValueError:
            continue
        if 0.0 <= rate <= 1.0:
            total, count = sums.get(short(name), (0.0, 0))
            sums[short(name)] = (total + rate, count + 1)
    return [CacheRow(kernel=name, hit_rate=total / count, launches=count) for name, (total, count) in sums.items()]


def short(name: str) -> str:
    """A kernel's name without its arguments."""
    return name.partition("(")[0].strip()

"""Runs a script under Nsight Compute, reads its CSV and joins it to the collector's kernels. No GPU needed to read."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
METRICS = (READ, WRITTEN, TIME)
TO_BASE = {
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "usecond": 1e3,
    "msecond": 1e6,
    "second": 1e9,
    "us": 1e3,
    "ms": 1e6,
}
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


class NcuError(RuntimeError):
    """Nsight Compute is missing, may not read counters, or failed; the message says which."""


def find_ncu() -> str:
    """Path of ncu. Raises NcuError where there is none."""
    found = shutil.which("ncu") or next((p for p in PLACES if Path(p).exists()), None)
    if found is None:
        raise NcuError("ncu (Nsight Compute) was not found: install it or put it on PATH; DRAM bytes are not measured")
    return found


def profile(script: list[str], log: Path, *, timeout_s: float) -> list[dict[str, Any]]:
    """Kernels of the script's profiler range in launch order: name, READ and WRITTEN in bytes, TIME in ns."""
    command = [find_ncu(), "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"]
    command += ["--target-processes", "application-only", "--kernel-name-base", "function", "-k", "regex:^triton_"]
    command += ["--csv", "--print-units", "base", "--metrics", ",".join(METRICS), "--log-file", str(log)]
    done = subprocess.run(
        [*command, sys.executable, *script], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text + done.stdout:
        raise NcuError("this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root or ask the admin")
    kernels = read_csv(text)
    if not kernels:
        tail = "; ".join((text + "\n" + done.stderr).strip().splitlines()[-4:])
        raise NcuError(f"ncu gave no kernels (exit code {done.returncode}): {tail[-600:]}")
    return kernels


def read_csv(text: str) -> list[dict[str, Any]]:
    """Kernels of an ncu CSV, one line a metric ("details") or one line a kernel ("raw"), whatever stands before it."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    return _long(rows) if rows and "Metric Name" in rows[0] else _wide(rows)


def _long(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            kernel[row["Metric Name"]] = _number(row["Metric Value"], row["Metric Unit"])
    return list(kernels.values())


def _wide(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    units = rows[0] if not rows[0]["ID"] else {}
    found = rows[1:] if units else rows
    return [
        {"name": r["Kernel Name"], **{m: _number(r[m], units.get(m, "")) for m in METRICS if r.get(m)}} for r in found
    ]


def _number(text: str, unit: str) -> float:
    return float(text.replace(",", "")) * TO_BASE.get(unit, 1.0)


def join(spans: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a line per modelled kernel that was launched, what did not fit): by name, n-th launch to n-th span."""
    queues: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
    for kernel in kernels:
        queues[kernel["name"]].append(kernel)
    joined, unseen = [], []
    for span in spans:
        launches = [queues[name].popleft() for name in span["names"] if queues[name]]
        if not launches:
            unseen.append(span["names"][0])
            continue
        joined.append(_line(span, launches))
    left = Counter({name: len(queue) for name, queue in queues.items() if queue})
    return joined, {"spans_not_launched": unseen, "launches_without_span": dict(left)}


def _line(span: dict[str, Any], launches: list[dict[str, Any]]) -> dict[str, Any]:
    read, written = (sum(k.get(m, 0.0) for k in launches) for m in (READ, WRITTEN))
    ns = sum(k.get(TIME, 0.0) for k in launches)
    modelled = span["read"] + span["written"]
    return {
        "name": span["names"][0],
        "launches": len(launches),
        "kind": span["kind"],
        "phase": span["phase"],
        "layer": span["layer"],
        "modelled": modelled,
        "modelled_read": span["read"],
        "modelled_written": span["written"],
        "measured": read + written,
        "measured_read": read,
        "measured_written": written,
        "ratio": modelled / (read + written) if read + written else None,
        "us": ns / 1e3,
        "gbps": (read + written) / ns if ns else None,
    }

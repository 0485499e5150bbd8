"""The GPU benchmark's script at tiny sizes on gloo: it must not fail for the first time on a rented machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "schedules_bench.py"


def test_it_runs_on_gloo(tmp_path: Path) -> None:
    out = tmp_path / "schedules.json"
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--quick", "--samples", "1", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("RANK", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    document = json.loads(out.read_text())
    rows = {row["metric"]: row for row in document["results"]}
    assert {"allreduce_vs_nccl_worst", "allreduce_vs_nccl_1mb", "ddp_step_planned"} <= set(rows)
    assert rows["ddp_step_hook_library"]["ratio"] > 0
    assert len(rows["allreduce_host_1_MiB"]["alone_us"]) == len(rows["allreduce_host_1_MiB"]["new_tensors_us"]) == 2
    assert set(document["environment"]["noise"]) == {"65536", "1048576", "4194304"}
    assert rows["ddp_gradient_difference"]["value"] <= 1
    assert rows["ddp_gradients_same_bits_on_all_ranks"]["value"] == 1
    assert rows["missing_peer_noticed"]["error"].startswith("ScheduleTimeout")
    assert 4 < rows["missing_peer_noticed"]["value"] < 20
    assert all("needs CUDA" in reason for reason in document["environment"]["symmetric_memory"].values())

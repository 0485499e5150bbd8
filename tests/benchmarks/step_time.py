"""Is costlab's step time the one a hand-written loop has? The same model, trained by a plain script on as many GPUs.

    python tests/benchmarks/step_time.py RUN_DIR [RESULTS_FOLDER]
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/step_time.py RUN_DIR [RESULTS_FOLDER]
where RUN_DIR is a finished `costlab run --preset 1b` of the same machine on one rank, or on as many as torchrun starts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from costlab.probes.workloads import llama

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, result, save

STEPS = 20
WARMUP = 8


def hand_written(size: str, batch: int, seq: int, dtype: str) -> list[float]:
    """Step times in ms of the loop a person would write: FSDP2, per-block compile, AdamW, bf16; the slowest rank's."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    config = llama.SIZES[size]
    with device:
        model = llama.Llama(config, seq)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if dtype == "bf16" else {}
    for layer in model.layers:
        layer.compile()
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, config.vocab, (batch, seq + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARMUP + STEPS + 1)]
    marks[0].record()
    for i in range(WARMUP + STEPS):
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks[i + 1].record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in pairwise(marks)][WARMUP:], device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    slowest: list[float] = times.tolist()
    dist.destroy_process_group()
    return slowest


def reported(run: Path) -> dict[str, object]:
    """costlab's own report of the run."""
    command = [sys.executable, "-m", "costlab.app", "report", str(run), "--format", "json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Compare and save `step_time.json`."""
    run = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    report = reported(run)
    spec = report["run"]["spec"]  # type: ignore[index]
    size = llama.SIZES[spec["size"]]
    batch, seq = spec["batch"] or size.batch, spec["seq"] or size.seq
    times = hand_written(spec["size"], batch, seq, spec["dtype"])
    if os.environ["RANK"] != "0":
        return
    own = report["steps"]["step_ms"]["value"]  # type: ignore[index]
    seconds = report["run"]["duration_s"]  # type: ignore[index]
    peer = statistics.median(times)
    waterfall = report["waterfall"]
    total = sum(p["ms"] for p in waterfall["parts"])  # type: ignore[index]
    ranks = int(os.environ["WORLD_SIZE"])
    launch = f"torchrun --standalone --nproc-per-node {ranks}" if ranks > 1 else "python"
    command = f"costlab run --preset 1b --ranks {ranks}; {launch} tests/benchmarks/step_time.py RUN"
    named = "" if ranks == 1 else f"_x{ranks}"
    results = [
        result(f"step_time{named}", own, "ms", peer="hand-written loop", peer_value=peer, n=STEPS, command=command),
        result(
            f"waterfall_sum{named}",
            total,
            "ms",
            peer="step time",
            peer_value=waterfall["step_ms"],  # type: ignore[index]
            n=spec["profile_steps"],
            command=command,
        ),
        result(f"run_seconds{named}", seconds, "s", peer="bound", peer_value=120.0, n=1, command=command),
    ]
    path = save(f"step_time{named}", report["environment"], results, folder)  # type: ignore[arg-type]
    print(path.read_text())


if __name__ == "__main__":
    main()

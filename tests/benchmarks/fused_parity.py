"""Does training with fused kernels go as it did without, quicker and in less memory? Llama-1b on one GPU.

    python tests/benchmarks/fused_parity.py [--steps 200] [--size 1b] [--seeds 0 1] [--out FILE]

Every run is a process of its own; plain and fused alternate (plain, fused, plain, fused), one pair a seed, both by the
wrapping that `costlab run --compile block` uses: FSDP2, per-block torch.compile, bf16, fused AdamW. Step times are
CUDA-event times of the last quarter of the steps, memory is the peak over all steps after the first eight. The learning
rate rises linearly to 1e-4 over the first 100 steps: at a full rate from the first step AdamW's path is chaotic, and
runs of one seed part within ten steps whatever computes them. The loss of every step is kept. Parity: the difference
between fused and plain of one seed, as root mean square over the steps, against the difference of the plain runs' two
seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, result

WARM = 8
RATE, RISE = 1e-4, 100
COMMAND = "python tests/benchmarks/fused_parity.py"


def train(size: str, fused: bool, seed: int, steps: int) -> dict[str, Any]:
    """Losses, step times in ms and memory in bytes of one run, in this process."""
    import torch
    import torch.distributed as dist

    from costlab.kernels.fused import registry
    from costlab.probes.parallel import make_optimizer, wrap
    from costlab.probes.spec import RunSpec
    from costlab.probes.workloads import llama
    from costlab.probes.workloads.base import WorkloadContext

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    spec = RunSpec(size=size, compile="block", dtype="bf16", fused=fused, seed=seed)
    workload = llama.make(WorkloadContext(device, torch.bfloat16, size, 0, 0, seed, 0, 1))
    found, notes = [], []
    if fused:
        found = registry.apply(workload.model, findings=notes)
        loss = registry.fused_loss(workload.model, workload.loss, workload.batch(0), notes)
        workload.loss = loss or workload.loss
        found += ["linear_cross_entropy: loss"] if loss else []
    wrapped = wrap(workload.model, workload.blocks, spec, device, workload.dynamic)
    optimizer = make_optimizer(wrapped, spec)
    losses, marks, memory = [], [], {"parameters": _allocated(cuda)}
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (i + 1) / RISE)
        if i == WARM and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        loss = workload.loss(wrapped.model, workload.batch(i))
        if i == WARM:
            memory |= {"after forward": _allocated(cuda), "peak of forward": _peak(cuda)}
        loss.backward()
        if i == WARM:
            memory |= {"after backward": _allocated(cuda), "peak to backward": _peak(cuda)}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if i == WARM:
            memory |= {"between steps": _allocated(cuda)}
    memory["peak"] = _peak(cuda)
    if cuda:
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    dist.destroy_process_group()
    environment = {
        "gpus": [{"name": torch.cuda.get_device_name()}] if cuda else [],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    return {
        "losses": [float(value) for value in losses],
        "times": times,
        "memory": memory,
        "kernels": {name: sum(f.startswith(f"{name}:") for f in found) for name in registry.KERNELS},
        "notes": notes,
        "environment": environment,
    }


def _allocated(cuda: bool) -> int:
    import torch

    return torch.cuda.memory_allocated() if cuda else 0


def _peak(cuda: bool) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if cuda else 0


def run_child(options: argparse.Namespace, fused: bool, seed: int, port: int) -> dict[str, Any]:
    """One run in a fresh process. Raises RuntimeError with its last words if it fails."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--child", "fused" if fused else "plain", "--seeds", str(seed)]
        command += ["--size", options.size, "--steps", str(options.steps), "--out", str(path)]
        done = subprocess.run(command, env={**os.environ, **one_rank}, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise RuntimeError(f"{'fused' if fused else 'plain'} seed {seed} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def rms(a: list[float], b: list[float]) -> float:
    """Root mean square of the differences."""
    return statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def last(run: dict[str, Any]) -> float | None:
    """Median step time of the last quarter."""
    times = run["times"]
    return statistics.median(times[-max(len(times) // 4, 1) :]) if times else None


def judged(runs: dict[str, dict[int, dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """The metrics of what has run so far."""
    rows = []
    pairs = [s for s in runs["fused"] if s in runs["plain"]]
    ours = [t for s in pairs if (t := last(runs["fused"][s])) is not None]
    theirs = [t for s in pairs if (t := last(runs["plain"][s])) is not None]
    common: dict[str, Any] = {"command": COMMAND, "peer": "plain, alternating"}
    if ours and theirs:
        mine, peer = statistics.median(ours), statistics.median(theirs)
        more = {"runs": ours, "peer_runs": theirs, "n": (steps // 4) * len(ours)}
        rows.append(result("llama1b_fused_speedup", mine, "ms", peer_value=peer, ratio=peer / mine, **more, **common))
        peaks = [max(runs[kind][s]["memory"]["peak"] for s in pairs) / 1e9 for kind in ("fused", "plain")]
        ratio = peaks[0] / peaks[1]
        rows.append(
            result("llama1b_fused_memory", peaks[0], "GB", peer_value=peaks[1], ratio=ratio, n=len(ours), **common)
        )
    if len(pairs) >= 2:
        plain = [runs["plain"][s]["losses"] for s in pairs[:2]]
        spread = rms(*plain)
        for s in pairs:
            same = rms(runs["fused"][s]["losses"], runs["plain"][s]["losses"])
            ends = {kind: statistics.fmean(runs[kind][s]["losses"][-20:]) for kind in ("fused", "plain")}
            common["peer"] = "two plain seeds' own difference"
            more = {"n": steps, "seed": s, "last_20": ends, "equal": same <= spread}
            name = f"llama1b_fused_loss_difference, seed {s}"
            rows.append(
                result(
                    name,
                    same,
                    "nats (rms)",
                    peer_value=spread,
                    ratio=same / spread if spread else None,
                    **more,
                    **common,
                )
            )
    return rows


def main() -> int:
    """Run the pairs; results are written after each run. The exit status is 1 if a run failed or the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=RESULTS / "fused_step.json")
    parser.add_argument("--child", choices=("plain", "fused"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.out.write_text(
            json.dumps(train(options.size, options.child == "fused", options.seeds[0], options.steps))
        )
        return 0
    runs: dict[str, dict[int, dict[str, Any]]] = {"plain": {}, "fused": {}}
    errors: list[str] = []
    rows: list[dict[str, Any]] = []
    for i, seed in enumerate(options.seeds):
        for j, kind in enumerate(runs):
            try:
                run = runs[kind][seed] = run_child(options, kind == "fused", seed, 29600 + 2 * i + j)
            except RuntimeError as error:
                errors.append(str(error))
                print(error, flush=True)
                continue
            memory = {name: f"{value / 1e9:.2f} GB" for name, value in run["memory"].items()}
            median = last(run)
            shown = "no GPU" if median is None else f"{median:.2f} ms"
            print(f"{kind} seed {seed}: {shown}, loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, {memory}")
            print(f"    {run['kernels']} {run['notes']}", flush=True)
            rows = judged(runs, options.steps)
            curves = {k: {str(s): r["losses"] for s, r in of.items()} for k, of in runs.items()}
            memories = {k: {str(s): r["memory"] for s, r in of.items()} for k, of in runs.items()}
            environment = {**run["environment"], "errors": errors, "losses": curves, "memory": memories}
            options.out.write_text(json.dumps({"environment": environment, "results": rows}, indent=1) + "\n")
    for row in rows:
        peer = f"{row['peer']} {row['peer_value']:.4g}"
        print(f"{row['metric']:44s} {row['value']:.4g} {row['unit']}  {peer}  {row['ratio']}")
    return 1 if errors or not all(row.get("equal", True) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

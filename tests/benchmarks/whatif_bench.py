"""How often the what-if engine is wrong, measured with real legs: writes results/whatif.json.

`python tests/benchmarks/whatif_bench.py --trials 40 --rounds 3` runs one long what-if of six arms (baseline, its
control, an identical variant, and variants slowed down by exactly 3, 5 and 10 %), every leg a process group of its own,
and cuts its rounds into trials. By default trials share no leg; `--stride 1` lets neighbouring trials overlap, which
needs fewer legs and gives the same expectation with a larger error. `--workers N` runs N such what-ifs at once on CPUs
of their own. An end by `--minutes` keeps what is complete.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from costlab.app.whatif import events, stats
from costlab.app.whatif.engine import WhatIf
from costlab.app.whatif.results import LegRecord, WhatIfResult
from costlab.app.whatif.spec import CONTROL, Variant, WhatIfSpec
from costlab.probes.spec import RunSpec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, result, save

WORKLOAD = Path(__file__).with_name("whatif_workload.py")
SHARES = {"same": 0.0, "plus3": 0.03, "plus5": 0.05, "plus10": 0.10}


def question(args: argparse.Namespace) -> WhatIfSpec:
    """The one what-if that all trials are cut from."""
    rounds = args.rounds + (args.trials - 1) * args.stride
    baseline = RunSpec(
        workload=f"{WORKLOAD}:make",
        size="none",
        ranks=1,
        device=args.device,
        compile="none",
        dtype="fp32",
        steps=args.steps,
        warmup=1,
        profile_steps=0,
        checkpoint=False,
    )
    variants = [Variant(name=name, options={"size": name}) for name in SHARES]
    return WhatIfSpec(baseline=baseline, variants=variants, legs=rounds)


def measure(spec: WhatIfSpec, minutes: float | None) -> WhatIfResult:
    """All legs, or those that are complete after `minutes`."""
    with tempfile.TemporaryDirectory(prefix="costlab-whatif-bench-") as folder:
        engine = WhatIf(spec, Path(folder))
        timer = threading.Timer((minutes or 0) * 60, engine.cancel)
        timer.daemon = True
        if minutes is not None:
            timer.start()
        try:
            return engine.run(say)
        finally:
            timer.cancel()


def say(event: events.WhatIfEvent) -> None:
    """One line a leg."""
    if isinstance(event, events.LegEnded):
        leg = event.record
        print(
            f"round {leg.round + 1:3d}  {leg.arm:12}  {leg.step_ms or math.nan:8.2f} ms  {leg.seconds:5.1f} s",
            flush=True,
        )


def trials(legs: Sequence[LegRecord], rounds: int, stride: int) -> list[list[Mapping[str, float]]]:
    """Rounds of log times, cut into trials."""
    found: dict[int, dict[str, float]] = {}
    for leg in legs:
        if leg.status == "complete" and leg.step_ms:
            found.setdefault(leg.round, {})[leg.arm] = math.log(leg.step_ms)
    whole = stats.complete_rounds([found[r] for r in sorted(found)], list(SHARES))
    return [whole[k : k + rounds] for k in range(0, len(whole) - rounds + 1, stride)]


def figures(cut: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Share called different by arm, and share of all intervals that hold the truth."""
    called, covered, noise = dict.fromkeys(SHARES, 0), 0, []
    for rounds in cut:
        control = stats.effect(rounds, CONTROL)
        for name, truth in SHARES.items():
            estimate = stats.effect(rounds, name)
            assert estimate is not None
            called[name] += stats.decide(estimate, control) != "no difference"
            covered += estimate.low <= truth <= estimate.high
            noise.append(estimate.noise)
    n = len(cut)
    return {name: count / n for name, count in called.items()} | {
        "coverage": covered / (n * len(SHARES)),
        "noise": sum(noise) / len(noise),
    }


def lines(found: dict[str, float], n: int, more: dict[str, Any]) -> list[dict[str, Any]]:
    """The result file's lines."""
    detect = [(f"whatif_detect_{k}pct", found[f"plus{k}"], "required", 0.95) for k in (3, 5, 10)]
    rows = [
        ("whatif_aa_false_alarm", found["same"], "allowed at most", 0.05),
        *detect,
        ("whatif_interval_coverage", found["coverage"], "required", 0.90),
    ]
    return [
        result(metric, value, "fraction", peer=peer, peer_value=bound, n=n * (4 if "coverage" in metric else 1), **more)
        for metric, value, peer, bound in rows
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of one trial: legs of each arm")
    parser.add_argument("--stride", type=int, default=0, help="rounds between the beginnings of two trials")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dump", type=Path, default=None, help=argparse.SUPPRESS)  # a worker's result
    args = parser.parse_args()
    args.stride = args.stride or args.rounds
    return args


def in_workers(args: argparse.Namespace) -> list[WhatIfResult]:
    """The trials divided among processes that each have their share of the CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // args.workers
    if not each:
        raise SystemExit(f"{args.workers} workers are more than {len(cpus)} CPUs")
    with tempfile.TemporaryDirectory(prefix="costlab-whatif-bench-") as folder:
        files = [Path(folder) / f"{n}.json" for n in range(args.workers)]
        children = []
        for n, file in enumerate(files):
            share = args.trials // args.workers + (n < args.trials % args.workers)
            command = [sys.executable, __file__, f"--trials={share}", f"--rounds={args.rounds}", f"--dump={file}"]
            command += [f"--stride={args.stride}", f"--steps={args.steps}", f"--device={args.device}"]
            command += [] if args.minutes is None else [f"--minutes={args.minutes}"]
            own = cpus[n * each : (n + 1) * each]
            pinned = ["taskset", "--cpu-list", ",".join(map(str, own)), *command]
            children.append(subprocess.Popen(pinned, env=os.environ | {"OMP_NUM_THREADS": str(each)}))
        failed = [c.returncode for c in children if c.wait()]
        if failed:
            raise SystemExit(f"{len(failed)} workers failed")
        return [msgspec.json.decode(file.read_bytes(), type=WhatIfResult) for file in files]


def main() -> None:
    """Measure, print, write."""
    args = options()
    if args.dump is not None:
        args.dump.write_bytes(msgspec.json.encode(measure(question(args), args.minutes)))
        return
    measured = in_workers(args) if args.workers > 1 else [measure(question(args), args.minutes)]
    cut = [trial for one in measured for trial in trials(one.legs, args.rounds, args.stride)]
    if not cut:
        raise SystemExit("not one trial was complete: allow more --minutes")
    found = figures(cut)
    more = {
        "rounds_per_trial": args.rounds,
        "stride": args.stride,
        "workers": args.workers,
        "legs": sum(len(one.legs) for one in measured),
        "leg_noise": found["noise"],
        "seconds": max(one.seconds for one in measured),
    }
    results = lines(found, len(cut), more)
    print(save("whatif", msgspec.to_builtins(measured[0].environment), results, args.out))
    for row in results:
        print(f"{row['metric']:28} {row['value']:.3f}  ({row['peer']} {row['peer_value']}, n={row['n']})")


if __name__ == "__main__":
    main()

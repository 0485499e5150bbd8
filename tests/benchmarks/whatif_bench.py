"""How often the what-if engine is wrong, measured with real legs: writes results/whatif.json after every trial.

`python tests/benchmarks/whatif_bench.py --trials 40` measures, in each trial, six arms: a baseline, its control, an
identical variant, and variants slowed down by exactly 3, 5 and 10 % by a real wait. Two ways to get the legs:

`--legs engine` (the default on CPU) runs one long what-if with the product's engine, every leg a process group that
the engine starts, and cuts its rounds into trials that share no leg.

`--legs forked` (the default on CUDA, see whatif_forked.py) makes every leg a fork of a process that has imported torch:
own device context, model and memory, timed by the product's step timing and judged by its statistics, but prepared side
by side with the other legs of its trial. A leg of the engine takes seconds to start, 960 of them an hour. With
`--stride 2` trials of 4 rounds begin every 2 rounds, so that neighbours share half of their legs: half the legs for the
same expectation, at a larger error than that of as many separate trials. Each trial leaves out disturbed rounds as the
engine does, but does not measure them again.

`--workers N` divides the trials among N processes at once, each on CPUs of its own and, on CUDA, a GPU of its own. An
end by `--seconds` keeps the trials that are complete.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
Trial = Sequence[Mapping[str, float]]  # rounds of log times by arm


def question(args: argparse.Namespace) -> WhatIfSpec:
    """The one what-if that all trials are cut from."""
    baseline = RunSpec(
        workload=f"{WORKLOAD}:make",
        size="none",
        ranks=1,
        device=args.device,
        compile="none",
        dtype="fp32",
        steps=args.steps,
        warmup=args.warmup,
        profile_steps=0,
        checkpoint=False,
    )
    variants = [Variant(name=name, options={"size": name}) for name in SHARES]
    return WhatIfSpec(baseline=baseline, variants=variants, legs=args.rounds * args.trials)


def measure(spec: WhatIfSpec, seconds: float | None) -> WhatIfResult:
    """All legs, or those that are complete after `seconds`."""
    with tempfile.TemporaryDirectory(prefix="costlab-whatif-bench-") as folder:
        engine = WhatIf(spec, Path(folder))
        timer = threading.Timer(seconds or 0, engine.cancel)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            return engine.run(say)
        finally:
            timer.cancel()


def say(event: events.WhatIfEvent) -> None:
    """One line a leg."""
    if isinstance(event, events.LegEnded):
        leg = event.record
        ms = leg.step_ms or math.nan
        print(f"round {leg.round + 1:3d}  {leg.arm:12}  {ms:8.2f} ms  {leg.seconds:5.1f} s  {leg.failure}", flush=True)


def trials(legs: Sequence[LegRecord], rounds: int) -> list[Trial]:
    """Rounds of log times, cut into trials that share no leg."""
    found: dict[int, dict[str, float]] = {}
    for leg in legs:
        if leg.status == "complete" and leg.step_ms:
            found.setdefault(leg.round, {})[leg.arm] = math.log(leg.step_ms)
    whole = stats.complete_rounds([found[r] for r in sorted(found)], list(SHARES))
    return windows(whole, rounds, rounds)


def figures(cut: Sequence[Trial]) -> dict[str, float]:
    """Share called different by arm, and share of all intervals that hold the truth."""
    called, covered, noise = dict.fromkeys(SHARES, 0), 0, []
    for rounds in cut:
        quiet = stats.undisturbed(rounds)
        control = stats.effect(quiet, CONTROL)
        for name, truth in SHARES.items():
            estimate = stats.effect(quiet, name)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of one trial: legs of each arm")
    parser.add_argument("--stride", type=int, default=0, help="rounds between two trials' begins; forked legs only")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--legs", choices=["engine", "forked"], default=None)
    parser.add_argument("--seconds", type=float, default=None, help="no new trial after this time")
    parser.add_argument("--workers", type=int, default=1, help="what-ifs at once")
    parser.add_argument("--threads", type=int, default=1, help="of a forked leg on CPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "whatif.json")
    parser.add_argument("--dump", type=Path, default=None, help=argparse.SUPPRESS)  # a worker's trials
    args = parser.parse_args()
    args.legs = args.legs or ("forked" if args.device == "cuda" else "engine")
    return args


def in_workers(args: argparse.Namespace) -> Iterator[list[Trial]]:
    """The trials, at once, of processes that each have their share of the CPUs and, on CUDA, a GPU."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // args.workers
    if not each:
        raise SystemExit(f"{args.workers} workers are more than {len(cpus)} CPUs")
    with tempfile.TemporaryDirectory(prefix="costlab-whatif-bench-") as folder:
        files = [Path(folder) / f"{n}.json" for n in range(args.workers)]
        children = []
        for n, file in enumerate(files):
            share = args.trials // args.workers + (n < args.trials % args.workers)
            command = [sys.executable, __file__, f"--trials={share}", f"--dump={file}"]
            passed = ("rounds", "stride", "steps", "warmup", "device", "legs", "threads", "seconds")
            command += [f"--{name}={value}" for name in passed if (value := getattr(args, name)) is not None]
            own = cpus[n * each : (n + 1) * each]
            pinned = ["taskset", "--cpu-list", ",".join(map(str, own)), *command]
            env = {"OMP_NUM_THREADS": str(each)} | ({"CUDA_VISIBLE_DEVICES": str(n)} if args.device == "cuda" else {})
            children.append(subprocess.Popen(pinned, env=os.environ | env))
        failed = [c.returncode for c in children if c.wait()]
        done: list[Trial] = [t for file in files if file.exists() for t in msgspec.json.decode(file.read_bytes())]
        if not done:
            raise SystemExit(f"all {len(failed)} workers failed")
        yield done


def by_engine(args: argparse.Namespace) -> Iterator[list[Trial]]:
    """All trials of the engine's legs, at once."""
    yield trials(measure(question(args), args.seconds).legs, args.rounds)


def by_forks(args: argparse.Namespace) -> Iterator[list[Trial]]:
    """The trials so far, after each; one in which a leg failed is left out and said."""
    from whatif_forked import LegError, Recipe, preload, trial

    preload()
    at_once = len(os.sched_getaffinity(0))
    recipe = Recipe(WORKLOAD, args.device, args.steps, args.warmup, args.threads)
    stride = args.stride or args.rounds
    stream: list[Mapping[str, float]] = []
    number = 0
    while len(stream) < args.rounds + (args.trials - 1) * stride:
        began, wanted = time.monotonic(), stride if stream else args.rounds
        number += 1
        try:
            measured = trial(recipe, list(SHARES), wanted, seed=1000 * number, at_once=at_once)
        except LegError as error:
            print(f"batch {number}: {error}", flush=True)
            continue
        stream += measured.rounds
        yield windows(stream, args.rounds, stride)
        last = stats.undisturbed(stream[-args.rounds :])
        changes = {name: stats.effect(last, name) for name in SHARES}
        said = [f"{name} {100 * e.change:+6.2f} ±{100 * e.half_width:.2f} %" for name, e in changes.items() if e]
        cost = f"{measured.prepared_s:.1f} + {time.monotonic() - began - measured.prepared_s:.1f} s"
        print(f"{number:2d}  {'  '.join(said)}  {args.rounds - len(last)} out  {cost}", flush=True)


def windows(stream: Trial, rounds: int, stride: int) -> list[Trial]:
    """Trials of `rounds` rounds that begin every `stride` rounds."""
    return [stream[k : k + rounds] for k in range(0, len(stream) - rounds + 1, stride)]


def environment(device: str) -> dict[str, Any]:
    """Hardware and software, asked for by a process of its own: this one must not touch the device."""
    code = (
        "import sys, msgspec, torch; from costlab.probes.environment import environment;"
        "d = torch.device(sys.argv[1]);"
        "print(msgspec.json.encode(environment(d, 'none')).decode())"
    )
    command = [sys.executable, "-P", "-c", code, "cuda:0" if device == "cuda" else "cpu"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"device": device}
    return msgspec.json.decode(found.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Measure, print, write."""
    args = options()
    began = time.monotonic()
    about = {} if args.dump else environment(args.device)
    rows: list[dict[str, Any]] = []
    own = by_forks if args.legs == "forked" else by_engine
    for cut in in_workers(args) if args.workers > 1 else own(args):
        seconds = time.monotonic() - began
        if args.dump is not None:
            args.dump.write_bytes(msgspec.json.encode(cut))
        elif cut:
            more = {"legs_by": args.legs, "rounds_per_trial": args.rounds, "seconds": seconds}
            more |= {"workers": args.workers, "stride": args.stride or args.rounds}
            found = figures(cut)
            rows = lines(found, len(cut), more | {"leg_noise": found["noise"]})
            save(args.out.stem, about, rows, args.out.parent)
        if args.seconds is not None and seconds > args.seconds:
            break
    if args.dump is not None:
        return
    if not rows:
        raise SystemExit("not one trial was complete: allow more --seconds, or see the failures above")
    for row in rows:
        print(f"{row['metric']:28} {row['value']:.3f}  ({row['peer']} {row['peer_value']}, n={row['n']})")
    print(f"noise of a leg {100 * rows[0]['leg_noise']:.2f} %, {rows[0]['seconds']:.0f} s")


if __name__ == "__main__":
    main()

"""What of issue-sized promises of the fusion trace holds on one GPU: span coverage, and DRAM bytes against ncu.

    python tests/benchmarks/fusion_gpu_bench.py --out FILE.json --part coverage|dram

`coverage`: llama-1b, gpt2 and resnet50, compiled per block and whole, through the command line. `dram`: one block of
each, forward and backward, under Nsight Compute. Results are written after each model, so a late failure loses nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import result
from fusion_coverage import coverage
from fusion_ncu import NcuError, find_ncu, join, profile

PRESETS = {"llama-1b": "1b", "gpt2": "gpt2", "resnet50": "resnet50"}
RUN = ["--ranks", "1", "--no-checkpoint", "--steps", "3", "--warmup", "2", "--profile-steps", "2", "--quiet"]
BAR = 0.98
WITHIN = 0.10
WITHIN_BAR = 0.90
# Below ten times the L2 cache, what a kernel wrote may still lie there when it ends, and DRAM has not seen it.
FLOOR_OF_L2 = 10
MEMORY_BOUND = 0.5  # of the copy ceiling: a kernel slower than this waits for something else


def command_line(*arguments: str, timeout_s: float) -> str:
    """Run one costlab command; its last line of output. Raises RuntimeError with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "costlab.app", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(done.stderr.split()[-60:])}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def cover(name: str, mode: str, work: Path) -> dict[str, Any]:
    """Run one preset in one mode and count what its spans cover."""
    run = work / f"{name}-{mode}"
    arguments = ["run", "--preset", PRESETS[name], "--compile", mode, *RUN]
    command_line(*arguments, "--out", str(run), timeout_s=170)
    found = coverage(run)
    command = "costlab " + " ".join(arguments) + "; spans against the raw Kineto trace"
    value = found.pop("value")
    metric = f"span_coverage ({name}, compile {mode})"
    return result(metric, value, "fraction", peer="bar", peer_value=BAR, n=found["steps"], command=command, **found)


def dram(block: str, work: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Joined kernels of one block, and what did not join."""
    spans = work / f"{block}.spans.json"
    script = str(Path(__file__).resolve().parent / "fusion_dram_step.py")
    kernels = profile([script, block, str(spans)], work / f"{block}.csv", timeout_s=150)
    lines, odd = join(json.loads(spans.read_text(encoding="utf-8")), kernels)
    return [{"block": block, **line} for line in lines], odd


def device_facts() -> tuple[float, int]:
    """(copy ceiling in GB/s, bytes of L2 cache)."""
    import torch

    from costlab.probes.ceilings import copy_gbps

    device = torch.device("cuda", 0)
    return copy_gbps(device)[0], int(torch.cuda.get_device_properties(device).L2_cache_size)


def judged(lines: list[dict[str, Any]], copy_gbps: float, l2: int) -> list[dict[str, Any]]:
    """Each kernel with whether it is large enough and memory-bound, and whether the model is within a tenth."""
    for line in lines:
        line["large"] = line["modelled"] >= FLOOR_OF_L2 * l2
        line["memory_bound"] = line["gbps"] is not None and line["gbps"] >= MEMORY_BOUND * copy_gbps
        line["within"] = line["ratio"] is not None and abs(line["ratio"] - 1) <= WITHIN
    return lines


def dram_results(lines: list[dict[str, Any]], odd: dict[str, Any], facts: tuple[float, int]) -> list[dict[str, Any]]:
    """The share within a tenth: of large memory-bound kernels, and, with less meaning, of all."""
    lines = judged(lines, *facts)
    bound = [x for x in lines if x["memory_bound"] and x["large"]]
    command = "python tests/benchmarks/fusion_gpu_bench.py --part dram --out FILE"
    about = {"copy_gbps": facts[0], "l2_bytes": facts[1], "floor_bytes": FLOOR_OF_L2 * facts[1]}
    rows = []
    for metric, chosen, peer, bar in (
        ("dram_bytes_within_10pct", bound, "bar", WITHIN_BAR),
        ("dram_bytes_within_10pct (memory-bound, any size)", [x for x in lines if x["memory_bound"]], "", None),
        ("dram_bytes_within_10pct (all generated kernels)", lines, "", None),
    ):
        if chosen:
            share = sum(x["within"] for x in chosen) / len(chosen)
            rows.append(
                result(metric, share, "fraction", peer=peer, peer_value=bar, n=len(chosen), command=command, **about)
            )
    total = sum(x["measured"] for x in lines)
    if total:
        ratio = sum(x["modelled"] for x in lines) / total
        rows.append(result("dram_bytes_modelled_of_measured", ratio, "ratio", n=len(lines), command=command))
    if rows:
        rows[0] |= {"kernels": sorted(lines, key=lambda x: -x["measured"]), "not_joined": odd}
    return rows


def environment() -> dict[str, Any]:
    """The machine as costlab records it."""
    import msgspec
    import torch

    from costlab.probes.environment import environment as facts

    found: dict[str, Any] = msgspec.to_builtins(facts(torch.device("cuda", 0), "none"))
    found.pop("git", None)
    return found


class Report:
    """Results so far, written after each addition."""

    def __init__(self, out: Path) -> None:
        self.out, self.results, self.problems = out, [], []  # type: Path, list[dict[str, Any]], list[str]
        self.environment: dict[str, Any] = {}

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep rows; one of the same metric replaces the one before."""
        fresh = {r["metric"] for r in rows}
        self.results = [r for r in self.results if r["metric"] not in fresh] + rows
        self.write()

    def fail(self, what: str, error: Exception) -> None:
        """Keep what went wrong."""
        self.problems.append(f"{what}: {type(error).__name__}: {error}")
        print(self.problems[-1], file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """The file as it is now."""
        content = {"environment": {**self.environment, "problems": self.problems}, "results": self.results}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """Metric, value, bar."""
        lines = [
            f"{r['metric']:58} {r['value']:.4f} {r['peer']} {r['peer_value'] or ''} n={r['n']}" for r in self.results
        ]
        return "\n".join([*lines, *self.problems])


def run_coverage(report: Report, work: Path, models: list[str], modes: list[str]) -> None:
    """Every model in every mode."""
    for mode in modes:
        for name in models:
            began = time.monotonic()
            try:
                report.add([cover(name, mode, work)])
            except Exception as error:
                report.fail(f"{name}, compile {mode}", error)
            print(f"{name}, compile {mode}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def run_dram(report: Report, work: Path, blocks: list[str]) -> None:
    """Every block under ncu."""
    find_ncu()
    facts = device_facts()
    lines: list[dict[str, Any]] = []
    odd: dict[str, Any] = {}
    for block in blocks:
        began = time.monotonic()
        try:
            found, odd[block] = dram(block, work)
            lines += found
            report.add(dram_results(lines, odd, facts))
        except Exception as error:
            report.fail(f"{block} under ncu", error)
        print(f"{block} under ncu: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("coverage", "dram"), required=True)
    parser.add_argument("--models", default="", help="comma separated; default: all")
    parser.add_argument("--modes", default="block,model")
    parser.add_argument("--keep", type=Path, help="folder for the recorded runs; default: a temporary one")
    return parser.parse_args()


def main() -> int:
    """Run one part; 1 if anything failed."""
    options = arguments()
    report = Report(options.out)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        report.environment = environment()
        models = [m for m in options.models.split(",") if m]
        try:
            if options.part == "coverage":
                run_coverage(report, work, models or list(PRESETS), options.modes.split(","))
            else:
                run_dram(report, work, models or ["llama", "gpt2", "resnet50"])
        except NcuError as error:
            report.fail("dram", error)
    print(report.table())
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

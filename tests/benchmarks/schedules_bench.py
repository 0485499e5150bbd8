"""Planned all-reduces against the library's own on the GPUs of one host; two or more, about a minute on two H200.

    python tests/benchmarks/schedules_bench.py [--ranks 2] [--quick] [--out FILE.json] [--limit 110]

Every available plan is timed first, all plans of a size in turn; from those curves the planner chooses; choice and
library are then timed again in turn, so that picking the fastest of noisy samples does not flatter the choice. On a GPU
calls follow each other between two events, 3 ms of them or two, so that no figure holds the host's time to issue the
first one. Also: a DDP step with the hook and its gradients against stock, CUDA graphs, what a call costs the host and
launches, and a peer that does not come. NVLink multicast stays off for both sides. Without GPUs it runs on gloo at
small sizes, to test the script. The file is written after every section; a section that fails or hangs is named in it,
and the sections after it are run by new processes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there under PYTHONSAFEPATH

import torch
import torch.distributed as dist
from common import RESULTS, result
from torch import Tensor, nn

from costlab.kernels.schedule import measure
from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleError, ScheduleRefused
from costlab.kernels.schedule.hooks import ddp_hook
from costlab.kernels.schedule.plan import SYMMETRIC, Plan
from costlab.kernels.schedule.planner import Planner, size_text
from costlab.kernels.schedule.topology import Link, uniform

MIB = 1 << 20
GPU_SIZES = [256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
CPU_SIZES = [64 << 10, MIB, 4 * MIB]
NAMED = {MIB: "allreduce_vs_nccl_1mb", 64 * MIB: "allreduce_vs_nccl_64mb"}
NOMINAL = Link(3.4e-6, 370e9)  # only names the fabric: every choice is made from measured curves
DDP_SIZES = [256 << 10, 4 * MIB, 64 * MIB]  # bytes; its buckets here are of 64 MiB
DDP_PLANS = [Plan("backend"), Plan("one-shot"), Plan("two-shot"), *(Plan("two-shot", chunks=c) for c in (2, 4))]
LAUNCHES = ("LaunchKernel", "Memcpy", "Memset", "GraphLaunch", "EventRecord", "StreamWaitEvent")  # of CUDA's interface
STUCK = 5.0  # seconds before a missing peer counts as a time-out
Rows = list[dict[str, Any]]


class Bench:
    """One rank's side of the benchmark; all ranks go through the same calls."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = torch.cuda.is_available() and torch.cuda.device_count() >= self.world
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        self.samples = options.samples
        self.out: Path = options.out
        self.planner: Planner
        if self.cuda:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, timeout=timedelta(seconds=120))
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        self.library = "NCCL (NVLS off)" if self.cuda else "gloo"
        self.comm = Communicator(timeout=timedelta(seconds=60))
        self.sizes = GPU_SIZES if self.cuda and not options.quick else CPU_SIZES
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.refused: dict[str, str] = {}
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60)) if self.cuda else dist.group.WORLD

    def agree(self, error: str) -> str:
        """The errors of all ranks in one line; empty if none had any. Raises if a rank does not come."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, error, group=self.control)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)

    def plans(self, nbytes: int) -> list[Plan]:
        """What may run at this size; receive buffers of rings stay below 32 MiB a channel."""
        chunks = max(1, nbytes // self.world // (32 * MIB))
        rows = [Plan("backend"), Plan("two-level", inside="backend")]
        rows += [Plan("ring", chunks=chunks), Plan("ring", chunks=2 * chunks, channels=2)]
        rows += [Plan("two-shot")] + ([Plan("one-shot")] if nbytes <= 16 * MIB else [])
        rows += [Plan("two-shot", chunks=c) for c in (2, 4, 8) if nbytes // c >= 2 * MIB]
        return [p for p in rows if p.schedule not in self.refused]

    def tensor(self, nbytes: int) -> Tensor:
        """Small integers: their sum is exact in every dtype, so results can be compared bit for bit."""
        numel = nbytes // self.dtype.itemsize
        generator = torch.Generator(device=self.device).manual_seed(self.rank)
        return torch.randint(-4, 5, (numel,), device=self.device, generator=generator).to(self.dtype)

    def zeros(self, nbytes: int) -> Tensor:
        """What may be summed any number of times."""
        return torch.zeros(nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def check(self, plan: Plan, nbytes: int) -> None:
        """The plan's result equals the library's, in four calls; raises if not, notes schedules that refuse."""
        source = self.tensor(nbytes)
        expected = source.clone()
        dist.all_reduce(expected)
        tensor = source.clone()
        for call in range(4):  # repeated calls take another way through the communicator, the last two a recording
            tensor.copy_(source)
            try:
                self.comm.all_reduce(tensor, plan)
            except ScheduleRefused as error:
                self.refused[plan.schedule] = str(error)
                return
            if not torch.equal(tensor, expected):
                raise AssertionError(f"{plan} gave a wrong sum at {size_text(nbytes)} in call {call}")

    def curves(self) -> tuple[dict[Plan, list[tuple[int, float]]], dict[int, float]]:
        """Every plan checked and timed at every size; and the relative noise by size."""
        rows: dict[Plan, list[tuple[int, float]]] = {}
        noise: dict[int, float] = {}
        for nbytes in self.sizes:
            plans = self.plans(nbytes)
            for plan in plans:
                self.check(plan, nbytes)
            plans = [p for p in plans if p.schedule not in self.refused]
            tensor = self.zeros(nbytes)
            calls = [functools.partial(self.comm.all_reduce, tensor, p) for p in plans]
            samples = measure.in_turn(calls, self.samples, self.inner(nbytes), self.device)
            for plan, taken in zip(plans, samples, strict=True):
                rows.setdefault(plan, []).append((nbytes, statistics.median(taken)))
            noise[nbytes] = measure.deciding_noise(plans, samples)
        return rows, noise

    def inner(self, nbytes: int) -> int:
        """Calls in a row of one sample."""
        return measure.calls_in_a_row(nbytes, self.device)

    def meet(self) -> None:
        """All ranks, with their devices idle."""
        measure.meet(None, self.device)

    def contest(self, calls: Sequence[Callable[[], object]], inner: int) -> list[float]:
        """Calls in turn, starting with another one each time: median seconds of each, of the slowest rank."""
        rows = measure.in_turn(calls, 3 * self.samples, inner, self.device)
        return [statistics.median(row) for row in rows]

    def versus(self, plan: Plan, nbytes: int) -> tuple[float, float]:
        """Seconds of the plan and of the library's call."""
        tensor = self.zeros(nbytes)
        ours, theirs = self.pair(tensor, plan)
        taken = self.contest([ours, theirs], self.inner(nbytes))
        return taken[0], taken[1]

    def pair(self, tensor: Tensor, plan: Plan) -> tuple[Callable[[], object], Callable[[], object]]:
        """The plan's call and the library's."""
        return functools.partial(self.comm.all_reduce, tensor, plan), functools.partial(dist.all_reduce, tensor)

    def host(self, call: Callable[[], object]) -> float:
        """Median seconds that a call keeps the host, while its device is not waited for; of the slowest rank."""
        taken = []
        for _ in range(self.samples + 2):
            self.meet()
            started = time.perf_counter()
            for _ in range(4):
                call()
            taken.append((time.perf_counter() - started) / 4)
        mine = torch.tensor(statistics.median(taken[2:]), dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.item()

    def once_each(self, plan: Plan, nbytes: int) -> list[float]:
        """Seconds of the plan's and the library's call with tensors that do not come again, so nothing is recorded."""
        rows: list[list[float]] = [[], []]
        for _ in range(self.samples):
            for which in (0, 1):
                tensors = [self.zeros(nbytes) for _ in range(4)]
                calls = [self.pair(tensor, plan)[which] for tensor in tensors]
                self.meet()
                rows[which].append(measure.in_a_row(functools.partial(spend, calls), len(calls), self.device))
        slowest = torch.tensor(rows, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [statistics.median(row) for row in slowest.tolist()]

    def launches(self, call: Callable[[], object]) -> dict[str, int]:
        """What a call asks of CUDA, by name; empty on a CPU."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
        self.meet()
        with torch.profiler.profile(activities=kinds) as profile:
            call()
            if self.cuda:
                torch.cuda.synchronize()
        found: Counter[str] = Counter()
        for event in profile.key_averages():
            if event.key.startswith(("cuda", "cu")) and any(word in event.key for word in LAUNCHES):
                found[event.key] += event.count
        return dict(found)

    def graphs(self, plan: Plan, nbytes: int) -> tuple[float, float]:
        """Replays of a captured all-reduce, the plan's and the library's; the plan's result is checked."""
        source = self.tensor(nbytes)
        expected = source.clone()
        dist.all_reduce(expected)
        mine, theirs = source.clone(), source.clone()
        replays = [
            self.captured(lambda: self.comm.all_reduce(mine, plan)),
            self.captured(lambda: dist.all_reduce(theirs)),
        ]
        mine.copy_(source)
        replays[0].replay()
        torch.cuda.synchronize()
        if not torch.equal(mine, expected):
            raise AssertionError(f"{plan} gave a wrong sum in a CUDA graph")
        mine.zero_()
        theirs.zero_()
        taken = self.contest([replays[0].replay, replays[1].replay], self.inner(nbytes))
        return taken[0], taken[1]

    def captured(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events meanwhile
            call()
        return graph

    def model(self) -> nn.Module:
        width, depth = (4096, 4) if self.cuda and len(self.sizes) > len(CPU_SIZES) else (256, 3)
        torch.manual_seed(5)
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers).to(self.device)

    def ddp(self) -> dict[str, Any]:
        """A DDP step with stock all-reduce and with hooks, and how far the planned one's gradients differ.

        `planned` chooses from curves in the gradients' dtype and beside compute, `alone` from those of `curves`, and
        `library` never leaves the library: what the hook itself costs.
        """
        from torch.nn.parallel import DistributedDataParallel

        used: dict[int, str] = {}
        planners = {"planned": self.planner_for_ddp(), "alone": self.planner}
        hooks = {"planned": self.choosing(planners["planned"], used), "alone": self.choosing(planners["alone"], {})}
        hooks["library"] = lambda _: Plan("backend")
        models = {"stock": DistributedDataParallel(self.model())}
        for name, plan_for in hooks.items():
            models[name] = DistributedDataParallel(self.model())
            models[name].register_comm_hook(None, ddp_hook(self.comm, plan_for))
        width = next(models["stock"].parameters()).shape[1]
        generator = torch.Generator(device=self.device).manual_seed(50 + self.rank)
        data = torch.randn(512 if self.cuda else 16, width, device=self.device, generator=generator)

        def step(model: nn.Module) -> None:
            model.zero_grad(set_to_none=True)
            model(data).square().mean().backward()

        for model in models.values():
            for _ in range(4):  # DDP orders its buckets anew after the first step, recordings are made in the third
                step(model)
        differ, same = self.gradients(models["planned"], models["stock"])
        calls = [functools.partial(step, model) for model in models.values()]
        taken = self.contest(calls, 4 if self.cuda else 1)
        return {**dict(zip(models, taken, strict=True)), "plans": used, "difference": differ, "same_bits": same}

    def choosing(self, planner: Planner, used: dict[int, str]) -> Callable[[int], Plan]:
        """One choice for each size, as a run makes it: choosing takes longer than a small all-reduce."""

        @functools.cache
        def choose(nbytes: int) -> Plan:
            choice = planner.choose(nbytes)
            used[nbytes] = choice.best.describe()
            return choice.plan

        return choose

    def planner_for_ddp(self) -> Planner:
        """Chooses from curves as a run with `--schedule auto` measures them; on a CPU from those that there are."""
        if not self.cuda:
            return self.planner
        plans = [p for p in DDP_PLANS if p.schedule not in self.refused]
        sizes, rounds = DDP_SIZES, self.samples
        found = measure.curves(self.comm, plans, sizes, torch.float32, self.device, rounds, beside=True)
        fabric = uniform(1, self.world, NOMINAL, NOMINAL)
        return Planner(fabric, measured=found.curves, noise=found.noise, beside=found.beside)

    def gradients(self, ours: nn.Module, stock: nn.Module) -> tuple[float, bool]:
        """Largest difference in units of the reduction-order bound 2 (n+1) u max|g|, and equality over ranks."""
        unit = torch.finfo(torch.float32).eps / 2
        worst, same = 0.0, True
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            if a.grad is None or b.grad is None:
                raise AssertionError("a parameter has no gradient")
            bound = 2 * (self.world + 1) * unit * b.grad.abs().max().clamp_min(1e-12)
            worst = max(worst, ((a.grad - b.grad).abs().max() / bound).item())
            bits = a.grad.reshape(-1).view(torch.int32)
            low, high = bits.clone(), bits.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            same = same and torch.equal(low, high)
        return worst, same

    def missing_peer(self) -> tuple[float, str]:
        """The last rank stays away from a ring; seconds until the first notices, and what it was told. Run it last."""
        # on a GPU the handle's own time-out counts; torch's watchdog would end the process
        lost = Communicator(timeout=timedelta(seconds=120 if self.cuda else STUCK))
        tensor = torch.ones(1 << 16, device=self.device)
        lost.prepare(Plan("ring"), tensor)
        self.meet()
        if self.rank == self.world - 1:
            time.sleep(STUCK + 3)
            return 0.0, ""
        start = time.perf_counter()
        try:
            handle = lost.all_reduce(tensor, Plan("ring"), async_op=True)
            if handle is not None:
                handle.synchronize(timedelta(seconds=STUCK if self.cuda else 2 * STUCK))
            return time.perf_counter() - start, "no error"
        except ScheduleError as error:
            return time.perf_counter() - start, f"{type(error).__name__}: {error}"


def spend(calls: list[Callable[[], object]]) -> None:
    """Make one call of several."""
    calls.pop()()


def curves(bench: Bench) -> Rows:
    """Times every plan; kept for the sections after, also those of new processes. Rows: none."""
    found, noise = bench.curves()
    document = read(bench.out)
    document["noise"] = {str(nbytes): share for nbytes, share in noise.items()}
    document["curves"] = [{"plan": asdict(p), "points": curve} for p, curve in found.items()]
    document["environment"] = environment(bench)
    if bench.rank == 0:
        write(bench.out, document)
    bench.planner = planner_of(bench, document)
    return []


def planner_of(bench: Bench, document: dict[str, Any]) -> Planner:
    """Chooses from the measured curves in the file."""
    measured = {}
    for row in document["curves"]:
        plan = Plan(**{**row["plan"], "order": tuple(row["plan"]["order"])})
        measured[plan] = [(int(size), float(took)) for size, took in row["points"]]
    noise = {int(size): float(share) for size, share in document["noise"].items()}
    return Planner(uniform(1, bench.world, NOMINAL, NOMINAL), measured=measured, noise=noise)


def choices(bench: Bench) -> Rows:
    """The planner's choice against the library at every size."""
    rows, ratios = [], []
    for nbytes in bench.sizes:
        choice = bench.planner.choose(nbytes)
        bench.check(choice.plan, nbytes)
        ours, theirs = bench.versus(choice.plan, nbytes)
        ratios.append(theirs / ours)
        shared = {"peer": bench.library, "peer_value": theirs * 1e6, "ratio": theirs / ours, "n": 3 * bench.samples}
        more: dict[str, Any] = {"plan": choice.best.describe(), "candidates_us": candidates(choice)}
        more["margin"] = round(bench.planner.margin(nbytes), 4)
        name = NAMED.get(nbytes, f"allreduce_{size_text(nbytes).replace(' ', '_')}")
        rows.append(result(name, ours * 1e6, "us", **shared, **more))
    worst = result(
        "allreduce_vs_nccl_worst", min(ratios), "x, worst size", n=len(ratios), peer=bench.library, ratio=min(ratios)
    )
    return [worst, *rows]


def microseconds(taken: Sequence[float]) -> list[float]:
    """The plan's time and the library's."""
    return [round(seconds * 1e6, 2) for seconds in taken]


def candidates(choice: Any) -> dict[str, float]:
    """Times the planner chose from, in microseconds."""
    return {c.describe(): round(c.seconds * 1e6, 2) for c in choice.candidates}


def graphs(bench: Bench) -> Rows:
    """Captured all-reduces at a small, a middle and a large size."""
    if not bench.cuda:
        return []
    rows = []
    for nbytes in (256 << 10, MIB, 4 * MIB, 64 * MIB):
        plan = bench.planner.choose(nbytes).plan
        for chosen in dict.fromkeys([plan] if nbytes == MIB else [plan, Plan("ring")]):
            bench.check(chosen, nbytes)  # groups and buffers must exist before a capture
            ours, theirs = bench.graphs(chosen, nbytes)
            name = f"allreduce_cuda_graph_{chosen.schedule}_{size_text(nbytes).replace(' ', '_')}"
            shared = {"peer": f"{bench.library}, captured", "peer_value": theirs * 1e6, "ratio": theirs / ours}
            rows.append(result(name, ours * 1e6, "us", n=3 * bench.samples, **shared))
    return rows


def ddp(bench: Bench) -> Rows:
    """A DDP step and its gradients."""
    got = bench.ddp()
    stock = got["stock"] * 1e3
    rows = []
    for metric, name in (("planned", "planned"), ("hook_alone_curves", "alone"), ("hook_library", "library")):
        ours = got[name] * 1e3
        shared = {"peer": "DDP's own all-reduce", "peer_value": stock, "ratio": stock / ours}
        rows.append(result(f"ddp_step_{metric}", ours, "ms", n=3 * bench.samples, **shared))
    rows[0]["plans"] = {size_text(nbytes): plan for nbytes, plan in sorted(got["plans"].items())}
    return [
        *rows,
        result("ddp_gradient_difference", float(got["difference"]), "of the reduction-order bound", n=1),
        result("ddp_gradients_same_bits_on_all_ranks", float(got["same_bits"]), "1 = yes", n=1),
    ]


def calls(bench: Bench) -> Rows:
    """What the planner's choice and the library's call cost the host, alone on an idle device, and with new tensors.

    After the other sections: a profiler stays attached to CUDA.
    """
    rows = []
    for nbytes in bench.sizes:
        plan = bench.planner.choose(nbytes).plan
        ours, theirs = bench.pair(bench.zeros(nbytes), plan)
        host = [bench.host(ours), bench.host(theirs)]
        alone = bench.contest([ours, theirs], 1)
        fresh = bench.once_each(plan, nbytes) if nbytes <= 256 * MIB else []
        more: dict[str, Any] = {"plan": plan.schedule, "chunks": plan.chunks}
        more |= {"alone_us": microseconds(alone), "new_tensors_us": microseconds(fresh)}
        more |= {"launches": bench.launches(ours), "peer_launches": bench.launches(theirs)}
        shared = {"peer": bench.library, "peer_value": host[1] * 1e6, "ratio": host[1] / host[0], "n": bench.samples}
        rows.append(
            result(f"allreduce_host_{size_text(nbytes).replace(' ', '_')}", host[0] * 1e6, "us", **shared, **more)
        )
    return rows


def missing(bench: Bench) -> Rows:
    """How long a missing peer goes unnoticed."""
    noticed, text = bench.missing_peer()
    shared = {"peer": "time-out asked for", "peer_value": STUCK, "error": text}
    return [result("missing_peer_noticed", noticed, "s", n=1, **shared)]


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    "curves": curves,
    "choices": choices,
    "ddp": ddp,
    "graphs": graphs,
    "calls": calls,
    "missing": missing,  # leaves a collective without its peer, so nothing can follow it
}


def environment(bench: Bench) -> dict[str, Any]:
    """What it ran on, and what was refused with which reason."""
    rows: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": bench.world,
        "dtype": str(bench.dtype),
        "symmetric_memory": {s: bench.refused.get(s, "used") for s in SYMMETRIC},
        "nvlink_multicast": "off for both sides",
    }
    if bench.cuda:
        count = torch.cuda.device_count()
        rows["gpus"] = [{"name": torch.cuda.get_device_name(i)} for i in range(count)]
        rows["cuda"] = torch.version.cuda
        rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        rows["cpu"] = f"{os.cpu_count()} CPUs {platform.machine()}, gloo"
    return rows


def read(path: Path) -> dict[str, Any]:
    """The result file so far."""
    if path.exists():
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return loaded
    return {"environment": {}, "results": [], "sections": {}, "curves": [], "noise": {}}


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace it whole: the other ranks read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def worker(options: argparse.Namespace) -> int:
    """One rank: the sections that the file does not name yet."""
    bench = Bench(options)
    document = read(bench.out)
    bench.agree("")  # all have read it before the first rank writes
    if document["curves"]:
        bench.planner = planner_of(bench, document)
    for name in [s for s in SECTIONS if s not in document["sections"]]:
        if bench.rank == 0:
            write(bench.out, {**document, "sections": {**document["sections"], name: "did not end"}})
        started = time.perf_counter()
        rows, error = attempt(SECTIONS[name], bench)
        error = error if name == "missing" else bench.agree(error)
        document = read(bench.out)
        document["sections"][name] = error or f"ok, {time.perf_counter() - started:.1f} s"
        document["results"] += [{**r, "command": "python tests/benchmarks/schedules_bench.py"} for r in rows]
        if bench.rank == 0:
            write(bench.out, document)
            print(f"[{name}] {document['sections'][name]}", flush=True)
        if error:
            break  # the device may be in any state: new processes do the rest
        if name != "missing":
            bench.agree("")  # the file holds this section before anyone reads it for the next
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly shutdown would wait for the collective that was left without its peer


def attempt(section: Callable[[Bench], Rows], bench: Bench) -> tuple[Rows, str]:
    """The section's rows, or its error."""
    try:
        return section(bench), ""
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        print(f"rank {bench.rank}: {text}", file=sys.stderr, flush=True)
        return [], text


def launch(options: argparse.Namespace) -> int:
    """Start the ranks, again while sections are left, and print what was found."""
    options.out.unlink(missing_ok=True)
    deadline = time.monotonic() + options.limit
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), *sys.argv[1:]]
    for _ in SECTIONS:
        left = deadline - time.monotonic()
        if left < 5 or set(SECTIONS) <= set(read(options.out)["sections"]):
            break
        done_before = len(read(options.out)["sections"])
        process = subprocess.Popen(command, start_new_session=True)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if len(read(options.out)["sections"]) == done_before:
            break  # the ranks do not even start
    document = read(options.out)
    write(options.out, common_form(document))
    return show(document, options.out)


def common_form(document: dict[str, Any]) -> dict[str, Any]:
    """The file as all results have it: what the figures rest on is part of the environment."""
    more = {name: document[name] for name in ("curves", "noise", "sections")}
    return {"environment": {**document["environment"], **more}, "results": document["results"]}


def show(document: dict[str, Any], out: Path) -> int:
    """A table on stdout; 0 if every section ended well."""
    for row in document["results"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        print(f"{row['metric']:44} {row['value']:12.4g} {row['unit']:10} ratio {ratio:8} {row.get('plan', '')}")
    for name in SECTIONS:
        print(f"section {name:10} {document['sections'].get(name, 'not reached')}")
    print(out)
    return int(not all(document["sections"].get(s, "").startswith("ok") for s in SECTIONS))


def main() -> int:
    """Parse, and become a launcher if no rank was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--limit", type=float, default=110.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=RESULTS / "schedules.json", help="file to write")
    options = parser.parse_args()
    options.out = options.out.resolve()
    return worker(options) if "RANK" in os.environ else launch(options)


if __name__ == "__main__":
    raise SystemExit(main())

"""Planned all-reduces against the library's own on the GPUs of one host; two or more, under four minutes on two H200.

    python tests/benchmarks/schedules_bench.py [--ranks 2] [--quick] [--output FOLDER]

Every available plan is timed first; from those curves the planner chooses; choice and library are then timed again in
turn, so that picking the fastest of noisy samples does not flatter the choice. Also: CUDA graphs, a DDP step with the
hook, gradients against stock, and a peer that does not come. NVLink multicast stays off for both sides. Without GPUs
it runs on gloo at small sizes, to test the script. Writes schedules.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there under PYTHONSAFEPATH

import torch
import torch.distributed as dist
from common import RESULTS, result, save
from torch import Tensor, nn

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
STUCK = 5.0  # seconds before a missing peer counts as a time-out


class Bench:
    """One rank's side of the benchmark; all ranks go through the same calls."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = torch.cuda.is_available() and torch.cuda.device_count() >= self.world
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        self.samples = options.samples
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

    def plans(self, nbytes: int) -> list[Plan]:
        """What may run at this size; receive buffers of rings stay below 32 MiB a channel."""
        chunks = max(1, nbytes // self.world // (32 * MIB))
        rows = [Plan("backend"), Plan("two-level", inside="backend")]
        rows += [Plan("ring", chunks=chunks), Plan("ring", chunks=2 * chunks, channels=2)]
        rows += [Plan("two-shot")] + ([Plan("one-shot")] if nbytes <= 16 * MIB else [])
        return [p for p in rows if p.schedule not in self.refused]

    def tensor(self, nbytes: int) -> Tensor:
        """Small integers: their sum is exact in every dtype, so results can be compared bit for bit."""
        numel = nbytes // torch.empty(0, dtype=self.dtype).element_size()
        generator = torch.Generator(device=self.device).manual_seed(self.rank)
        return torch.randint(-4, 5, (numel,), device=self.device, generator=generator).to(self.dtype)

    def check(self, plan: Plan, nbytes: int) -> None:
        """The plan's result equals the library's; raises if not, notes schedules that refuse."""
        tensor = self.tensor(nbytes)
        expected = tensor.clone()
        dist.all_reduce(expected)
        try:
            self.comm.all_reduce(tensor, plan)
        except ScheduleRefused as error:
            self.refused[plan.schedule] = str(error)
            return
        if not torch.equal(tensor, expected):
            raise AssertionError(f"{plan} gave a wrong sum at {size_text(nbytes)}")

    def seconds(self, call: Callable[[], object], nbytes: int) -> float:
        """Median over samples of the slowest rank's time a call, several calls in a row where they are short."""
        inner = 20 if nbytes <= 16 * MIB and self.cuda else 1
        rows = []
        for _ in range(self.samples + 2):
            self.meet()
            rows.append(self.once(call, inner))
        mine = torch.tensor(rows[2:], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return statistics.median(mine.tolist())

    def meet(self) -> None:
        """All ranks, with their devices idle."""
        dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object], inner: int) -> float:
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(inner):
                call()
            return (time.perf_counter() - start) / inner
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / inner

    def curves(self) -> dict[Plan, list[tuple[int, float]]]:
        """Every plan checked and timed at every size."""
        rows: dict[Plan, list[tuple[int, float]]] = {}
        for nbytes in self.sizes:
            for plan in self.plans(nbytes):
                self.check(plan, nbytes)
                if plan.schedule in self.refused:
                    continue
                tensor = torch.zeros_like(self.tensor(nbytes))
                took = self.seconds(lambda t=tensor, p=plan: self.comm.all_reduce(t, p), nbytes)
                rows.setdefault(plan, []).append((nbytes, took))
        return rows

    def duel(self, plan: Plan, nbytes: int) -> tuple[float, float]:
        """The plan and the library's call in turn: seconds of each."""
        tensor = torch.zeros_like(self.tensor(nbytes))
        ours, theirs = [], []
        for _ in range(3):
            ours.append(self.seconds(lambda: self.comm.all_reduce(tensor, plan), nbytes))
            theirs.append(self.seconds(lambda: dist.all_reduce(tensor), nbytes))
        return statistics.median(ours), statistics.median(theirs)

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
        return self.seconds(replays[0].replay, nbytes), self.seconds(replays[1].replay, nbytes)

    def captured(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def model(self) -> nn.Module:
        width, depth = (4096, 4) if self.cuda and len(self.sizes) > len(CPU_SIZES) else (256, 3)
        torch.manual_seed(5)
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers).to(self.device)

    def ddp(self, planner: Planner) -> dict[str, float | bool]:
        """A DDP step with stock all-reduce and with the planner's, and how far the gradients differ."""
        from torch.nn.parallel import DistributedDataParallel

        models = [DistributedDataParallel(self.model()) for _ in range(2)]
        models[1].register_comm_hook(None, ddp_hook(self.comm, lambda nbytes: planner.choose(nbytes).plan))
        width = next(models[0].parameters()).shape[1]
        generator = torch.Generator(device=self.device).manual_seed(50 + self.rank)
        data = torch.randn(512 if self.cuda else 16, width, device=self.device, generator=generator)

        def step(model: nn.Module) -> None:
            model.zero_grad(set_to_none=True)
            model(data).square().mean().backward()

        for model in models:
            step(model)
            step(model)
        differ, same = self.gradients(models[1], models[0])
        nbytes = 64 * MIB
        stock, planned = [], []
        for _ in range(3):
            stock.append(self.seconds(lambda: step(models[0]), nbytes))
            planned.append(self.seconds(lambda: step(models[1]), nbytes))
        return {
            "stock": statistics.median(stock),
            "planned": statistics.median(planned),
            "difference": differ,
            "same_bits": same,
        }

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


def measure(bench: Bench) -> list[dict[str, Any]]:
    """All measurements; rows are complete on every rank, rank 0 writes them."""
    planner = Planner(uniform(1, bench.world, NOMINAL, NOMINAL), measured=bench.curves())
    rows, ratios = [], []
    for nbytes in bench.sizes:
        choice = planner.choose(nbytes)
        ours, theirs = bench.duel(choice.plan, nbytes)
        ratios.append(theirs / ours)
        shared = {"peer": bench.library, "peer_value": theirs * 1e6, "ratio": theirs / ours, "n": 3 * bench.samples}
        more = {"plan": choice.best.describe(), "candidates_us": candidates(choice)}
        name = NAMED.get(nbytes, f"allreduce_{size_text(nbytes).replace(' ', '_')}")
        rows.append(result(name, ours * 1e6, "us", **shared, **more))
    rows.insert(0, result("allreduce_vs_nccl_worst", min(ratios), "x, worst size", n=len(ratios), peer=bench.library))
    if bench.cuda:
        rows += graph_rows(bench, planner)
    return rows + ddp_rows(bench, planner)


def candidates(choice: Any) -> dict[str, float]:
    """Times the planner chose from, in microseconds."""
    return {c.describe(): round(c.seconds * 1e6, 2) for c in choice.candidates}


def graph_rows(bench: Bench, planner: Planner) -> list[dict[str, Any]]:
    """Captured all-reduces at a small, a middle and a large size."""
    rows = []
    for nbytes in (256 << 10, 4 * MIB, 64 * MIB):
        plan = planner.choose(nbytes).plan
        for chosen in {plan, Plan("ring")}:
            ours, theirs = bench.graphs(chosen, nbytes)
            name = f"allreduce_cuda_graph_{chosen.schedule}_{size_text(nbytes).replace(' ', '_')}"
            shared = {"peer": f"{bench.library}, captured", "peer_value": theirs * 1e6, "ratio": theirs / ours}
            rows.append(result(name, ours * 1e6, "us", n=bench.samples, **shared))
    return rows


def ddp_rows(bench: Bench, planner: Planner) -> list[dict[str, Any]]:
    """A DDP step and its gradients."""
    got = bench.ddp(planner)
    ours, stock = got["planned"] * 1e3, got["stock"] * 1e3
    shared = {"peer": "DDP's own all-reduce", "peer_value": stock, "ratio": stock / ours}
    return [
        result("ddp_step_planned", ours, "ms", n=3 * bench.samples, **shared),
        result("ddp_gradient_difference", float(got["difference"]), "of the reduction-order bound", n=1),
        result("ddp_gradients_same_bits_on_all_ranks", float(got["same_bits"]), "1 = yes", n=1),
    ]


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


def worker(options: argparse.Namespace) -> int:
    """One rank."""
    bench = Bench(options)
    rows = measure(bench)
    facts = environment(bench)
    noticed, text = bench.missing_peer()
    if bench.rank == 0:
        rows.append(
            result("missing_peer_noticed", noticed, "s", n=1, peer="time-out asked for", peer_value=STUCK, error=text)
        )
        for row in rows:
            print(
                f"{row['metric']:44} {row['value']:12.4g} {row['unit']:10} ratio {row['ratio']} {row.get('plan', '')}"
            )
        print(text)
        print(save("schedules", facts, rows, options.output))
    sys.stdout.flush()
    os._exit(0)  # the last test left a collective without its peer, which an orderly shutdown would wait for


def main() -> int:
    """Parse, and become a launcher if no rank was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for schedules.json")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return worker(options)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    os.execv(sys.executable, [sys.executable, *launcher, str(Path(__file__).resolve()), *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())

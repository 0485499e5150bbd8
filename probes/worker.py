"""One rank's main: check in > build > compile > warm up > measure > profile > checkpoint > write.

Run by torchrun as `-m costlab.probes.worker RUN_DIR`. Each phase writes its tables when it ends, so a run that
dies later keeps what it had measured.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes import failures
from costlab.probes.clocks import ClockReading
from costlab.probes.launch import FACTS_FILE, SPEC_FILE, Facts
from costlab.probes.records import (
    CheckpointCodecRow,
    CheckpointRow,
    CheckpointStageRow,
    CollectiveRow,
    CompileRow,
    Environment,
    GradientRow,
    KernelRow,
    KernelSourceRow,
    LinkRow,
    MemoryRow,
    MissRow,
    PartRow,
    PatternRow,
    PowerRow,
    ResumeRow,
    Row,
    SpanRow,
    StepRow,
    WorkloadFacts,
)
from costlab.probes.schedule_choice import ScheduleChoice
from costlab.probes.session import Voice, as_rank, loopback_interface, rank_dir
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes, write_rows

if TYPE_CHECKING:
    import torch

    from costlab.probes.checkin import Placement
    from costlab.probes.energy import EnergyProbe
    from costlab.probes.fusion.model import FusionTrace
    from costlab.probes.materialise import Filled
    from costlab.probes.memory import MemoryProbe
    from costlab.probes.steps import Trainer
    from costlab.probes.workloads.base import Workload

RUN_TARGET_S = 112.0  # how long a run may take where its checkpoints decide
AFTER_CHECKPOINT_S = 23.0  # the first load's overrun, removing files, writing tables, ending the group
LEAST_BUDGET_S, MOST_BUDGET_S = 20.0, 64.0


@dataclass
class RankRun:
    """One rank's run in progress: identity, options, what has been built and what has been measured."""

    spec: RunSpec
    run_dir: Path
    rank: int
    world: int
    local_rank: int
    voice: Voice
    device: torch.device
    backend: str
    placement: Placement
    memory: MemoryProbe
    energy: EnergyProbe
    facts: WorkloadFacts = field(default_factory=WorkloadFacts)
    environment: Environment = field(default_factory=Environment)
    step_rows: list[StepRow] = field(default_factory=list)
    compile_rows: list[CompileRow] = field(default_factory=list)
    fusion: FusionTrace | None = None
    clocks: list[ClockReading] = field(default_factory=list)
    schedules: list[ScheduleChoice] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> Path:
        """Folder of this rank's tables."""
        return rank_dir(self.run_dir, self.rank)

    @property
    def salt(self) -> str:
        """Under which this rank's compiled graphs are kept: apart from its peers', which compile the same at once."""
        return f"{self.spec.cache_salt}-{self.rank}" if self.spec.cache_salt else ""

    def write(self, kind: type[Row], rows: list[Any]) -> None:
        """Write one table of this rank."""
        write_rows(self.directory, kind, rows)


def main(argv: list[str]) -> int:
    """Run one rank; every exception becomes a Failure event and exit code 1."""
    run_dir = Path(argv[1])

    def body(rank: int, voice: Voice) -> None:
        spec = msgspec.json.decode((run_dir / SPEC_FILE).read_bytes(), type=RunSpec)
        run_rank(spec, run_dir, rank, voice)

    return as_rank(run_dir, body)


def run_rank(spec: RunSpec, run_dir: Path, rank: int, voice: Voice) -> None:
    """All phases, in order."""
    import torch.distributed as dist

    from costlab.probes.clock_trips import read_clocks

    voice.enter("check-in", "importing torch, joining the process group")
    run = check_in(spec, run_dir, rank, voice)
    trainer = build(run)
    compile_phase(run, trainer)
    measure_phase(run, trainer)
    if spec.profile_steps:
        profile_phase(run, trainer)
    if spec.checkpoint:
        checkpoint_phase(run, trainer)
    voice.enter("write")
    run.clocks += read_clocks("end")
    write_facts(run)
    run.write(LinkRow, link_rows(run))
    run.write(MemoryRow, run.memory.rows(rank))
    run.write(PowerRow, run.energy.rows(rank))
    dist.barrier()
    dist.destroy_process_group()
    voice.enter("done")


def check_in(spec: RunSpec, run_dir: Path, rank: int, voice: Voice) -> RankRun:
    """Bind to the GPU's NUMA node, choose the device, join the process group, record the environment."""
    from costlab.probes import checkin

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # Before torch starts threads of its own: they inherit the binding.
    placement = checkin.check_in(spec.check_in, local_rank)
    voice.log(f"check-in: {placement.sentence}")

    import torch.distributed as dist

    from costlab.probes.clock_trips import read_clocks
    from costlab.probes.energy import EnergyProbe
    from costlab.probes.environment import environment
    from costlab.probes.memory import MemoryProbe

    device, backend = choose_device(spec, local_rank)
    if device.type == "cuda":
        checkin.confirm(placement, checkin.cuda_bus_id(device))
        checkin.compare_host_memory(placement, lambda _: checkin.pinned_gbps(device))
        dump_nccl_topology(run_dir)
    if spec.nnodes == 1:
        interface = loopback_interface()
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=spec.collective_timeout_s)
    dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    run = RankRun(
        spec=spec,
        run_dir=run_dir,
        rank=rank,
        world=dist.get_world_size(),
        local_rank=local_rank,
        voice=voice,
        device=device,
        backend=backend,
        placement=placement,
        memory=MemoryProbe(device),
        energy=EnergyProbe(device.index if device.type == "cuda" else None, local_rank=local_rank),
    )
    run.environment = environment(device, backend)
    run.clocks += read_clocks("start")
    write_facts(run)
    return run


def dump_nccl_topology(run_dir: Path) -> None:
    """Let NCCL write the machine and the rings it found, unless the user sends them elsewhere."""
    os.environ.setdefault("NCCL_TOPO_DUMP_FILE", str(run_dir / "raw" / "nccl-topo.xml"))
    os.environ.setdefault("NCCL_GRAPH_DUMP_FILE", str(run_dir / "raw" / "nccl-graph.xml"))


def link_rows(run: RankRun) -> list[LinkRow]:
    """Where this rank's CPUs and memory lay, and, from one rank a host, the machine's devices and links."""
    from costlab.probes import checkin
    from costlab.probes.topology import machine_rows

    rows = [*run.placement.rows(run.rank), *checkin.closing_rows(run.placement, run.rank)]
    return [*rows, *machine_rows(run.rank)] if run.local_rank == 0 else rows


def choose_device(spec: RunSpec, local_rank: int) -> tuple[torch.device, str]:
    """This rank's device and the process-group backend; SpecError when CUDA is asked for and absent."""
    import torch

    from costlab.probes.spec import SpecError

    available = torch.cuda.is_available()
    if spec.device == "cuda" and not available:
        raise SpecError("--device cuda was asked for, but torch sees no CUDA device; `costlab doctor` says why")
    if spec.device == "cpu" or not available:
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SpecError(f"{local_rank + 1} ranks were asked for on a host with {count} GPUs; lower --ranks")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def write_facts(run: RankRun) -> None:
    """Rank 0 tells the launcher what machine and workload this is."""
    if run.rank == 0:
        known = run.facts if run.facts.name else None
        facts = Facts(
            environment=run.environment,
            workload=known,
            ranks=run.world,
            clocks=run.clocks,
            schedules=run.schedules,
        )
        write_bytes(run.run_dir / FACTS_FILE, msgspec.json.encode(facts))


def build(run: RankRun) -> Trainer:
    """Load the workload, count its FLOPs, measure this machine's ceilings, wrap the model."""
    import torch

    from costlab.probes.ceilings import copy_gbps, matmul_tflops
    from costlab.probes.materialise import fill
    from costlab.probes.parallel import make_optimizer, set_activation_budget, wrap
    from costlab.probes.steps import Trainer
    from costlab.probes.workloads.base import WorkloadContext, find_blocks, seed_all
    from costlab.probes.workloads.loader import load

    spec = run.spec
    run.voice.enter("build", f"{spec.workload} {spec.size}")
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    context = WorkloadContext(run.device, dtype, spec.size, spec.batch, spec.seq, spec.seed, run.rank, run.world)
    with run.memory.phase("build"):
        seed_all(spec.seed)  # the same weights on all ranks: replicas of HSDP would never meet otherwise
        workload = load(spec.workload, context)
        later = place(run, workload)
        seed_all(spec.seed + run.rank)
        workload.model.train()
        workload.blocks = workload.blocks or find_blocks(workload.model)
        describe(run, workload)
        if spec.plan:
            from costlab.probes.tune_apply import put_in_plan

            put_in_plan(run, workload)
        elif spec.fused:
            put_in_fused_kernels(run, workload)
        if not spec.lean:
            if run.rank == 0:
                run.voice.progress(1, 3, "measuring this machine's ceilings")
            run.facts.peak_tflops, run.facts.peak_method = matmul_tflops(run.device, dtype)
            run.facts.copy_gbps = copy_gbps(run.device)[0]
        set_activation_budget(workload, spec)
        run.voice.progress(2, 3, "wrapping the model")
        wrapped = wrap(workload.model, workload.blocks, spec, run.device, workload.dynamic, workload.calls)
        if later:
            say_filled(run, fill(wrapped.base, run.device, spec.seed))
            seed_all(spec.seed + run.rank)
        optimizer = make_optimizer(wrapped, spec)
    for note in wrapped.notes if run.rank == 0 else ():
        run.voice.log(note)
    run.schedules = wrapped.schedules
    run.facts.expected_comm_bytes = wrapped.expected_bytes
    run.facts.expected_comm_formula = wrapped.formula
    run.facts.passed_over = wrapped.passed_over
    write_facts(run)
    return Trainer(
        workload=workload,
        wrapped=wrapped,
        optimizer=optimizer,
        device=run.device,
        accumulation=spec.accumulation,
    )


def place(run: RankRun, workload: Workload) -> bool:
    """Move the model to the device. True for one on the meta device that is to be sharded before it is filled."""
    from costlab.probes.materialise import on_device, unfilled
    from costlab.probes.spec import SpecError

    if run.spec.parallel != "ddp" and unfilled(workload.model):
        if run.spec.schedule != "stock":
            raise SpecError(
                "--schedule starts replicas from the first one's weights, which a model on the meta device has not"
            )
        return True
    say_filled(run, on_device(workload.model, run.device, run.spec.seed))
    return False


def say_filled(run: RankRun, filled: Filled | None) -> None:
    """Log how a model from the meta device was filled, and what is doubtful about that."""
    if filled is not None and run.rank == 0:
        run.voice.log(filled.how)
        for doubt in filled.doubts:
            run.voice.log(doubt, "warning")


def describe(run: RankRun, workload: Workload) -> None:
    """Fill in what is known of the workload before it runs."""
    from costlab.probes.fusion.classes import classify
    from costlab.probes.fusion.fqn import normalise
    from costlab.probes.workloads.batches import count_samples

    facts, model = run.facts, workload.model
    if not workload.units_per_batch:
        workload.units_per_batch = count_samples(workload.batch(0))
    facts.name, facts.title, facts.unit = workload.name, workload.title or workload.name, workload.unit
    facts.source = workload.source
    facts.units_per_step = workload.units_per_batch * run.world * run.spec.accumulation
    facts.parameters = sum(p.numel() for p in model.parameters())
    facts.parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    facts.layer_classes = {
        normalise(name): classify(name, type(module).__name__) for name, module in model.named_modules() if name
    }
    if workload.flops_per_batch is None and not run.spec.lean:
        count_flops(run, workload)
    if workload.flops_per_batch:
        facts.flops_per_step = workload.flops_per_batch * run.world * run.spec.accumulation
    facts.flops_formula = workload.flops_formula


def put_in_fused_kernels(run: RankRun, workload: Workload) -> None:
    """Exchange what is recognised in the model and its loss for fused kernels; the rest keeps its own path."""
    from costlab.kernels.fused import registry
    from costlab.probes.workloads.base import batch_beside

    facts = run.facts
    if not registry.available(run.device):
        facts.fused_notes.append(f"fused kernels need a CUDA device with Triton, not {run.device.type}: none put in")
    else:
        facts.fused = registry.apply(workload.model, findings=facts.fused_notes)
        loss = registry.fused_loss(workload.model, workload.loss, batch_beside(workload), facts.fused_notes)
        if loss is not None:
            workload.loss = loss
            facts.fused.append("linear_cross_entropy: loss")
    run.voice.log(f"{len(facts.fused)} fused kernels put in")
    for note in facts.fused_notes:
        run.voice.log(note, "warning")


def count_flops(run: RankRun, workload: Workload) -> None:
    """FLOPs and calls of a batch; a user's model may not run outside its wrapper, they are then unknown."""
    from costlab.probes import flops

    try:
        counted = flops.count_flops(workload, run.device)
    except Exception as error:
        run.voice.log(f"FLOPs not counted: {failures.one_line(str(error))}", "warning")
        return
    workload.flops_per_batch, workload.flops_formula = counted.flops, counted.how if counted.flops else ""
    workload.calls = {name: counted.calls[name] for name in ("", *workload.blocks) if name in counted.calls}


def compile_phase(run: RankRun, trainer: Trainer) -> None:
    """First steps: a cold compile with the fusion trace, the same again for the cache facts; then warm-up steps.

    Warm-up steps that lead into the timed ones are left to `measure_phase`.
    """
    from costlab.probes.compile_internals import salted_caches
    from costlab.probes.steps import lead_steps

    if run.spec.compile == "none":
        run.voice.enter("compile", "eager: the first steps")
        with run.memory.phase("compile"):
            run.compile_rows += first_steps(run, trainer, "cold")
    elif run.spec.lean:
        run.voice.enter("compile", "warm")
        if run.device.type == "cpu":
            name_cpu_kernels()
        with run.memory.phase("compile"), salted_caches(run.salt):
            run.compile_rows += first_steps(run, trainer, "warm")
    else:
        with run.memory.phase("compile"):
            compile_twice(run, trainer)
    run.write(CompileRow, run.compile_rows)
    run.voice.enter("warm-up")
    alone = run.spec.warmup - lead_steps(run.device, run.spec.warmup)
    for i in range(alone):
        ms = trainer.timed_step()
        run.voice.progress(i + 1, alone, f"{ms:.1f} ms")


def compile_twice(run: RankRun, trainer: Trainer) -> None:
    """Cold, with caches of graphs forced to miss so that Inductor schedules and can be watched; then warm."""
    import torch._dynamo

    from costlab.probes.fusion.inductor import FusionCollector

    run.voice.enter("compile", "cold")
    if run.device.type == "cpu":
        name_cpu_kernels()
    with FusionCollector(trainer.wrapped.base, run.salt) as collector:
        run.compile_rows += first_steps(run, trainer, "cold")
        run.fusion = collector.trace()
        run.voice.enter("compile", "warm")
        torch._dynamo.reset()
        run.compile_rows += first_steps(run, trainer, "warm")


def name_cpu_kernels() -> None:
    """Let the profiler see Inductor's C++ kernels by name; about a microsecond a kernel."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True


def first_steps(run: RankRun, trainer: Trainer, which: str) -> list[CompileRow]:
    """Two steps: the first compiles forward and backward, the second shows what recompiles."""
    from costlab.probes.compile_events import CompileEvents

    with CompileEvents() as events:
        times = [trainer.timed_step() / 1e3 for _ in range(2)]
    run.voice.log(f"{which} first step {times[0]:.1f} s, second {times[1]:.2f} s")
    rows = events.rows(run.rank, which)  # type: ignore[arg-type]
    rows.append(CompileRow(rank=run.rank, kind="phase", name="first step", seconds=times[0], run=which))  # type: ignore[arg-type]
    rows.append(CompileRow(rank=run.rank, kind="phase", name="second step", seconds=times[1], run=which))  # type: ignore[arg-type]
    return rows


def measure_phase(run: RankRun, trainer: Trainer) -> None:
    """The timed steps: no profiler, no annotations, all ranks starting together."""
    import torch.distributed as dist

    from costlab.probes.collector import freeze, settle
    from costlab.probes.parity import gradient_rows
    from costlab.probes.steps import lead_steps, measure

    steps, lead = run.spec.steps, lead_steps(run.device, run.spec.warmup)
    run.voice.enter("measure", f"{steps} steps")
    started = time.monotonic()

    def told(index: int, ms: float) -> None:
        run.voice.step(index, ms, "timed")
        eta = (time.monotonic() - started) / (index + 1) * (steps - index - 1)
        run.voice.progress(index + 1, steps, f"{ms:.1f} ms", eta)

    if run.spec.gc == "freeze":
        run.voice.log(f"{freeze():,} objects are left out of garbage collections")
    else:
        settle()
    dist.barrier()
    with run.memory.phase("measure"), run.energy.phase("measure", steps=lead + steps):
        rows = measure(trainer, steps, run.rank, told, lead=lead)
    for reason in run.energy.reasons():
        run.voice.log(f"no energy figure: {reason}")
    run.step_rows += rows
    run.write(StepRow, run.step_rows)
    run.write(MemoryRow, run.memory.rows(run.rank))
    run.write(PowerRow, run.energy.rows(run.rank))
    if not run.spec.lean:
        run.write(GradientRow, gradient_rows(trainer, run.rank))


def profile_phase(run: RankRun, trainer: Trainer) -> None:
    """A few profiled steps for shares, kernels and collectives; their times are never reported as step times."""
    from costlab.probes.profiling import profile_steps

    spec = run.spec
    run.voice.enter("profile", f"{spec.profile_steps} steps")
    result = profile_steps(run, trainer)
    run.step_rows += result.steps
    run.write(StepRow, run.step_rows)
    run.write(CollectiveRow, result.collectives)
    run.write(PartRow, result.parts)
    run.write(SpanRow, result.spans)
    run.write(MissRow, result.misses)
    run.write(KernelRow, result.kernels)
    run.write(PatternRow, result.patterns)
    if run.rank == 0:
        run.write(KernelSourceRow, result.sources)


def checkpoint_budget(run: RankRun) -> float:
    """Seconds for the checkpoint phase, rank 0's on all ranks: as asked, or what is left of RUN_TARGET_S."""
    import torch
    import torch.distributed as dist

    left = RUN_TARGET_S - AFTER_CHECKPOINT_S - (time.monotonic() - run.started)
    budget = [run.spec.checkpoint_budget_s or min(max(left, LEAST_BUDGET_S), MOST_BUDGET_S)]
    dist.broadcast_object_list(budget, src=0, device=torch.device("cpu"))
    return budget[0]


def checkpoint_phase(run: RankRun, trainer: Trainer) -> None:
    """Save and load while steps run."""
    from costlab.probes.checkpoint import measure as measure_checkpoint
    from costlab.probes.checkpoint_resume import Steps
    from costlab.probes.checkpoint_savers import savers

    run.voice.enter("checkpoint")

    def emit(what: str, done: int, total: int) -> None:
        run.voice.progress(done, total, what)

    steps = Steps(trainer)
    found = measure_checkpoint(
        trainer.wrapped.model,
        trainer.optimizer,
        steps.timed,
        directory=run.run_dir / "raw" / "checkpoints",
        rank=run.rank,
        world=run.world,
        device=run.device,
        steps=run.spec.checkpoint_steps,
        emit=emit,
        budget_s=checkpoint_budget(run),
        configurations=savers(run.device, run.world, run.spec.checkpoint_codec, only=run.spec.chosen_save_only),
        repeatable=None if run.spec.chosen_save_only else steps,  # a leg of a what-if asks for the stall alone
        copy_gbps=run.facts.copy_gbps,
        with_ceilings=not run.spec.chosen_save_only,
    )
    run.step_rows += found.steps
    run.write(StepRow, run.step_rows)
    run.write(CheckpointRow, found.rows)
    run.write(CheckpointStageRow, found.stages)
    run.write(CheckpointCodecRow, found.codecs)
    run.write(ResumeRow, found.resumed)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

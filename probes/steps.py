"""The training step itself, annotated only while it is profiled, and its timing without a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from costlab.probes.collector import Watch, watched
from costlab.probes.parallel import Wrapped
from costlab.probes.records import StepRow
from costlab.probes.workloads.base import Workload, one_number
from costlab.probes.workloads.batches import to_device

# At a full rate from the first step AdamW's path is chaotic: two runs of one seed part within ten steps, and no loss
# can be compared with another.
RISE_STEPS = 100
# The last warm-up steps on CUDA run into the timed ones without a wait: the host is then as far ahead as in training.
LEAD_STEPS = 4


@dataclass
class Trainer:
    """Runs steps of one workload: data, forward, backward, optimizer.

    The learning rate rises linearly to the optimizer's over the first RISE_STEPS steps, as in trainings.
    """

    workload: Workload
    wrapped: Wrapped
    optimizer: torch.optim.Optimizer
    device: torch.device
    annotate: bool = False
    accumulation: int = 1  # micro-batches of a step; gradients are communicated with the last
    index: int = 0
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _phase(self, name: str) -> AbstractContextManager[Any]:
        return record_function(f"costlab::phase::{name}") if self.annotate else nullcontext()

    def step(self) -> Tensor:
        """One training step, enqueued but not waited for; returns the detached loss, the mean over micro-batches."""
        losses = [self._micro_batch(n) for n in range(self.accumulation)]
        with self._phase("optimizer"):
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * min(1.0, (self.index + 1) / RISE_STEPS)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.index += 1
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _micro_batch(self, number: int) -> Tensor:
        """Forward and backward of one micro-batch; its detached loss."""
        with self._phase("data"):
            batch = to_device(self.workload.batch(self.index * self.accumulation + number), self.device)
        last = number + 1 == self.accumulation
        with gradients_communicated(self.wrapped.model, last) if self.accumulation > 1 else nullcontext():
            with self._phase("forward"), self.wrapped.forward_context():
                loss = one_number(self.workload.loss(self.wrapped.model, batch))
            with self._phase("backward"):
                (loss / self.accumulation if self.accumulation > 1 else loss).backward()
        return loss.detach()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed_step(self) -> float:
        """One step from idle device to idle device, ms of wall time."""
        self.synchronize()
        start = time.perf_counter()
        self.step()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3


def gradients_communicated(model: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Whether the backward pass inside communicates its gradients: DDP's and FSDP2's ways to say so."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    return nullcontext()


def lead_steps(device: torch.device, warmup: int) -> int:
    """How many of the warm-up steps belong right before the timed ones; none on CPU, where nothing runs ahead."""
    return min(warmup, LEAD_STEPS) if device.type == "cuda" else 0


def measure(
    trainer: Trainer, steps: int, rank: int, told: Callable[[int, float], None], *, lead: int = 0
) -> list[StepRow]:
    """Time `steps` consecutive steps, after `lead` that are not timed.

    On CUDA a step lasts from one step's end event to the next's, so steps follow each other as in training and
    nothing waits for the host in between; on CPU the monotonic clock is read between steps. `told` is called
    with live figures only (on CUDA the host's pace), never used as the measurement.
    """
    if trainer.device.type == "cuda":
        trainer.synchronize()
    for _ in range(lead):
        trainer.step()
    with watched() as watch:
        if trainer.device.type == "cuda":
            return _measure_cuda(trainer, steps, rank, told, watch)
        return _measure_cpu(trainer, steps, rank, told, watch)


def _measure_cpu(
    trainer: Trainer, steps: int, rank: int, told: Callable[[int, float], None], watch: Watch
) -> list[StepRow]:
    rows = []
    for i in range(steps):
        began = time.time_ns()
        start = time.perf_counter()
        loss = trainer.step()
        ms = (time.perf_counter() - start) * 1e3
        paused = watch.take()
        value = float(loss.item())
        row = StepRow(rank=rank, step=i, role="timed", ms=ms, host_ms=ms, loss=value, start_ns=began, gc_ms=paused)
        rows.append(row)
        told(i, ms)
    return rows


def _measure_cuda(
    trainer: Trainer, steps: int, rank: int, told: Callable[[int, float], None], watch: Watch
) -> list[StepRow]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    host, began, losses, paused = [], [], [], []
    events[0].record()
    for i in range(steps):
        began.append(time.time_ns())
        start = time.perf_counter()
        losses.append(trainer.step())
        events[i + 1].record()
        host.append((time.perf_counter() - start) * 1e3)
        paused.append(watch.take())
        told(i, host[-1])
    trainer.synchronize()
    return [
        StepRow(
            rank=rank,
            step=i,
            role="timed",
            ms=events[i].elapsed_time(events[i + 1]),
            host_ms=host[i],
            loss=float(losses[i].item()),
            start_ns=began[i],
            gc_ms=paused[i],
        )
        for i in range(steps)
    ]


@contextmanager
def annotated(trainer: Trainer) -> Iterator[None]:
    """Name phases, layers and compiled frames for the profiler; everything is removed on exit.

    Compiled blocks are wrapped around their compiled call, outside the graph, so nothing recompiles. Modules
    inside a compiled region get no hooks: a hook there would be traced and change the graph.
    """
    undo: list[Callable[[], None]] = []
    wrapped = trainer.wrapped
    for name, module in wrapped.base.named_modules():
        if name in wrapped.compiled:
            undo.append(_wrap_compiled(module, name))
        elif not _inside(name, wrapped.compiled):
            undo += _hook(module, name)
    trainer.annotate = True
    try:
        yield
    finally:
        trainer.annotate = False
        for restore in reversed(undo):
            restore()


def _inside(name: str, compiled: list[str]) -> bool:
    return any(c in ("", name) or name.startswith(f"{c}.") for c in compiled)


def _wrap_compiled(module: nn.Module, name: str) -> Callable[[], None]:
    original = module._compiled_call_impl
    if original is None:
        return lambda: None

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"costlab::layer::{name}"), record_function(f"costlab::frame::{name}"):
            return original(*args, **kwargs)

    module._compiled_call_impl = call

    def restore() -> None:
        module._compiled_call_impl = original

    return restore


def _hook(module: nn.Module, name: str) -> list[Callable[[], None]]:
    open_ranges: list[record_function] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        ranges = record_function(f"costlab::layer::{name}")
        ranges.__enter__()
        open_ranges.append(ranges)

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    handles = (
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    )
    return [handle.remove for handle in handles]

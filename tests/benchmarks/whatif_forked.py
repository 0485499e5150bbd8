"""Legs of the what-if benchmark as forks of a process that has imported torch and nothing else.

Every leg is a process of its own that makes its own device context, model, optimizer and memory, and is timed by the
product's own step timing; what it is spared is the import. All legs of a trial are prepared side by side, which does
not count, and then measured strictly one after the other in the engine's order, while the others wait for their turn
without work on the device. The first is a leg whose figure is thrown away: it brings the device to its clocks.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from costlab.app.whatif.spec import BASELINE, CONTROL

if TYPE_CHECKING:
    from costlab.probes.steps import Trainer

PREPARED_S = 90.0  # until a leg must be ready, and then measured


class LegError(Exception):
    """A leg died, was silent or failed; the message is its own last word."""


@dataclass(frozen=True)
class Recipe:
    """What all legs have in common. `device` is "cuda" or "cpu"; `threads` are a CPU leg's."""

    workload: Path
    device: str
    steps: int
    warmup: int
    threads: int
    compiled: bool = False


@dataclass(frozen=True)
class Measured:
    """Rounds of log median step times by arm, and how long it took to prepare their legs."""

    rounds: list[Mapping[str, float]]
    prepared_s: float


def leg(turn: Connection, recipe: Recipe, size: str, seed: int) -> None:
    """A leg's process: prepare, say so, wait for its turn, measure, answer with the step times in ms."""
    try:
        trainer = prepare(recipe, size, seed)
        turn.send(("ready", ""))
        turn.recv()
        turn.send(("measured", timed(trainer, recipe)))
        turn.recv()  # leaving now would disturb the leg after this one
    except EOFError:
        pass  # the benchmark is gone
    except Exception as error:
        turn.send(("failed", f"{type(error).__name__}: {error}"))
    os._exit(0)  # tearing a device context down takes longer than the leg


def preload() -> None:
    """Import what legs need, so that they need not; touches no device and starts no thread that a fork would miss."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other way to ask for devices spoils forks
    import torch._dynamo  # noqa: F401  # the optimizer asks for it

    from costlab.probes import parallel, steps  # noqa: F401
    from costlab.probes.workloads import loader  # noqa: F401


def prepare(recipe: Recipe, size: str, seed: int) -> Trainer:
    """The product's trainer around the workload; the first steps are done."""
    import torch

    from costlab.probes.parallel import Wrapped, make_optimizer
    from costlab.probes.spec import RunSpec
    from costlab.probes.steps import Trainer
    from costlab.probes.workloads.base import WorkloadContext
    from costlab.probes.workloads.loader import load

    if recipe.device == "cpu":
        torch.set_num_threads(recipe.threads)
    device = torch.device("cuda", 0) if recipe.device == "cuda" else torch.device("cpu")
    workload = load(f"{recipe.workload}:make", WorkloadContext(device, torch.float32, size, 0, 0, seed, 0, 1))
    workload.model.to(device).train()
    if recipe.compiled:
        workload.model.compile()
    wrapped = Wrapped(model=workload.model, base=workload.model, blocks=[])
    optimizer = make_optimizer(wrapped, RunSpec())
    trainer = Trainer(workload=workload, wrapped=wrapped, optimizer=optimizer, device=device)
    for _ in range(2):
        trainer.timed_step()
    return trainer


def timed(trainer: Trainer, recipe: Recipe) -> list[float]:
    """Warm-up steps, then the timed ones."""
    from costlab.probes.steps import lead_steps, measure

    lead = lead_steps(trainer.device, recipe.warmup)
    for _ in range(recipe.warmup - lead):
        trainer.timed_step()
    return [row.ms for row in measure(trainer, recipe.steps, 0, lambda _index, _ms: None, lead=lead)]


def answer(turn: Connection, wanted: str) -> list[float]:
    """What a leg says next; LegError where it is not what is wanted."""
    if not turn.poll(PREPARED_S):
        raise LegError("a leg was silent")
    try:
        said, what = turn.recv()
    except (EOFError, ConnectionError) as error:
        raise LegError("a leg died") from error
    if said != wanted:
        raise LegError(str(what))
    return what  # type: ignore[no-any-return]


def trial(recipe: Recipe, variants: Sequence[str], rounds: int, seed: int, at_once: int) -> Measured:
    """One what-if: rounds of log median step times of baseline, variants and control, each a process of its own.

    `at_once` legs are prepared at the same time. LegError when one of them fails.
    """
    arms = [BASELINE, *variants, CONTROL]
    order = [(r, arm) for r in range(rounds) for arm in (arms[::-1] if r % 2 else arms)]
    context = multiprocessing.get_context("fork")
    started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
    ready, began = 0, time.monotonic()
    try:
        for r, arm in [(0, BASELINE), *order]:
            here, there = context.Pipe()
            size = arm if arm in variants else "none"
            process = context.Process(target=leg, args=(there, recipe, size, seed + r), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
            while len(started) - ready >= at_once or (len(started) == len(order) + 1 and ready < len(started)):
                answer(started[ready][1], "ready")
                ready += 1
        prepared_s = time.monotonic() - began
        found: list[dict[str, float]] = [{} for _ in range(rounds)]
        for (_, turn), place in zip(started, [None, *order], strict=True):
            turn.send("go")
            times = answer(turn, "measured")
            if place is not None:
                found[place[0]][place[1]] = math.log(statistics.median(times))
        return Measured(list(found), prepared_s)
    finally:
        for process, turn in started:
            turn.close()
            process.kill()
        for process, _ in started:
            process.join()

"""Legs without processes: a launcher that writes run directories of known speed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from costlab.probes.launch import LaunchError
from costlab.probes.records import AnyEvent, FailureInfo, Manifest, Progress
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes
from tests.app.make_run import write_example_run

CUDA_OOM = (
    "rank 0 failed in phase 'warm-up': CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    " 139.72 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 139.2 GiB memory in use."
)


class FakeMachine:
    """Makes launchers whose legs take `slowdown(spec)` times as long as the example's, with noise from leg to leg."""

    def __init__(self, slowdown: Callable[[RunSpec], float] = lambda _: 1.0, noise: float = 0.0) -> None:
        self.slowdown = slowdown
        self.rng = random.Random(7)
        self.noise = noise
        self.started: list[RunSpec] = []
        self.fail: Callable[[RunSpec], FailureInfo | str | None] = lambda _: None
        self.on_leg: Callable[[FakeLeg], None] = lambda _: None

    def __call__(self, spec: RunSpec, run_dir: Path) -> FakeLeg:
        return FakeLeg(self, spec, run_dir)


class FakeLeg:
    """One leg."""

    def __init__(self, machine: FakeMachine, spec: RunSpec, run_dir: Path) -> None:
        self.machine, self.spec, self.run_dir = machine, spec, run_dir
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def run(self, on_event: Callable[[AnyEvent], None]) -> Manifest:
        machine = self.machine
        machine.started.append(self.spec)
        on_event(Progress(t=0.0, rank=0, phase="measure", done=1, total=2))
        machine.on_leg(self)
        problem = machine.fail(self.spec)
        if isinstance(problem, str):
            raise LaunchError(problem)
        speed = 1.0 / (machine.slowdown(self.spec) * (1 + machine.rng.gauss(0, machine.noise)))
        status = "cancelled" if self.cancelled else "failed" if problem else "complete"
        write_example_run(
            self.run_dir,
            run_id=self.run_dir.name,
            ranks=1,
            layers=2,
            idle=0.0,
            speed=speed,
            seed=self.spec.seed,
            steps=self.spec.steps,
            profile_steps=self.spec.profile_steps,
            status=status,
            price=2.0,
        )
        if problem is not None:
            import msgspec

            path = self.run_dir / "manifest.json"
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            manifest.failure = problem
            write_bytes(path, msgspec.json.encode(manifest))
        return Manifest(run_id=self.run_dir.name, created="", status=status)  # type: ignore[arg-type]


def out_of_memory() -> FailureInfo:
    """A leg that does not fit."""
    return FailureInfo(kind="out-of-memory", rank=0, phase="warm-up", message=CUDA_OOM, advice="lower --batch")

"""What the sections of the checkpoint benchmark share: results, timing, the training step and the stall."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GB = 1e9


@dataclass
class Result:
    """One line: a value, what it is compared to, and how it was obtained."""

    metric: str
    value: float | str | None
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    n: int = 1
    command: str = ""


@dataclass
class Bench:
    """Sizes, the workload and the results so far."""

    tiny: bool
    root: Path
    command: str
    trace: bool = False
    results: list[Result] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    disk: list[float] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the workload runs."""
        return torch.device("cpu" if self.tiny or not torch.cuda.is_available() else "cuda")

    def add(
        self, metric: str, value: float | str | None, unit: str, peer: str = "", peer_value: float | None = None,
        ratio: float | None = None, n: int = 1,
    ) -> None:  # fmt: skip
        """Record a result and print it."""
        self.results.append(Result(metric, value, unit, peer, peer_value, ratio, n, self.command))
        shown = f"{value:.5g}" if isinstance(value, float) else str(value)
        against = f"   {peer} {peer_value:.5g}" if peer_value is not None else ""
        print(f"  {metric:<44} {shown:>12} {unit:<8}{against}" + (f"   ratio {ratio:.4g}" if ratio is not None else ""))

    def section(self, name: str, work: Callable[[Bench], None]) -> None:
        """Run a section; an error becomes a result."""
        print(f"-- {name}", flush=True)
        start = time.perf_counter()
        try:
            work(self)
        except Exception as error:
            traceback.print_exc()
            self.results.append(
                Result(f"{name}: error", f"{type(error).__name__}: {error}"[:500], "", command=self.command)
            )
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"   {time.perf_counter() - start:.1f} s", flush=True)


def sync(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(device: torch.device, work: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Median seconds of a call over `repeats`, by events on a GPU."""
    work()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(inner):
                work()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1e3 / inner)
        else:
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


class Workload:
    """A stack of linear layers and norms in fp32 with AdamW: weights and moments are 4 GiB; bf16 autocast."""

    def __init__(self, bench: Bench) -> None:
        torch.manual_seed(0)
        width, layers, self.tokens = (64, 4, 32) if bench.tiny else (2048, 85, 16384)
        self.device = bench.device
        parts = [(torch.nn.Linear(width, width, bias=False), torch.nn.LayerNorm(width)) for _ in range(layers)]
        self.model = torch.nn.Sequential(*[layer for pair in parts for layer in pair]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        self.batch = torch.randn(self.tokens, width, device=self.device)
        for _ in range(3):
            self.step()
        sync(self.device)

    def step(self) -> None:
        """One training step; nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Nested state as a training script would pass it."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def pace(self, steps: int) -> float:
        """Seconds a step without a save."""
        sync(self.device)
        start = time.perf_counter()
        for number in range(steps):
            self.step()
            if number % 4 == 3:
                sync(self.device)
        sync(self.device)
        return (time.perf_counter() - start) / steps


def stall_of(load: Workload, save: Callable[[], Callable[[], bool]], bench: Bench, least: int = 6) -> float:
    """Extra seconds of the steps from a save until it is done; the pace is measured on both sides."""
    control = 2 if bench.tiny else 12
    before = load.pace(control)
    start = time.perf_counter()
    done, steps = save(), 0
    while steps < least or not done():
        load.step()
        steps += 1
        if steps % 4 == 0:
            sync(load.device)
        if time.perf_counter() - start > 90:
            raise RuntimeError("not done after 90 s")
    sync(load.device)
    total = time.perf_counter() - start
    return total - steps * (before + load.pace(control)) / 2

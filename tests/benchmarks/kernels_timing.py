"""Timing, checking and inputs for the kernels' benchmark and its tuning sweeps.

Two times of each contestant, both medians of a CUDA-event pair around every single call, inputs rotated past the L2:

- as called: calls issued one after the other from Python, as a user's loop does. What the host needs longer than the
  device is in it. These are the figures without suffix.
- device (`_device`): calls enqueued behind a sleep kernel, so that the device never waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[int], object]
COMMAND = "python tests/benchmarks/kernels_bench.py"
BF16 = torch.bfloat16
TOLERANCE = 1e-2  # of the norm, for bf16 operands


@dataclass
class Report:
    """What the run has found so far."""

    samples: int
    command: str = COMMAND
    copy_gbs: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        metric: str,
        value: float | None,
        unit: str,
        peer: str,
        peer_value: float | None,
        ratio: float | None,
        **more: Any,
    ) -> None:
        """Add one metric and print it."""
        row = {"metric": metric, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio}
        self.results.append({**row, "n": self.samples, "command": self.command, **more})
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (value, peer_value, ratio)]
        print(
            f"{metric:34s} {shown[0]:>9s} {unit:7s} {peer:22s} {shown[1]:>9s}  ratio {shown[2]} {more or ''}",
            flush=True,
        )

    def faster(self, metric: str, ours: Timing, peers: dict[str, Timing | None]) -> None:
        """Ratio of the quickest peer's time to ours, as called and on the device; None if no peer ran."""
        ran = {k: v for k, v in peers.items() if v is not None}
        for suffix, pick in DEFINITIONS.items():
            value = pick(ours)
            times = {k: pick(v) for k, v in ran.items()}
            best = min(times, key=lambda k: times[k]) if times else None
            peer = times[best] if best else None
            self.add(metric + suffix, value, "ms", best or "none", peer, peer / value if peer else None, peers=times)

    def of_copy(self, metric: str, ours: Timing, size: int) -> None:
        """Achieved share of the copy ceiling, from the fewest bytes the kernel must move; both times."""
        for suffix, pick in DEFINITIONS.items():
            gbs = size / pick(ours) / 1e6
            self.add(metric + suffix, gbs, "GB/s", "device copy", self.copy_gbs, gbs / self.copy_gbs, ms=pick(ours))


@dataclass(frozen=True)
class Timing:
    """Medians in ms of one contestant by both definitions, see the module."""

    called: float
    device: float


DEFINITIONS: dict[str, Callable[[Timing], float]] = {"": lambda t: t.called, "_device": lambda t: t.device}


def device_ms(call: Call, samples: int, batch: int = 10) -> float:
    """Median time of `call(i)` in ms; each batch of calls waits behind a sleep kernel until all are enqueued."""
    for i in range(3):
        call(i)
    times: list[float] = []
    while len(times) < samples:
        torch.cuda.synchronize()
        torch.cuda._sleep(30_000_000)
        times += _elapsed(call, batch)
    return statistics.median(times)


def called_ms(call: Call, samples: int) -> float:
    """Median time of a call as issued from Python, whatever the host needs longer than the device included."""
    for i in range(10):
        call(i)
    torch.cuda.synchronize()
    return statistics.median(_elapsed(call, samples))


def _elapsed(call: Call, count: int) -> list[float]:
    pairs = []
    for i in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(i)
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def timing(call: Call, samples: int) -> Timing:
    """Both times of a call."""
    return Timing(called_ms(call, samples), device_ms(call, samples))


def host_us(call: Call, samples: int) -> float:
    """Median host time of a call in us, from its start to its return, the device idle before each."""
    for i in range(10):
        call(i)
    times = []
    for i in range(samples):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(i)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def attempt(name: str, call: Call, samples: int) -> Timing | None:
    """Both times of a peer, or None with the reason printed if it fails."""
    try:
        return timing(call, samples)
    except Exception as error:
        print(f"  peer {name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def error_of(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp32 or wider."""
    return ((value.to(reference.dtype) - reference).norm() / reference.norm()).item()


def check(name: str, values: Iterable[Tensor], references: Iterable[Tensor], tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError if a value is further from its reference than `tolerance`."""
    errors = [error_of(v, r) for v, r in zip(values, references, strict=True)]
    print(f"  {name}: relative errors {', '.join(f'{e:.1e}' for e in errors)}", flush=True)
    assert all(e < tolerance for e in errors), f"{name} is wrong: {errors}"


def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Random bf16 CUDA tensor that requires a gradient."""
    return (torch.randn(*shape, device="cuda") * scale + shift).to(BF16).requires_grad_()


def both_ways(function: Callable[..., Any], inputs: list[list[Tensor]], gradients: list[list[Tensor]]) -> Call:
    """Forward and backward of `function` over rotating sets of inputs and output gradients."""

    def call(i: int) -> object:
        args, grads = inputs[i % len(inputs)], gradients[i % len(gradients)]
        out = function(*args)
        return torch.autograd.grad(out, [a for a in args if a.requires_grad], grads)

    return call


def forward_only(function: Callable[..., Any], inputs: list[list[Tensor]]) -> Call:
    """Forward of `function` over rotating inputs, without autograd."""

    def call(i: int) -> object:
        with torch.no_grad():
            return function(*inputs[i % len(inputs)])

    return call


def widened(tensors: Iterable[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Detached copies in a wider dtype that require gradients where the originals did."""
    return [t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]


def gradients_of(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs and input gradients of `function`."""
    out = function(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    return outs + list(torch.autograd.grad(outs, [a for a in inputs if a.requires_grad], grads))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of the function, static shapes."""
    return torch.compile(function, dynamic=False)


def norm_sets(rows: int, cols: int, parameters: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    inputs = [
        [leaf(rows, cols), leaf(rows, cols), *(leaf(cols, shift=1.0, scale=0.1) for _ in range(parameters))]
        for _ in range(2)
    ]
    return inputs, [[leaf(rows, cols).detach(), leaf(rows, cols).detach()] for _ in range(2)]


def extra_mib(call: Call) -> float:
    """Peak memory of one call above what was allocated before it, in MiB, on a warm second call."""
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ce_sets() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    tokens, width, vocab = 8192, 2048, 32000
    inputs = [
        [leaf(tokens, width), leaf(vocab, width, scale=0.02), torch.randint(0, vocab, (tokens,), device="cuda")]
        for _ in range(2)
    ]
    return inputs, [[torch.ones((), device="cuda")]]

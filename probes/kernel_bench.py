"""Times every fused kernel against eager, Inductor and what the device can do: `python -m ... RESULT SPEC_JSON`.

Two medians of each: of a CUDA-event pair around single calls issued one after the other from Python, and of the same
calls enqueued behind a sleep kernel, so that only the device counts. Inputs rotate among sets larger than the L2 cache.
Progress goes to standard output, one line a kernel; the result file is written anew after each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from costlab.probes.ceilings import copy_gbps, matmul_tflops
from costlab.probes.kernel_spec import KernelBench, KernelRow, KernelSpec, KernelTime
from costlab.probes.tables import write_bytes

BF16 = torch.bfloat16
SETS = 3
Function = Callable[..., Any]
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One kernel: the fused and the eager function of the same inputs, and the least traffic or arithmetic."""

    shape: str
    fused: Function
    eager: Function
    inputs: list[list[Tensor]]
    forward_bytes: int
    both_bytes: int
    forward_flops: int = 0


def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Random bf16 leaf on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale + shift).to(BF16).requires_grad_()


def _norm(center: bool) -> Case:
    from costlab.kernels.fused.layer_norm import add_layer_norm
    from costlab.kernels.fused.rms_norm import add_rms_norm

    rows, cols = 16384, 4096
    inputs = [
        [draw(rows, cols), draw(rows, cols), *(draw(cols, shift=1.0, scale=0.1) for _ in range(1 + center))]
        for _ in range(2)
    ]

    def eager(x: Tensor, r: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        if center:
            return F.layer_norm(h, (cols,), w[0], w[1], 1e-5), h
        return F.rms_norm(h, (cols,), w[0], 1e-5), h

    fused: Function = add_layer_norm if center else add_rms_norm
    size = rows * cols * 2
    return Case(f"{rows} x {cols}", lambda *a: fused(*a, 1e-5), eager, inputs, 4 * size, 8 * size)


def _gated() -> Case:
    from costlab.kernels.fused.gated import gated

    n = 8192
    size = n * n * 2
    inputs = [[draw(n, n), draw(n, n)] for _ in range(2)]
    return Case(f"{n} x {n}", gated, lambda a, b: F.silu(a) * b, inputs, 3 * size, 8 * size)


def _rope(norm: bool) -> Case:
    from costlab.kernels.fused.rope import norm_rotate_reference, rope, rotate_reference

    batch, seq, heads, kv, dim = 8, 2048, 32, 8, 128
    angle = torch.rand(seq, dim // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    weights = [draw(dim, shift=1.0, scale=0.1) for _ in range(2)] if norm else []
    inputs = [[draw(batch, seq, heads, dim), draw(batch, seq, kv, dim), *weights] for _ in range(SETS)]

    def fused(q: Tensor, k: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, (w[0], w[1]) if w else None)

    def eager(q: Tensor, k: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if w:
            return norm_rotate_reference(q, w[0], cos, sin, 1e-6), norm_rotate_reference(k, w[1], cos, sin, 1e-6)
        return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)

    size = 2 * batch * seq * (heads + kv) * dim
    shape = f"{batch} x {seq}, {heads} + {kv} heads of {dim}"
    return Case(shape, fused, eager, inputs, 2 * size, (5 if norm else 4) * size)


def _batch_norm_relu(shortcut: bool) -> Case:
    from costlab.kernels.fused.batch_norm_relu import batch_norm_relu

    shape = (64, 256, 56, 56)
    parameters = [
        torch.ones(256, device="cuda", requires_grad=True),
        torch.zeros(256, device="cuda", requires_grad=True),
    ]

    def image() -> Tensor:
        return draw(*shape).detach().contiguous(memory_format=torch.channels_last).requires_grad_()

    def eager(x: Tensor, g: Tensor, b: Tensor, *beside: Tensor) -> Tensor:
        normed = F.batch_norm(x, None, None, g, b, True, 0.1, 1e-5)
        return F.relu(normed + beside[0] if beside else normed)

    def fused(x: Tensor, g: Tensor, b: Tensor, *beside: Tensor) -> Tensor:
        return batch_norm_relu(x, g, b, 1e-5, *beside)[0]

    size = 2 * 64 * 256 * 56 * 56
    text = " x ".join(map(str, shape)) + ", channels-last"
    inputs = [[image(), *parameters, *([image()] if shortcut else [])] for _ in range(2)]
    forward, both = (4, 12) if shortcut else (3, 8)
    return Case(text, fused, eager, inputs, forward * size, both * size)


def _ffn_layer_norm() -> Case:
    from costlab.kernels.fused.ffn_layer_norm import ffn_layer_norm

    tokens, width, hidden = 8192, 2048, 8192
    parameters = [
        draw(hidden, width, scale=0.02), draw(hidden, scale=0.1), draw(width, hidden, scale=0.02),
        draw(width, scale=0.1), draw(width, shift=1.0, scale=0.1), draw(width, scale=0.1),
    ]  # fmt: skip

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, g: Tensor, b: Tensor) -> Tensor:
        h = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
        return F.layer_norm(x + h, (width,), g, b, 1e-5)

    def fused(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return ffn_layer_norm(x, w1, b1, w2, b2, g, b, 1e-5, "tanh")

    inputs = [[draw(tokens, width), *parameters] for _ in range(2)]
    return Case(f"{tokens} x {width}, hidden {hidden}", fused, eager, inputs, 0, 0, 4 * tokens * width * hidden)


def _linear_cross_entropy() -> Case:
    from costlab.kernels.fused.linear_cross_entropy import linear_cross_entropy

    tokens, width, vocab = 8192, 2048, 32000
    inputs = [
        [draw(tokens, width), draw(vocab, width, scale=0.02), torch.randint(0, vocab, (tokens,), device="cuda")]
        for _ in range(2)
    ]

    def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy((x @ w.t()).float(), t)

    return Case(f"{tokens} x {width} -> {vocab}", linear_cross_entropy, eager, inputs, 0, 0, 2 * tokens * width * vocab)


CASES: dict[str, Callable[[], Case]] = {
    "add_rms_norm": lambda: _norm(False),
    "add_layer_norm": lambda: _norm(True),
    "gated": _gated,
    "rope": lambda: _rope(False),
    "norm_rope": lambda: _rope(True),
    "batch_norm_relu": lambda: _batch_norm_relu(False),
    "batch_norm_add_relu": lambda: _batch_norm_relu(True),
    "ffn_layer_norm": _ffn_layer_norm,
    "linear_cross_entropy": _linear_cross_entropy,
}


def _outs(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def _forward(function: Function, case: Case) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        with torch.no_grad():
            return function(*case.inputs[i % len(case.inputs)])

    return call


def _both(function: Function, case: Case, gradients: list[Tensor]) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        inputs = case.inputs[i % len(case.inputs)]
        wanted = [t for t in inputs if t.requires_grad]
        return torch.autograd.grad(_outs(function(*inputs)), wanted, gradients)

    return call


def _elapsed(call: Callable[[int], Any], count: int) -> list[float]:
    pairs = []
    for i in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(i)
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def timed(call: Callable[[int], Any], samples: int) -> KernelTime:
    """Both medians of `call(i)`."""
    for i in range(5):
        call(i)
    torch.cuda.synchronize()
    called = statistics.median(_elapsed(call, samples))
    device: list[float] = []
    while len(device) < samples:
        torch.cuda.synchronize()
        torch.cuda._sleep(30_000_000)
        device += _elapsed(call, 10)
    return KernelTime(called_ms=called, device_ms=statistics.median(device))


def difference(values: list[Tensor], references: list[Tensor]) -> float:
    """Largest relative difference by norm."""
    pairs = zip(values, references, strict=True)
    return max(float(((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()) for a, b in pairs)


def measure(name: str, case: Case, spec: KernelSpec, bench: KernelBench) -> list[KernelRow]:
    """Forward, and forward with backward, of one kernel."""
    ways: dict[str, Function] = {"fused": case.fused, "eager": case.eager}
    if spec.inductor:
        ways["inductor"] = torch.compile(case.eager, dynamic=False)
    gradients = [torch.ones_like(t) for t in _outs(_forward(case.fused, case)(0))]
    rows = []
    for way, passes in (("forward", 1), ("forward + backward", 3)):
        times: dict[str, KernelTime] = {}
        failed: dict[str, str] = {}
        calls = {k: _forward(f, case) if passes == 1 else _both(f, case, gradients) for k, f in ways.items()}
        error = difference(_outs(calls["fused"](0)), _outs(calls["eager"](0)))
        for kind, call in calls.items():
            try:
                times[kind] = timed(call, spec.samples)
            except Exception as reason:  # one contestant's failure is a result, not the end
                failed[kind] = f"{type(reason).__name__}: {str(reason)[:300]}"
        flops = case.forward_flops * passes
        moved = case.forward_bytes if passes == 1 else case.both_bytes
        ceiling = flops / bench.matmul_tflops / 1e9 if flops else moved / bench.copy_gbs / 1e6
        rows.append(
            KernelRow(
                kernel=name, shape=case.shape, way=way, times=times, failed=failed, error=error,
                ceiling="matmul" if flops else "copy", ceiling_ms=ceiling, bytes_moved=moved, flops=flops,
            )
        )  # fmt: skip
    return rows


def unavailable() -> str:
    """Why nothing can be measured here, "" where it can."""
    if not torch.cuda.is_available():
        return "the fused kernels are Triton kernels for CUDA devices, and torch finds none here"
    from costlab.kernels.fused.launch import usable

    if not usable(torch.empty(1, device="cuda")):
        return "the fused kernels need Triton, which this installation of torch does not have"
    return ""


def main(result: Path, spec: KernelSpec) -> None:
    """Measure and write; what cannot be measured at all is said in the result."""
    reason = unavailable()
    if reason:
        write_bytes(result, msgspec.json.encode(KernelBench(unavailable=reason)))
        return
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = KernelBench(
        device=torch.cuda.get_device_name(), torch=torch.__version__, triton=__import__("triton").__version__,
        copy_gbs=copy_gbps(device)[0], matmul_tflops=matmul_tflops(device, BF16)[0], samples=spec.samples,
    )  # fmt: skip
    for name in spec.kernels:
        print(name, flush=True)
        try:
            rows = measure(name, CASES[name](), spec, bench)
        except Exception as error:
            failed = {"fused": f"{type(error).__name__}: {str(error)[:300]}"}
            rows = [KernelRow(kernel=name, shape="", way="forward + backward", times={}, failed=failed)]
        bench = msgspec.structs.replace(bench, rows=(*bench.rows, *rows))
        write_bytes(result, msgspec.json.encode(bench))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2].encode(), type=KernelSpec))

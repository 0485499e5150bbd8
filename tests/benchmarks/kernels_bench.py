"""Benchmark of the fused kernels on one GPU: against eager, Inductor, Liger where installed, and the copy ceiling.

    python tests/benchmarks/kernels_bench.py [--sweep [SECTION ...] | --tune [SECTION ...]] [--only SECTION ...]
        [--out FILE]

Every time is taken by two definitions (`kernels_timing`): as called from Python, and on the device alone (metrics that
end in `_device`); inputs rotate among sets larger than the L2 cache. Each section first checks the kernel against a
fp32 or fp64 reference and reports its error instead of a time if the check fails. `--sweep` prints the tuning sweeps
instead, `--tune` runs them first and measures with what they found. The result file holds one entry a metric, ratio > 1
when the fused kernel is faster; it is written anew after each section.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there under PYTHONSAFEPATH

import torch
import torch.nn.functional as F
from kernels_sweep import SWEEPS
from kernels_timing import (
    BF16,
    COMMAND,
    TOLERANCE,
    Call,
    Report,
    Timing,
    attempt,
    both_ways,
    ce_sets,
    check,
    compiled,
    device_ms,
    extra_mib,
    forward_only,
    gradients_of,
    host_us,
    leaf,
    norm_sets,
    timing,
    widened,
)
from torch import Tensor

from costlab.kernels.fused import adamw, norm_kernels, rms_norm
from costlab.kernels.fused import batch_norm_relu as bn
from costlab.kernels.fused import ffn_layer_norm as ffn
from costlab.kernels.fused import gated as gate
from costlab.kernels.fused import layer_norm as ln
from costlab.kernels.fused import linear_cross_entropy as ce
from costlab.kernels.fused import rope as rotary
from costlab.kernels.fused.launch import direct_launch

RESULTS = Path(__file__).parent / "results" / "kernels.json"
NOTES = [
    "Two definitions of a time. Without suffix: the median of CUDA-event pairs around single calls, issued one after "
    "the other from Python with rotating inputs; where the host is slower than the device, its time is in it. With "
    "`_device`: the same calls enqueued ahead, so that only the device's time counts. A ratio high only without the "
    "suffix was won on the host: it helps eager loops and short kernels, not a step that keeps the device busy.",
    "The copy ceiling is the device's time of a 1 GiB copy; a share of it is of the fewest bytes the kernel must move.",
]


def copy_ceiling(report: Report) -> None:
    """Device-to-device copy of 1 GiB, read plus write."""
    a, b = (torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda") for _ in range(2))
    ms = device_ms(lambda _: b.copy_(a), report.samples)
    report.copy_gbs = 2 * (1 << 30) / ms / 1e6
    print(f"copy ceiling {report.copy_gbs:.0f} GB/s", flush=True)


def _norm(
    report: Report,
    name: str,
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    eager: Callable[..., Any],
    parameters: int,
) -> tuple[Timing, dict[str, Timing | None], list[list[Tensor]], list[list[Tensor]]]:
    rows, cols = 16384, 4096
    inputs, grads = norm_sets(rows, cols, parameters)
    part, part_grads = widened(t[:512] if t.dim() == 2 else t for t in inputs[0]), widened(t[:512] for t in grads[0])
    small = [t[:512].detach().requires_grad_() if t.dim() == 2 else t for t in inputs[0]]
    check(
        name,
        gradients_of(ours, small, [g[:512] for g in grads[0]]),
        gradients_of(reference, part, part_grads),
    )
    size = rows * cols * 2
    report.of_copy(f"{name}_forward_of_copy", timing(forward_only(ours, inputs), report.samples), 4 * size)
    total = timing(both_ways(ours, inputs, grads), report.samples)
    report.of_copy(f"{name}_of_copy", total, 8 * size)
    peers = {
        "eager": attempt("eager", both_ways(eager, inputs, grads), report.samples),
        "inductor": attempt("inductor", both_ways(compiled(eager), inputs, grads), report.samples),
    }
    inside = attempt("ours in torch.compile", both_ways(compiled(ours), inputs, grads), report.samples)
    if inside is not None:
        report.faster(f"{name}_compiled_vs_inductor", inside, {"inductor": peers["inductor"]})
    return total, peers, inputs, grads


def rms(report: Report) -> None:
    """Residual addition and RMSNorm, bf16 16384 x 4096."""

    def eager(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        wide = h.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * w, h

    total, peers, inputs, grads = _norm(
        report,
        "rmsnorm_residual",
        lambda x, r, w: rms_norm.add_rms_norm(x, r, w, 1e-5),
        lambda x, r, w: rms_norm.add_rms_norm_reference(x, r, w, 1e-5),
        eager,
        1,
    )
    report.faster("rmsnorm_residual_vs_eager", total, {"eager": peers["eager"]})
    report.faster("rmsnorm_residual_vs_inductor", total, {"inductor": peers["inductor"]})
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Liger
    except ImportError as error:
        report.add("rmsnorm_residual_vs_liger", total.called, "ms", "liger", None, None, skipped=str(error))
        return
    peer = both_ways(lambda x, r, w: Liger.apply(x, r, w, 1e-5, 0.0, "llama", False), inputs, grads)
    report.faster("rmsnorm_residual_vs_liger", total, {"liger": attempt("liger", peer, report.samples)})


def layer(report: Report) -> None:
    """Residual addition and LayerNorm, bf16 16384 x 4096."""

    def eager(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return F.layer_norm(h, h.shape[-1:], w, b, 1e-5), h

    total, peers, *_ = _norm(
        report,
        "layernorm_residual",
        lambda x, r, w, b: ln.add_layer_norm(x, r, w, b, 1e-5),
        lambda x, r, w, b: ln.add_layer_norm_reference(x, r, w, b, 1e-5),
        eager,
        2,
    )
    report.faster("layernorm_residual_vs_best", total, peers)


def cross_entropy(report: Report) -> None:
    """Linear and cross-entropy, bf16, 8192 tokens x 2048 -> 32000."""
    inputs, grads = ce_sets()

    def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy((x @ w.t()).float(), t)

    probe = [inputs[0][0], inputs[0][1], inputs[0][2].masked_fill(torch.rand(8192, device="cuda") < 0.1, -100)]
    three = torch.full((), 3.0, device="cuda")
    check(
        "linear_ce",
        gradients_of(lambda x, w, t: ce.linear_cross_entropy(x, w, t, z_weight=1e-4), probe, [three]),
        gradients_of(
            lambda x, w, t: ce.linear_cross_entropy_reference(x, w, t, z_weight=1e-4),
            widened(probe, torch.float32),
            [three],
        ),
        2 * TOLERANCE,
    )  # fmt: skip
    matmuls = device_ms(_three_products(inputs), report.samples)
    ours = both_ways(ce.linear_cross_entropy, inputs, grads)
    total, extra = timing(ours, report.samples), extra_mib(ours)
    inductor = both_ways(compiled(eager), inputs, grads)
    peers = {"inductor": attempt("inductor", inductor, report.samples)}
    report.faster("linear_ce_vs_inductor", total, peers)
    report.faster(
        "linear_ce_vs_eager", total, {"eager": attempt("eager", both_ways(eager, inputs, grads), report.samples)}
    )
    products = "its three products alone, all tokens at once"
    report.add("linear_ce_of_matmuls_device", total.device, "ms", products, matmuls, matmuls / total.device)
    other = extra_mib(inductor)
    report.add("linear_ce_memory", extra, "MiB", "inductor", other, other / extra)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError as error:
        report.add("linear_ce_vs_liger", total.called, "ms", "liger", None, None, skipped=str(error))
        return
    liger = both_ways(lambda x, w, t: Liger.apply(x, w, t)[0], inputs, grads)
    report.faster("linear_ce_vs_liger", total, {"liger": attempt("liger", liger, report.samples)})
    other = extra_mib(liger)
    report.add("linear_ce_memory_vs_liger", extra, "MiB", "liger", other, other / extra)


def _three_products(inputs: list[list[Tensor]]) -> Call:
    logits = torch.randn(8192, 32000, device="cuda").to(BF16)

    def call(i: int) -> object:
        x, w = inputs[i % 2][0].detach(), inputs[i % 2][1].detach()
        return torch.mm(x, w.t()), torch.mm(logits, w), torch.mm(logits.t(), x)

    return call


def conv_bn_relu(report: Report) -> None:
    """3x3 convolution, training batch norm, ReLU, bf16 64 x 256 x 56 x 56 channels-last, running statistics updated."""
    shape = (64, 256, 56, 56)
    weights = [
        leaf(256, 256, 3, 3, scale=0.02),
        *(leaf(256, shift=s, scale=0.1).detach().float().requires_grad_() for s in (1.0, 0.0)),
    ]
    weights[0] = weights[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    mean, var = torch.zeros(256, device="cuda"), torch.ones(256, device="cuda")
    mean16, var16 = mean.to(BF16), var.to(BF16)
    low = [weights[0], *(w.detach().to(BF16).requires_grad_() for w in weights[1:])]

    def image() -> Tensor:
        return leaf(*shape).detach().contiguous(memory_format=torch.channels_last)

    inputs = [[image().requires_grad_(), *weights] for _ in range(2)]
    grads = [[image()] for _ in range(2)]

    def eager(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
        running = (mean16, var16) if g.dtype == BF16 else (mean, var)
        return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), *running, g, b, True, 0.1, 1e-5))

    def ours(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
        y, m, v = bn.batch_norm_relu(F.conv2d(x, w, padding=1), g, b, 1e-5)
        torch._foreach_lerp_([mean, var], [m, v], 0.1)
        return y

    x = image().requires_grad_()
    wide = widened([x, *weights[1:]], torch.float32)
    check(
        "batch_norm_relu",
        gradients_of(lambda *a: bn.batch_norm_relu(*a, 1e-5)[0], [x, *weights[1:]], grads[0]),
        gradients_of(lambda *a: bn.batch_norm_relu_reference(*a, 1e-5)[0], wide, [grads[0][0].float()]),
    )  # fmt: skip
    size = x.numel() * 2
    pair = [[image().requires_grad_(), *weights[1:]] for _ in range(2)]
    alone = timing(both_ways(lambda *a: bn.batch_norm_relu(*a, 1e-5)[0], pair, grads), report.samples)
    forward = timing(forward_only(lambda *a: bn.batch_norm_relu(*a, 1e-5)[0], pair), report.samples)
    report.of_copy("batch_norm_relu_forward_of_copy", forward, 3 * size)
    report.of_copy("batch_norm_relu_of_copy", alone, 8 * size)
    convolution = device_ms(
        both_ways(lambda x, w: F.conv2d(x, w, padding=1), [i[:2] for i in inputs], grads), report.samples
    )
    total = timing(both_ways(ours, inputs, grads), report.samples)
    in_bf16 = [[i[0], *low] for i in inputs]
    peers = {
        "eager": attempt("eager", both_ways(eager, inputs, grads), report.samples),
        "eager, bf16 batch norm": attempt("eager, bf16", both_ways(eager, in_bf16, grads), report.samples),
        "inductor": attempt("inductor", both_ways(compiled(eager), inputs, grads), report.samples),
        "inductor, bf16 batch norm": attempt(
            "inductor, bf16", both_ways(compiled(eager), in_bf16, grads), report.samples
        ),
    }
    report.faster("conv_bn_relu_vs_best", total, peers)
    ratio = convolution / total.device
    report.add("conv_bn_relu_of_convolution_device", total.device, "ms", "the convolution alone", convolution, ratio)


def feed_forward(report: Report) -> None:
    """Post-norm feed-forward block, bf16 8192 x 2048, hidden 8192, GELU (tanh)."""
    tokens, width, hidden = 8192, 2048, 8192
    parameters = [
        leaf(hidden, width, scale=0.02), leaf(hidden, scale=0.1), leaf(width, hidden, scale=0.02),
        leaf(width, scale=0.1), leaf(width, shift=1.0, scale=0.1), leaf(width, scale=0.1),
    ]  # fmt: skip
    inputs = [[leaf(tokens, width), *parameters] for _ in range(2)]
    grads = [[leaf(tokens, width).detach()] for _ in range(2)]

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, g: Tensor, b: Tensor) -> Tensor:
        h = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
        return F.layer_norm(x + h, (width,), g, b, 1e-5)

    def ours(*a: Tensor) -> Tensor:
        return ffn.ffn_layer_norm(*a, 1e-5, "tanh")  # type: ignore[arg-type]

    wide = widened(inputs[0], torch.float32)
    check(
        "ffn_layer_norm",
        gradients_of(ours, inputs[0], grads[0]),
        gradients_of(lambda *a: ffn.ffn_layer_norm_reference(*a, 1e-5, "tanh"), wide, [grads[0][0].float()]),
        2 * TOLERANCE,
    )  # fmt: skip
    total = timing(both_ways(ours, inputs, grads), report.samples)
    peers = {
        "eager": attempt("eager", both_ways(eager, inputs, grads), report.samples),
        "inductor": attempt("inductor", both_ways(compiled(eager), inputs, grads), report.samples),
    }
    report.faster("ffn_layernorm_vs_best", total, peers)


def gating(report: Report) -> None:
    """SwiGLU gate, bf16 8192 x 8192."""
    inputs = [[leaf(8192, 8192), leaf(8192, 8192)] for _ in range(2)]
    grads = [[leaf(8192, 8192).detach()] for _ in range(2)]
    small = [t[:256].detach().requires_grad_() for t in inputs[0]]
    for act in gate.ACTIVATIONS:
        check(
            f"gated {act}",
            gradients_of(lambda a, b, act=act: gate.gated(a, b, act), small, [grads[0][0][:256]]),
            gradients_of(
                lambda a, b, act=act: gate.gated_reference(a, b, act), widened(small), widened([grads[0][0][:256]])
            ),
        )  # fmt: skip

    def eager(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b

    total = timing(both_ways(gate.gated, inputs, grads), report.samples)
    alone = timing(forward_only(gate.gated, inputs), report.samples)
    report.of_copy("swiglu_forward_of_copy", alone, 3 * 8192 * 8192 * 2)
    report.of_copy("swiglu_of_copy", total, 8 * 8192 * 8192 * 2)
    peers = {
        "eager": attempt("eager", both_ways(eager, inputs, grads), report.samples),
        "inductor": attempt("inductor", both_ways(compiled(eager), inputs, grads), report.samples),
    }
    report.faster("swiglu_vs_best", total, peers)


def rotation(report: Report) -> None:
    """RoPE of q and k, bf16 batch 8, seq 2048, 32 + 8 heads of 128, read from transposed projections."""
    batch, seq, heads, kv, dim = 8, 2048, 32, 8, 128
    angle = torch.outer(
        torch.arange(seq, device="cuda").float(), 1e4 ** (-torch.arange(0, dim, 2, device="cuda").float() / dim)
    )
    cos, sin = angle.cos(), angle.sin()
    inputs = [[leaf(batch, seq, heads, dim), leaf(batch, seq, kv, dim)] for _ in range(3)]
    grads = [[leaf(batch, seq, h, dim).detach().transpose(1, 2) for h in (heads, kv)] for _ in range(3)]
    weights = [leaf(dim, shift=1.0, scale=0.1) for _ in range(2)]

    def ours(q: Tensor, k: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, (w[0], w[1]) if w else None)

    def reference(q: Tensor, k: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if w:
            return tuple(rotary.norm_rotate_reference(x, y, cos, sin, 1e-6) for x, y in zip((q, k), w, strict=True))
        return rotary.rotate_reference(q, cos, sin), rotary.rotate_reference(k, cos, sin)

    small = [t[:1].detach().requires_grad_() for t in inputs[0]]
    small_grads = [g[:1] for g in grads[0]]
    for name, extra in (("rope", []), ("rope with norm", weights)):
        arguments = [*small, *extra]
        check(
            name,
            gradients_of(ours, arguments, small_grads),
            gradients_of(reference, widened(arguments), widened(small_grads)),
        )
    size = sum(t.numel() * 2 for t in inputs[0])
    normed = [[*i, *weights] for i in inputs]
    for name, sets, passes in (("rope", inputs, 4), ("norm_rope", normed, 5)):
        total = timing(both_ways(ours, sets, grads), report.samples)
        alone = timing(forward_only(ours, sets), report.samples)
        report.of_copy(f"{name}_forward_of_copy", alone, 2 * size)
        report.of_copy(f"{name}_of_copy", total, passes * size)
        peers = {
            "eager": attempt("eager", both_ways(reference, sets, grads), report.samples),
            "inductor": attempt("inductor", both_ways(compiled(reference), sets, grads), report.samples),
        }
        report.faster(f"{name}_vs_best", total, peers)


def host(report: Report) -> None:
    """Host time of add+RMSNorm on a small tensor, forward and backward: what one call costs before any work."""
    inputs, grads = norm_sets(64, 256, 1)

    def registered(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm._add_rms_norm.op(x, r, w, 1e-5)[:2]

    def direct(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm.add_rms_norm(x, r, w, 1e-5)

    def eager(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return F.rms_norm(h, h.shape[-1:], w, 1e-5), h

    def launches(i: int) -> object:
        x, r, w = (t.detach() for t in inputs[i % 2])
        with direct_launch():
            _, h, mean, rstd = norm_kernels.launch_forward(x, r, w, None, 1e-5, False)
            return norm_kernels.launch_backward(*grads[i % 2], h, w, mean, rstd, False, False)

    class Nothing(torch.autograd.Function):
        """What autograd itself costs for a function of this form, without any work in it."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(x, r, w)
            return x.detach(), r.detach()

        @staticmethod
        def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
            return dy, dh, ctx.saved_tensors[2]

    def in_this_thread(i: int) -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return both_ways(direct, inputs, grads)(i)

    calls = {
        "its three launches": launches,
        "an autograd function that does nothing": both_ways(Nothing.apply, inputs, grads),
        "the same, backward in the calling thread": in_this_thread,
        "as an op of torch.library": both_ways(registered, inputs, grads),
        "in torch.compile": both_ways(compiled(direct), inputs, grads),
        "unfused, eager": both_ways(eager, inputs, grads),
        "unfused, in torch.compile": both_ways(compiled(eager), inputs, grads),
    }
    ours = host_us(both_ways(direct, inputs, grads), report.samples)
    for name, call in calls.items():
        peer = host_us(call, report.samples)
        report.add("rmsnorm_residual_host", ours, "us", name, peer, peer / ours)
    only = host_us(forward_only(direct, inputs), report.samples)
    report.add("rmsnorm_residual_forward_host", only, "us", "forward and backward", ours, ours / only)


def optimizer(report: Report) -> None:
    """AdamW of 64 tensors of 4 M fp32 values with a bf16 copy, against torch's fused AdamW and a cast of all."""
    params, grads, means, squares = ([torch.randn(2048, 2048, device="cuda") for _ in range(64)] for _ in range(4))
    squares = [s.square_() for s in squares]
    copies = [torch.empty_like(p, dtype=BF16) for p in params]
    ours, steps = adamw.MultiTensorAdamW(), torch.ones((), device="cuda")
    options = adamw.AdamWOptions()

    def plain(_: int) -> object:
        torch._fused_adamw_(
            params, grads, means, squares, [], [steps] * len(params), lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_(copies, params)
        return None

    before = [[t[:2].clone() for t in tensors] for tensors in (params, grads, means, squares)]
    ours.step(params, grads, means, squares, copies, 1, options)
    sets = [[t.clone() for t in tensors] for tensors in before]
    adamw.adamw_reference(*sets, None, 1, options)
    check("adamw", [p[:2] for p in params], sets[0], 1e-5)
    mine = timing(lambda _: ours.step(params, grads, means, squares, copies, 1, options), report.samples)
    report.of_copy("adamw_of_copy", mine, 30 * 64 * 2048 * 2048)
    report.faster("adamw_vs_torch", mine, {"torch fused AdamW and a cast": attempt("torch", plain, report.samples)})


SECTIONS: dict[str, Callable[[Report], None]] = {
    "host": host,
    "rms": rms,
    "layer": layer,
    "cross_entropy": cross_entropy,
    "conv_bn_relu": conv_bn_relu,
    "feed_forward": feed_forward,
    "gating": gating,
    "rotation": rotation,
    "optimizer": optimizer,
}


def guarded(name: str, part: Callable[[], None]) -> dict[str, str]:
    """Run one section; an error is printed and returned, and does not stop the others."""
    begin = time.monotonic()
    try:
        part()
    except Exception as error:
        traceback.print_exc()
        return {name: f"{type(error).__name__}: {str(error)[:500]}"}
    finally:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.monotonic() - begin:.1f} s", flush=True)
    return {}


def save(path: Path, report: Report, errors: dict[str, str]) -> None:
    """Write what there is so far."""
    environment: dict[str, Any] = {
        "gpus": [{"name": torch.cuda.get_device_name()}],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "copy_gbs": report.copy_gbs,
        "errors": errors,
        "notes": NOTES,
    }
    modules = {"norm": norm_kernels, "gated": gate, "rope": rotary, "batch_norm_relu": bn, "ffn": ffn, "linear_ce": ce}
    environment["tiles"] = {name: {k: asdict(t) for k, t in m.TILES.items()} for name, m in modules.items()}
    environment["linear_ce"] = {"buffer_mib": ce.BUFFER_BYTES >> 20}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "results": report.results}, indent=1) + "\n")


def main() -> int:
    """Run the chosen sections; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sweeps = {"nargs": "*", "choices": list(SWEEPS), "metavar": "SECTION"}
    parser.add_argument("--sweep", **sweeps, help="print tuning sweeps (of these sections) instead of results")
    parser.add_argument("--tune", **sweeps, help="run sweeps first and measure with the best tiles found")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    errors: dict[str, str] = {}
    tuned = options.sweep if options.sweep is not None else options.tune
    for name in [] if tuned is None else tuned or SWEEPS:
        with direct_launch():
            errors |= guarded(f"sweep {name}", lambda name=name: SWEEPS[name](min(20, options.samples)))
    if options.sweep is not None:
        return 1 if errors else 0
    words = [] if options.tune is None else ["--tune", *options.tune]
    report = Report(options.samples, " ".join([COMMAND, *words]))
    copy_ceiling(report)
    for name in options.only:
        errors |= guarded(name, lambda name=name: SECTIONS[name](report))
        save(options.out, report, errors)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

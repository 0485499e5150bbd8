"""Tuning sweeps of the fused kernels: tile shapes timed at the benchmark's sizes, the best kept for the process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from kernels_timing import BF16, Call, both_ways, ce_sets, device_ms, extra_mib, leaf, norm_sets
from torch import Tensor

from costlab.kernels.fused import batch_norm_relu as bn
from costlab.kernels.fused import ffn_layer_norm as ffn
from costlab.kernels.fused import gated as gate
from costlab.kernels.fused import linear_cross_entropy as ce
from costlab.kernels.fused import norm_kernels
from costlab.kernels.fused import rope as rotary
from costlab.kernels.fused.launch import Tile


def sweep_tiles(name: str, tiles: dict[str, Tile], key: str, choices: Iterable[Tile], call: Call, samples: int) -> None:
    """Time `call` under each tile of `choices`, print the quickest, and keep it if it beats the default by 1 %."""
    default, found, failed = tiles[key], [], []
    for tile in [default, *choices]:
        tiles[key] = tile
        try:
            found.append((device_ms(call, samples), tile))
        except Exception as error:
            failed.append(f"{tile}: {type(error).__name__} {str(error)[:80]}")
    tiles[key] = default
    if found and min(found, key=lambda f: f[0])[0] < 0.99 * found[0][0]:
        tiles[key] = min(found, key=lambda f: f[0])[1]
    if found:
        print(
            f"sweep {name}.{key}: default {default} {found[0][0]:.4f} ms; {len(found)} tried, "
            f"{len(failed)} failed {failed[:1]}"
        )
        for ms, t in sorted(found, key=lambda f: f[0])[:5]:
            print(
                f"    {ms:.4f} ms  elements {t.elements} warps {t.warps} per_sm {t.per_sm} stages {t.stages}",
                flush=True,
            )
    else:
        print(f"sweep {name}.{key}: all failed: {failed[:2]}", flush=True)


def tiles_of(
    elements: Iterable[int], warps: Iterable[int], per_sm: Iterable[int] = (1,), stages: Iterable[int] = (1,)
) -> list[Tile]:
    """All combinations."""
    return [Tile(*choice) for choice in itertools.product(elements, warps, per_sm, stages)]


def sweep_norm(samples: int, center: bool) -> None:
    """Tiles of the norm kernels at 16384 x 4096."""
    inputs, grads = norm_sets(16384, 4096, 2)
    raw = [[t.detach() for t in i] for i in inputs]
    name = "layernorm" if center else "rmsnorm"

    def forward(i: int) -> object:
        x, r, w, b = raw[i % 2]
        return norm_kernels.launch_forward(x, r, w, b if center else None, 1e-5, center)

    _, h, mean, rstd = norm_kernels.launch_forward(*raw[0][:3], raw[0][3] if center else None, 1e-5, center)

    def backward(i: int) -> object:
        dy, dh = grads[i % 2]
        return norm_kernels.launch_backward(dy, dh, h if i % 2 else raw[0][0], raw[0][2], mean, rstd, center, center)

    sweep_tiles(name, norm_kernels.TILES, "forward", tiles_of((4096, 8192, 16384), (4, 8, 16)), forward, samples)
    choices = tiles_of((4096, 8192), (4, 8, 16), (1, 2, 3, 4), (1, 2, 3))
    sweep_tiles(name, norm_kernels.TILES, "backward", choices, backward, samples)


LOGITS_LIMIT_MIB = 250


def choose_chunks(inputs: list[list[Tensor]], grads: list[list[Tensor]], samples: int) -> None:
    """Set the logits buffer that is quickest within `LOGITS_LIMIT_MIB` of extra memory."""
    found = [(float("inf"), ce.BUFFER_BYTES)]
    for rows in (1024, 1152, 1280, 1664, 1920, 2048, 8192):
        ce.BUFFER_BYTES = rows * 32000 * 2
        call = both_ways(ce.linear_cross_entropy, inputs, grads)
        ms, mib = device_ms(call, samples), extra_mib(call)
        print(f"    chunks {list(ce.chunks(8192, 32000, 2048, rows))}: {ms:.3f} ms, {mib:.1f} MiB", flush=True)
        if mib <= LOGITS_LIMIT_MIB:
            found.append((ms, ce.BUFFER_BYTES))
    ce.BUFFER_BYTES = min(found)[1]


def sweep_cross_entropy(samples: int) -> None:
    """Softmax tiles and chunk rows of the linear cross-entropy."""
    inputs, grads = ce_sets()
    logits = [torch.randn(1408, 32000, device="cuda").to(BF16) for _ in range(3)]
    losses, scale = torch.empty(1408, device="cuda"), torch.full((), 1e-4, device="cuda")

    def step(i: int) -> object:
        ce._softmax_step(logits[i % 3], inputs[0][2][:1408], losses, scale, -100, 0.0, True)
        return losses

    sweep_tiles(
        "linear_ce",
        ce.TILES,
        "softmax",
        [*tiles_of((4096, 8192), (8, 16)), *tiles_of((32768,), (8, 16, 32))],
        step,
        samples,
    )
    choose_chunks(inputs, grads, samples)
    x, w = inputs[0][0].detach(), inputs[0][1].detach()
    full = torch.randn(8192, 32000, device="cuda").to(BF16)
    dweight = torch.empty_like(w)
    for rows in (1024, 1888, 1920, 2048):
        a, b, out = x[:rows], full[:rows], torch.empty(rows, 2048, dtype=BF16, device="cuda")
        scaled = [
            device_ms(product, samples) * 8192 / rows
            for product in (
                lambda _, a=a, b=b: torch.mm(a, w.t(), out=b),
                lambda _, b=b, out=out: torch.mm(b, w, out=out),
                lambda _, a=a, b=b: torch.mm(b.t(), a, out=dweight),
                lambda _, a=a, b=b: dweight.addmm_(b.t(), a),
            )
        ]
        print(f"    products at {rows} rows, scaled to 8192: {', '.join(f'{t:.3f}' for t in scaled)} ms", flush=True)


def sweep_batch_norm(samples: int) -> None:
    """Tiles of the batch norm kernels at 64 x 256 x 56 x 56."""
    image = [
        torch.randn(64, 256, 56, 56, device="cuda").to(BF16).contiguous(memory_format=torch.channels_last)
        for _ in range(4)
    ]
    w, b = torch.ones(256, device="cuda", dtype=BF16), torch.zeros(256, device="cuda", dtype=BF16)
    _, mean, rstd, _ = bn._batch_norm_relu(image[0], w, b, 1e-5)

    def forward(i: int) -> object:
        return bn._batch_norm_relu(image[i % 4], w, b, 1e-5)

    def backward(i: int) -> object:
        return bn._batch_norm_relu_backward(image[i % 4], image[(i + 1) % 4], w, b, mean, rstd)

    persistent = tiles_of((4096, 8192, 16384), (4, 8), (2, 4, 8), (1, 2, 3))
    plain = tiles_of((2048, 4096, 8192, 16384), (4, 8))
    sweep_tiles("batch_norm_relu", bn.TILES, "statistics", persistent, forward, samples)
    sweep_tiles("batch_norm_relu", bn.TILES, "normalise", plain, forward, samples)
    sweep_tiles(
        "batch_norm_relu",
        bn.TILES,
        "sums",
        tiles_of((2048, 4096, 8192), (4, 8), (2, 4, 8), (1, 2, 3)),
        backward,
        samples,
    )
    sweep_tiles("batch_norm_relu", bn.TILES, "gradient", plain, backward, samples)


def sweep_feed_forward(samples: int) -> None:
    """GELU tiles and tokens a chunk of the feed-forward block."""
    u = [torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(3)]
    b = torch.randn(8192, device="cuda").to(BF16)
    sweep_tiles(
        "ffn",
        ffn.TILES,
        "gelu",
        tiles_of((1024, 2048, 4096, 8192), (4, 8)),
        lambda i: ffn._gelu(u[i % 3], b, 2),
        samples,
    )
    choices = tiles_of((2048, 4096, 8192), (4, 8), (2, 4, 8), (1, 2, 3))

    def backward(i: int) -> object:
        return ffn._gelu_backward(u[i % 3], u[(i + 1) % 3], b, 2)

    sweep_tiles("ffn", ffn.TILES, "gelu_backward", choices, backward, samples)
    x, w1, b2 = leaf(8192, 2048).detach(), leaf(8192, 2048, scale=0.02).detach(), leaf(2048).detach()
    products: dict[str, Call] = {
        "x w1.T": lambda _: x @ w1.t(),
        "b1 + x w1.T": lambda _: torch.addmm(b, x, w1.t()),
        "h w2.T": lambda i: u[i % 3] @ w1,
        "b2 + h w2.T": lambda i: torch.addmm(b2, u[i % 3], w1),
        "ds + du w1, epilogue": lambda i: torch.addmm(x, u[i % 3], w1),
        "ds + du w1, separate": lambda i: x + u[i % 3] @ w1,
        "du.T x": lambda i: u[i % 3].t() @ x,
        "ds.T h": lambda i: x.t() @ u[i % 3],
    }
    for name, product in products.items():
        print(f"    product {name}: {device_ms(product, samples):.4f} ms", flush=True)


def sweep_small(samples: int) -> None:
    """Tiles of the gate."""
    a = [torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(3)]
    plain = tiles_of((1024, 2048, 4096, 8192), (2, 4, 8))
    sweep_tiles("gated", gate.TILES, "forward", plain, lambda i: gate._forward(a[i % 3], a[(i + 1) % 3], 0), samples)
    sweep_tiles(
        "gated",
        gate.TILES,
        "backward",
        plain,
        lambda i: gate._backward(*(a[(i + j) % 3] for j in range(3)), 0, False),
        samples,
    )


def sweep_rotation(samples: int) -> None:
    """Tiles of the rotation, with QK-norm, forward and backward."""

    def draw(heads: int) -> Tensor:
        return torch.randn(8, 2048, heads, 128, device="cuda").to(BF16).transpose(1, 2)

    q, dq, k, dk = ([draw(heads) for _ in range(2)] for heads in (32, 32, 8, 8))
    cos, sin = torch.randn(2048, 64, device="cuda"), torch.randn(2048, 64, device="cuda")
    w = (torch.ones(128, device="cuda").to(BF16), torch.ones(128, device="cuda").to(BF16))

    def forward(i: int) -> object:
        return rotary._rotate(q[i % 2], k[i % 2], cos, sin, w, 1e-6, 1.0)

    def backward(i: int) -> object:
        return rotary._norm_backward(dq[i % 2], dk[i % 2], q[i % 2], k[i % 2], w, cos, sin, 1e-6)

    sweep_tiles("rope", rotary.TILES, "rotate", tiles_of((1024, 2048, 4096), (2, 4, 8)), forward, samples)
    choices = tiles_of((2048, 4096), (4, 8), (1, 2, 3, 4, 6), (1, 2, 3))
    sweep_tiles("rope", rotary.TILES, "norm_backward", choices, backward, samples)


SWEEPS: dict[str, Callable[[int], None]] = {
    "rms": lambda n: sweep_norm(n, False),
    "layer": lambda n: sweep_norm(n, True),
    "cross_entropy": sweep_cross_entropy,
    "conv_bn_relu": sweep_batch_norm,
    "feed_forward": sweep_feed_forward,
    "gating": sweep_small,
    "rotation": sweep_rotation,
}

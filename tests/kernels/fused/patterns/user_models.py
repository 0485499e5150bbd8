"""Three models that nobody tuned for: functional code that no module swap sees, with look-alikes in between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """As many transformers write it: fp32 inside, scaled after the cast back."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.type_as(x)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, seq, dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Rotations(nn.Module):
    """Rotary embedding in fp32 and cast back, with fewer heads of k, beside interleaved pairs and an alien table."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q and k are [batch, heads, seq, dim], the tables [seq, dim / 2]."""

        def wide(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            a, b = x.float()[..., :half], x.float()[..., half:]
            return torch.cat((a * c - b * s, s * a + b * c), -1).to(x.dtype)

        doubled = [torch.cat((t, t), -1) for t in (cos, sin)]
        turned = [x * doubled[0] + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * doubled[1]
                  for x in (q, k)]  # fmt: skip
        a, b = q[..., ::2], q[..., 1::2]
        interleaved = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        mirrored = (
            torch.cat((-q[..., : q.shape[-1] // 2], q[..., q.shape[-1] // 2 :]), -1) * doubled[1] + q * doubled[0]
        )
        return wide(q, cos, sin), wide(k, cos, sin), *turned, interleaved, mirrored, wide(q, sin, cos)


class FunctionalBlock(nn.Module):
    """Parameters only, everything else functions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Parameter(torch.randn(3 * width, width) * 0.1)
        self.out = nn.Parameter(torch.randn(width, width) * 0.1)
        self.up = nn.Parameter(torch.randn(4 * width, width) * 0.1)
        self.down = nn.Parameter(torch.randn(width, 2 * width) * 0.1)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(width) + 0.5) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`x` is the residual stream, `y` what the block before wants to add to it."""
        x = x + y
        batch, seq, width = x.shape
        q, k, v = F.linear(rms(x, self.scales[0]), self.qkv).view(batch, seq, 3, self.heads, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(halves(q, cos, sin), halves(k, cos, sin), v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, seq, width), self.out)
        gate, up = F.linear(rms(x, self.scales[1]), self.up).chunk(2, -1)
        return x, F.linear(up * (gate * torch.sigmoid(gate)), self.down)


class Functional(nn.Module):
    """Blocks that pass (residual, addition), a head and its loss in one graph."""

    def __init__(self, width: int = 32, heads: int = 4, vocab: int = 50) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(FunctionalBlock(width, heads) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.head = nn.Parameter(torch.randn(vocab, width) * 0.1)
        angles = torch.outer(torch.arange(16.0), 100.0 ** -torch.linspace(0, 1, width // heads // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token's successor (the token itself, here)."""
        x = self.table(tokens)
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        logits = F.linear(rms(x + y, self.scale), self.head)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), tokens.reshape(-1))


class PostNorm(nn.Module):
    """Post-norm blocks with dropout, GELU gates in both orders, LayerNorm by module and by function."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to the same."""
        x = self.first(x + self.dropout(self.a(x)))
        gated = self.b(x) * F.gelu(self.a(x), approximate="tanh")
        x = F.layer_norm(x.add(gated), (x.shape[-1],), self.second.weight, self.second.bias, 1e-5)
        other = F.gelu(self.c(x)).mul(self.b(x))
        return F.rms_norm(x + other, (x.shape[-1],), self.first.weight, 1e-6)


class Spellings(nn.Module):
    """RMSNorm in every spelling that is one."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """All of them of x + r."""
        w, n, eps = self.weight, x.shape[-1], 1e-5
        h = x + r
        return (
            h / torch.sqrt(h.square().mean(dim=-1, keepdim=True) + eps) * w,
            w * (h * (h.pow(2).mean(-1, True) + eps) ** -0.5),
            (h * (eps + (h * h).mean((-1,), keepdim=True)).rsqrt()) * w,
            h * torch.reciprocal(torch.sqrt((h**2).sum(-1, keepdim=True) / n + eps)) * w,
            h * (1.0 / (h.pow(2).mean(2, keepdim=True) + eps).sqrt()) * w,
            (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)).to(h.dtype) * w,
            h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w),
        )


class NearMisses(nn.Module):
    """What looks like a kernel's pattern and is not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.rand(width))
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """x and r are [batch, width, width], so that a wrong dimension fits as well as the right one."""
        w, eps = self.weight, 1e-5
        wrong_dim = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + eps) * w
        outside = x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + eps) * w
        no_eps = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * w
        other_mean = x * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + eps) * w
        no_square = x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + eps) * w
        sums = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps) * w
        swapped = F.silu(x) * torch.sigmoid(r)
        not_silu = x * torch.sigmoid(r)
        h = x + r
        h2 = h * 1.0
        h2 += r  # the sum changes under the norm
        in_place = F.layer_norm(h2, (x.shape[-1],), w, self.bias)
        half = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).half().float() * w
        between = F.rms_norm(F.dropout(x + r, 0.5, self.training), (x.shape[-1],), w, eps)
        wide = F.layer_norm(x, x.shape[-2:], None, None)
        column = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[:, None]
        scaled = F.rms_norm(torch.add(x, r, alpha=2), (x.shape[-1],), w, eps)
        kept = F.silu(x)
        return (
            wrong_dim, outside, no_eps, other_mean, no_square, sums, swapped, not_silu, in_place, half, between, wide,
            column, scaled, kept * r, kept,
        )  # fmt: skip

"""Llama-style decoder: RMSNorm, rotary embedding, grouped-query causal attention, SwiGLU, untied head.

Architecture after Touvron et al. 2023 (arXiv 2302.13971) and the Llama 3 sizes; synthetic tokens from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.probes.workloads.base import Workload, WorkloadContext, WorkloadError


@dataclass(frozen=True)
class LlamaConfig:
    """Model sizes; `batch` and `seq` are the defaults of that size."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    seq: int
    rope_base: float = 500_000.0
    eps: float = 1e-5


SIZES = {
    "tiny": LlamaConfig(128, 4, 4, 2, 384, 512, 4, 128),
    "small": LlamaConfig(768, 12, 12, 4, 2048, 32000, 8, 1024),
    "medium": LlamaConfig(1024, 24, 16, 8, 2816, 32000, 8, 1024),
    "1b": LlamaConfig(2048, 22, 32, 4, 5632, 32000, 4, 2048),  # the shape of TinyLlama-1.1B
    "8b": LlamaConfig(4096, 32, 32, 8, 14336, 128256, 1, 4096),
}


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, statistics in fp32. x: [..., dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


def rope_table(seq: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos, sin of shape [seq, head_dim / 2], fp32 (Su et al. 2021, arXiv 2104.09864)."""
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), inverse)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x: [batch, heads, seq, head_dim], halves convention."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary embedding."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim // c.heads
        self.wq = nn.Linear(c.dim, c.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> the same shape."""
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(b, t, -1))
        return out


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.eps)
        self.mlp = SwiGLU(c.dim, c.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: LlamaConfig, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.eps)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        cos, sin = rope_table(seq, c.dim // c.heads, c.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(c)

    def _init_weights(self, c: LlamaConfig) -> None:
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(p, std=0.02 / ((2 * c.layers) ** 0.5 if residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Run all blocks and the head."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]  # a batch may be shorter than `seq`
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out


def causal_lm_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, in fp32."""
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def token_batches(ctx: WorkloadContext, vocab: int, batch: int, seq: int, kept: int = 4):  # type: ignore[no-untyped-def]
    """Random tokens, a few batches cycled through; different on every rank, the same for a seed."""
    generator = torch.Generator().manual_seed(ctx.seed * 1009 + ctx.rank)
    data = [torch.randint(0, vocab, (batch, seq + 1), generator=generator).to(ctx.device) for _ in range(kept)]
    pairs = [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in data]
    return lambda step: pairs[step % kept]


def make(ctx: WorkloadContext) -> Workload:
    """Build the workload of `ctx.size`."""
    if ctx.size not in SIZES:
        raise WorkloadError(f"llama has no size '{ctx.size}'; there are: {', '.join(SIZES)}")
    c = SIZES[ctx.size]
    batch, seq = ctx.batch or c.batch, ctx.seq or c.seq
    with torch.device(ctx.device):
        torch.manual_seed(ctx.seed)
        model = Llama(c, seq)
    matmul = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and not n.startswith("embed"))
    per_token = 6 * matmul + 6 * c.layers * c.dim * seq
    return Workload(
        model=model,
        batch=token_batches(ctx, c.vocab, batch, seq),
        loss=causal_lm_loss,
        name="llama",
        title=f"llama {ctx.size}",
        unit="tokens",
        units_per_batch=batch * seq,
        blocks=[f"layers.{i}" for i in range(c.layers)],
        flops_per_batch=float(per_token * batch * seq),
        flops_formula="(6 x matmul parameters + 6 x layers x dim x seq) x tokens; causal attention counted half",
        source="costlab.probes.workloads.llama",
    )

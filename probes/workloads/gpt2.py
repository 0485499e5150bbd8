"""GPT-2-style decoder: learned positions, LayerNorm, GELU, dropout, tied head (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.probes.workloads.base import Workload, WorkloadContext, WorkloadError
from costlab.probes.workloads.llama import causal_lm_loss, token_batches


@dataclass(frozen=True)
class GPT2Config:
    """Model sizes; `batch` and `seq` are the defaults of that size."""

    dim: int
    layers: int
    heads: int
    vocab: int
    batch: int
    seq: int
    dropout: float = 0.1


SIZES = {
    "tiny": GPT2Config(128, 2, 4, 512, 4, 128),
    "small": GPT2Config(768, 12, 12, 50304, 8, 1024),
    "medium": GPT2Config(1024, 24, 16, 50304, 8, 1024),
}


class Attention(nn.Module):
    """Causal self-attention with one QKV projection."""

    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.proj = nn.Linear(c.dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> the same shape."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, d))
        return out


class MLP(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.proj = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape."""
        out: Tensor = self.proj(F.gelu(self.fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Pre-norm transformer block with residual dropout."""

    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.dim)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.dim)
        self.mlp = MLP(c.dim)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> the same shape."""
        x = x + self.drop(self.attn(self.ln_1(x)))
        out: Tensor = x + self.drop(self.mlp(self.ln_2(x)))
        return out


class GPT2(nn.Module):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab]."""

    def __init__(self, c: GPT2Config, seq: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.dim)
        self.wpe = nn.Embedding(seq, c.dim)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run all blocks and the tied head."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        out: Tensor = self.head(self.ln_f(x))
        return out


def make(ctx: WorkloadContext) -> Workload:
    """Build the workload of `ctx.size`."""
    if ctx.size not in SIZES:
        raise WorkloadError(f"gpt2 has no size '{ctx.size}'; there are: {', '.join(SIZES)}")
    c = SIZES[ctx.size]
    batch, seq = ctx.batch or c.batch, ctx.seq or c.seq
    with torch.device(ctx.device):
        torch.manual_seed(ctx.seed)
        model = GPT2(c, seq)
    matmul = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and not n.startswith("wpe"))
    return Workload(
        model=model,
        batch=token_batches(ctx, c.vocab, batch, seq),
        loss=causal_lm_loss,
        name="gpt2",
        title=f"gpt2 {ctx.size}",
        unit="tokens",
        units_per_batch=batch * seq,
        blocks=[f"h.{i}" for i in range(c.layers)],
        flops_per_batch=float((6 * matmul + 6 * c.layers * c.dim * seq) * batch * seq),
        flops_formula="(6 x matmul parameters with the head + 6 x layers x dim x seq) x tokens; causal attention half",
        source="costlab.probes.workloads.gpt2",
    )

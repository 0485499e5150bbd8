"""Small models, each with one known property. A line that ends in a comment is one that a test expects to be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, TOKENS, BATCH = 64, 128, 32, 8
VOCABULARY = 64  # a multiple of 16 bytes: Inductor on a GPU may pad a product that is none, when it finds that quicker


class RMSNorm(nn.Module):
    """x / rms(x) · weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """norm > matrix product > a chain of elementwise work > matrix product > residual; `middle` varies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.shift = nn.Parameter(torch.zeros(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale + self.shift
        h = self.middle(h)
        return x + self.down(F.gelu(h) * torch.tanh(h))


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net(block: Callable[[], nn.Module]) -> Net:
    """The block under test, then a healthy one."""
    torch.manual_seed(0)
    return Net(block(), Block())


def tokens(batch: int = BATCH) -> Tensor:
    """Input of a `Net`."""
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


class Printing(Block):
    """Prints in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale + self.shift
        print(end="")  # print
        return x + self.down(F.gelu(h) * torch.tanh(h))


class Item(Block):
    """Reads a value on the host."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale + self.shift
        h = h * min(h.detach().abs().amax().item(), 1.0)  # item
        return x + self.down(F.gelu(h) * torch.tanh(h))


class OnDevice(Block):
    """`Item` mended: the value stays a tensor."""

    def middle(self, h: Tensor) -> Tensor:
        return h * h.detach().abs().amax().clamp(max=1.0)


class Branch(Block):
    """Branches on a tensor's value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale + self.shift
        if h.detach().sum() > 0:  # branch
            h = h * 1.5
        return x + self.down(F.gelu(h) * torch.tanh(h))


class Where(Block):
    """`Branch` mended."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.where(h.detach().sum() > 0, h * 1.5, h)


class TransposeCopy(nn.Module):
    """Mixes tokens through a matrix product on a transposed copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.mix = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = F.linear(h.transpose(1, 2).contiguous(), self.mix)  # transpose
        h = h.transpose(1, 2)
        return x + self.down(h)


class TransposeFree(TransposeCopy):
    """The same arithmetic with the matrix on the left."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.bmm(self.mix.expand(x.shape[0], -1, -1), self.up(x)))


class Flip(Block):
    """Reads the same data in two orders."""

    def middle(self, h: Tensor) -> Tensor:
        h = F.gelu(h)
        return h + h.flip(-1)  # flip


class Dropout(Block):
    """Dropout, fused with Inductor's own random numbers."""

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.1, training=True)  # dropout


class SplitCat(Block):
    """Splits a product, works on the halves and joins them again."""

    def middle(self, h: Tensor) -> Tensor:
        a, b = h.chunk(2, -1)
        return torch.cat((torch.sigmoid(a), torch.sin(b)), -1)


class TwoSoftmax(Block):
    """Reduces over one axis, then over the other: no loop can do both."""

    def middle(self, h: Tensor) -> Tensor:
        return F.softmax(F.softmax(h, -1).transpose(1, 2), -1).transpose(1, 2)  # two reductions


class Opaque(Block):
    """Calls a custom operator."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.ops.costlab_truth.hidden_sine(h)  # opaque


class Sine(Block):
    """`Opaque` mended."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(h)


class NoFake(Block):
    """Calls a custom operator that has no fake implementation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale + self.shift
        h = torch.ops.costlab_truth.no_fake_sine(h)  # no fake
        return x + self.down(F.gelu(h) * torch.tanh(h))


class PingPong(nn.Module):
    """A matrix product in another dtype between two in the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.mid = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = F.linear(h.bfloat16(), self.mid.weight.bfloat16())  # down cast
        h = self.down(h.float())  # up cast
        return x + h


class OneDtype(PingPong):
    """`PingPong` mended."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mid(self.up(x)))


class Running(Block):
    """Keeps a running copy of the whole activation in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(BATCH, TOKENS, HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        self.seen.copy_(torch.roll(self.seen, 1, 1) * 0.9 + h.detach())  # write back
        return h + torch.roll(self.seen, 2, 2)


class Assigned(Running):
    """`Running` mended: the buffer is computed out of place and assigned once."""

    def middle(self, h: Tensor) -> Tensor:
        seen = self.seen * 0.9 + h.detach()
        self.seen = seen
        return h + seen


class Experts(nn.Module):
    """Routes tokens to experts by indexing with a mask."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:  # route
        flat = F.gelu(x.reshape(-1, WIDTH)) * 2.0
        choice = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            chosen = (choice == i).nonzero().squeeze(-1)
            out = out.index_add(0, chosen, expert(flat[chosen]))
        return x + torch.tanh(out).view_as(x) * 0.5


class DenseExperts(Experts):
    """`Experts` mended: every expert sees every token, and a mask picks."""

    def forward(self, x: Tensor) -> Tensor:
        flat = F.gelu(x.reshape(-1, WIDTH)) * 2.0
        choice = self.gate(flat).argmax(-1, keepdim=True)
        out = torch.stack([e(flat) for e in self.experts])
        mask = torch.stack([choice == i for i in range(len(self.experts))])
        return x + torch.tanh((out * mask).sum(0)).view_as(x) * 0.5


class ConvNet(nn.Module):
    """conv > batch norm > ReLU, three times."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for c in (3, width, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Skip(nn.Module):
    """A U-Net's joint: what two convolutions gave is copied together, or one of both widths gives it."""

    def __init__(self, *, joined: bool, width: int = 16) -> None:
        super().__init__()
        self.joined = joined
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.left, self.right = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.both = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        joint = torch.cat((self.left(h), self.right(h)), 1) if self.joined else self.both(h)  # cat
        return self.last(joint)


class Bags(nn.Module):
    """Sums embeddings in bags, through the library or as a gather and a sum."""

    def __init__(self, *, library: bool) -> None:
        super().__init__()
        self.library = library
        self.table = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        if self.library:
            h = F.embedding_bag(ids, self.table.weight, mode="sum")  # bag
        else:
            h = self.table(ids).sum(1)
        return self.head(F.gelu(h) * torch.tanh(h))


class Tied(nn.Module):
    """One table for embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embed(ids)))


class Recurrent(nn.Module):
    """Runs one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](x))


class Checkpointed(Block):
    """Recomputes its activations in backward."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class LoopNorm(nn.Module):
    """Sums the squares of many parameters one by one; `count` 1 is the mended form, one flat parameter."""

    def __init__(self, count: int = 12) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(480 // count + i, 50)) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([w.pow(2).sum() for w in self.weights]).sum()  # loop


class RoundTrip(Block):
    """Computes a part on the CPU."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.sigmoid(torch.sin(h).cpu()).to(h.device) * 2  # cpu


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])


def register_operators() -> None:
    """The custom operators of `Opaque` and `NoFake`, once a process."""
    if hasattr(torch.ops.costlab_truth, "hidden_sine"):
        return
    for name in ("hidden_sine", "no_fake_sine"):
        torch.library.define(f"costlab_truth::{name}", "(Tensor x) -> Tensor")
        torch.library.impl(f"costlab_truth::{name}", ("CPU", "CUDA"))(torch.sin)
        torch.library.register_autograd(
            f"costlab_truth::{name}",
            lambda context, grad: grad * torch.cos(context.saved_tensors[0]),
            setup_context=_keep_input,
        )
    torch.library.register_fake("costlab_truth::hidden_sine")(torch.empty_like)

"""What costlab says of whole small models: convolutions, embeddings, shared weights and modules, dynamic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import models as m
from .harness import line_of, observe
from .scheduling import device


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def test_conv_norm_relu_needs_one_layout() -> None:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    forced = {"force_layout_optimization": True}  # on a GPU Inductor leaves convolutions of few channels as they are
    torch.manual_seed(0)
    s = observe(m.ConvNet(), images, options=forced)
    torch.manual_seed(0)
    mended = observe(
        m.ConvNet().to(memory_format=torch.channels_last),
        images.contiguous(memory_format=torch.channels_last),
        options=forced,
    )
    assert s.layer("blocks.0").fusion_status == "partial"
    assert s.layer("blocks.0").main_cause == "layout_copy"
    assert {p.layer for p in s.patterns("hidden_copy")} == {"blocks.0.0", "blocks.1.0", "blocks.2.0"}
    assert mended.rate() > s.rate()
    assert mended.layer("blocks.1").fusion_status == "complete"
    # Batch statistics are reduced before they are applied: structural, not the user's to mend.
    assert mended.causes("blocks.1")["reduction_shape"] > 0


def test_joining_what_two_convolutions_gave_copies_it() -> None:
    """A library's convolution cannot write into a part of a tensor, as its matrix products can on a GPU."""
    forced = {"force_layout_optimization": True}
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    s, mended = (
        observe(m.Skip(joined=joined).to(memory_format=torch.channels_last), images, options=forced)
        for joined in (True, False)
    )
    assert s.layer("").fusion_status == "broken"
    assert s.layer("").main_cause == "layout_copy"
    at = line_of(m.Skip, "cat")
    (pattern,) = (p for p in s.patterns("hidden_copy") if p.phase == "forward" and p.source == at)
    assert pattern.bytes == 4 * (4 * 4 * 16 * 16 * 16), "two parts, each read and written"
    assert at not in {p.source for p in mended.patterns("hidden_copy")}
    assert s.rate("") < mended.rate("") - 0.02


def test_an_embedding_bag_is_a_library_call() -> None:
    # Run for C++: an idle kernel would hand the library offsets that it rejects.
    s = observe(m.Bags(library=True), ids(32, 8), cpp=not torch.cuda.is_available())
    assert s.layer("").fusion_status == "complete"
    lost = [x for x in s.misses if x.cause == "library_op" and x.phase == "forward"]
    assert lost and not any(x.addressable for x in lost)
    assert line_of(m.Bags, "bag") in s.sources("library_op")


def test_a_gather_and_a_sum_fuse() -> None:
    s = observe(m.Bags(library=False), ids(32, 8))
    assert s.layer("").fusion_status == "complete"
    assert not s.causes("")["library_op"]
    gather = s.layer("table")
    assert gather.layer_class == "embedding"


def test_tied_weights() -> None:
    s = observe(m.Tied(), ids(8, 32))
    assert {s.layer(x).fusion_status for x in ("embed", "blocks.0", "head")} == {"complete"}
    assert s.layer("head").layer_class == "head"


def test_a_module_used_twice_owns_both_uses() -> None:
    once = observe(m.Net(m.Block()), m.tokens())
    twice = observe(m.Recurrent(), m.tokens())
    assert twice.layer("blocks.0").fusion_status == twice.layer("blocks.0", "backward").fusion_status == "complete"
    products = [x for x in twice.spans if x.kind == "kernel" and x.layer == "blocks.0.up" and x.phase == "forward"]
    assert len(products) == 2
    assert (twice.layer("blocks.0").flops or 0) == 2 * (once.layer("blocks.0").flops or 0)


def test_a_compiled_block_inside_a_compiled_model() -> None:
    model = m.net(m.Block)
    model.blocks[0] = torch.compile(model.blocks[0])  # type: ignore[assignment]
    s = observe(model, m.tokens())
    assert {x.layer for x in s.spans if x.kind == "layer"} >= {"blocks.0", "blocks.0.norm", "blocks.1.norm"}
    assert s.layer("blocks.0").fusion_status == s.layer("blocks.1").fusion_status == "complete"


class Batches:
    """Runs a compiled model on several batch sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, model: Any) -> None:
        for size in self.sizes:
            model(m.tokens(size).to(device())).sum().backward()


def test_a_changing_batch_recompiles_and_stays_complete() -> None:
    s = observe(m.net(m.Block), run=Batches(8, 12))
    mended = observe(m.net(m.Block), run=Batches(8, 12), dynamic=True)
    for x in (s, mended):
        assert x.layer("blocks.0").fusion_status == x.layer("blocks.0", "backward").fusion_status == "complete"
    (pattern,) = s.patterns("recompile")
    assert pattern.count == 1
    assert not mended.patterns("recompile")
    live = [g for g in s.trace.graphs if not g.superseded and g.phase == "forward"]
    assert len(live) == 1, "only the newest compile of a frame counts"


def test_blocks_of_two_shapes_keep_their_own_graphs() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    s = observe(
        m.Net(*(Wide(w) for w in (16, 16, 32, 32))), torch.randn(8, 16, requires_grad=True), compile_blocks=True
    )
    flops = [s.layer(f"blocks.{i}").flops for i in range(4)]
    assert flops[0] == flops[1] and flops[2] == flops[3] == 2 * (flops[0] or 0)


def test_one_kernel_per_parameter() -> None:
    s, mended = observe(m.LoopNorm(), torch.randn(4, 4)), observe(m.LoopNorm(1), torch.randn(4, 4))
    forward = [p for p in s.patterns("per_parameter_loop") if p.phase == "forward"]
    assert [(p.layer, p.source, p.count) for p in forward] == [("", line_of(m.LoopNorm, "loop"), 12)]
    assert not mended.patterns("per_parameter_loop")


def test_per_block_compile_gives_every_block_the_shared_graph() -> None:
    torch.manual_seed(0)
    s = observe(m.Net(*(m.Block() for _ in range(4))), m.tokens(), compile_blocks=True)
    forward = [g for g in s.trace.graphs if g.phase == "forward"]
    assert len(forward) == 1 and forward[0].root == "blocks.0", "one graph serves all blocks"
    rows = [s.layer(f"blocks.{i}") for i in range(4)]
    assert {r.fusion_status for r in rows} == {"complete"}
    assert len({(r.bytes_read, r.flops) for r in rows}) == 1
    norms = [x for x in s.spans if x.kind == "kernel" and x.layer.endswith(".norm") and x.phase == "forward"]
    assert {k.layer for k in norms} == {f"blocks.{i}.norm" for i in range(4)}


def test_decisions_are_those_of_the_backend_that_ran() -> None:
    """Residual add and RMSNorm share a loop in Triton; the C++ backend keeps them apart and gives no reason."""
    if torch.cuda.is_available():
        pytest.skip("the C++ backend schedules CPU models only")
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(m.WIDTH, m.WIDTH, bias=False) for _ in range(2))
            self.norm = m.RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            h = x + self.first(x)
            h = h + self.second(self.norm(h))
            return h + self.norm(h)

    triton, cpp = observe(Residual(), m.tokens()), observe(Residual(), m.tokens(), cpp=True)
    for s in (triton, cpp):
        assert s.trace.supported and s.layer("norm").fusion_rate is not None
    assert (triton.step().fusion_rate or 0.0) > (cpp.step().fusion_rate or 0.0)
    assert cpp.causes("")["backend_loop_mismatch"] > 0

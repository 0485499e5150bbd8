"""Linear layer and cross-entropy without all the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from costlab.kernels.fused import linear_cross_entropy as module
from costlab.kernels.fused.launch import Tile
from costlab.kernels.fused.linear_cross_entropy import (
    chunk_rows,
    chunks,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

Draw = Callable[..., Tensor]
Agree = Callable[..., None]
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture
def targets(device: torch.device) -> Tensor:
    values = torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(3))
    values[0, 3:9] = -100
    return values.to(device)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("reduction", "z_weight"), [("mean", 0.0), ("mean", 1e-2), ("sum", 1e-3)])
@pytest.mark.parametrize("block", [64, 8192])  # several blocks a row, the row in one
def test_against_all_logits(
    draw: Draw,
    agree: Agree,
    targets: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    reduction: str,
    z_weight: float,
    block: int,
) -> None:
    monkeypatch.setitem(module.TILES, "softmax", Tile(block, 4))
    inputs = [draw(2, 20, 36, dtype=dtype), draw(101, 36, dtype=dtype, scale=0.3)]
    agree(
        lambda x, w, t: linear_cross_entropy(x, w, t, -100, z_weight, reduction, rows=16),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t, -100, z_weight, reduction),
        inputs,
        (targets,),
        TOLERANCES[dtype],
    )


def test_other_ignored_index(draw: Draw, agree: Agree, targets: Tensor) -> None:
    agree(
        lambda x, w, t: linear_cross_entropy(x, w, t.clamp_min(0), ignore_index=0),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t.clamp_min(0), ignore_index=0),
        [draw(2, 20, 36), draw(101, 36)],
        (targets,),
        1e-5,
    )


def test_frozen_weight_or_input(draw: Draw, targets: Tensor) -> None:
    x, w = draw(2, 20, 36), draw(101, 36)
    both = torch.autograd.grad(linear_cross_entropy(x, w, targets), (x, w))
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, w.detach(), targets), x)
    (dw,) = torch.autograd.grad(linear_cross_entropy(x.detach(), w, targets), w)
    torch.testing.assert_close((dx, dw), both)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, w, targets), linear_cross_entropy_reference(x, w, targets))


def test_second_backward_is_refused(draw: Draw, targets: Tensor) -> None:
    """The saved gradients were scaled in place; a wrong second gradient would be worse than an error."""
    loss = linear_cross_entropy(draw(2, 20, 36), draw(101, 36), targets)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 2).backward()


def test_no_valid_target(draw: Draw, targets: Tensor) -> None:
    x, w = draw(2, 20, 36), draw(101, 36)
    nothing = torch.full_like(targets, -100)
    assert linear_cross_entropy(x, w, nothing).isnan()
    loss = linear_cross_entropy(x, w, nothing, reduction="sum")
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not w.grad.any()


@pytest.mark.parametrize("wrong", [101, -1, 2**40])
def test_target_outside_the_vocabulary_is_not_hidden(draw: Draw, targets: Tensor, wrong: int) -> None:
    broken = targets.clone()
    broken[1, 1] = wrong
    assert linear_cross_entropy(draw(2, 20, 36), draw(101, 36), broken).isnan()


def test_masked_vocabulary(draw: Draw, device: torch.device) -> None:
    """Logits of minus infinity get probability zero, in every block of the row."""
    x = torch.ones(3, 1, device=device, requires_grad=True)
    w = torch.zeros(40, 1, device=device)
    w[:20] = float("-inf")
    loss = linear_cross_entropy(x, w, torch.tensor([20, 30, 39], device=device))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(20.0)).item(), rel=1e-6)


def test_empty(draw: Draw, device: torch.device) -> None:
    x, w = draw(0, 36), draw(101, 36)
    loss = linear_cross_entropy(x, w, torch.zeros(0, dtype=torch.int64, device=device), reduction="sum")
    loss.backward()
    assert loss.item() == 0 and not w.grad.any()


def test_autocast(draw: Draw, targets: Tensor) -> None:
    x, w = draw(2, 20, 36), draw(101, 36)
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = linear_cross_entropy(x, w, targets)
    loss.backward()
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(linear_cross_entropy_reference(x, w, targets).item(), rel=2e-2)


def test_refusals(draw: Draw, targets: Tensor) -> None:
    x, w = draw(2, 20, 36), draw(101, 36)
    with pytest.raises(ValueError, match="no reduction"):
        linear_cross_entropy(x, w, targets, reduction="none")
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(x, w, targets[:, :-1])
    with pytest.raises(ValueError, match="float32"):
        linear_cross_entropy(x, w.half(), targets)


@given(st.integers(0, 100_000), st.integers(1, 300_000), st.sampled_from([2, 4]))
def test_chunks_are_bounded(tokens: int, vocab: int, itemsize: int) -> None:
    rows = chunk_rows(tokens, vocab, itemsize)
    assert rows % 128 == 0 and rows >= 128
    assert rows <= module.MIN_CHUNK or rows * vocab * itemsize <= module.BUFFER_BYTES
    assert rows < tokens + 128 or tokens == 0


@given(st.integers(0, 50_000), st.integers(1000, 200_000), st.sampled_from([64, 2048, 8192]))
def test_chunks_cover_all_tokens_in_the_memory_of_the_first(tokens: int, vocab: int, width: int) -> None:
    first = chunk_rows(tokens, vocab, 2)
    sizes = chunks(tokens, vocab, width, first)
    assert sum(sizes) == tokens and all(0 < s <= first for s in sizes)
    assert all(s >= min(module.MIN_CHUNK, first) for s in sizes[:-1])
    budget = first * (vocab + width)
    for i, size in enumerate(sizes):
        assert size <= module.MIN_CHUNK or sum(sizes[:i]) * width + size * (vocab + width) <= budget


def test_tokens_that_do_not_fill_the_last_chunk(draw: Draw, agree: Agree, targets: Tensor) -> None:
    agree(
        lambda x, w, t: linear_cross_entropy(x, w, t, rows=17),
        linear_cross_entropy_reference,
        [draw(2, 20, 36), draw(101, 36)],
        (targets,),
        1e-5,
    )

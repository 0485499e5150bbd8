"""Recomputation: same gradients whatever is kept, the operators that are computed again, and the refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from costlab.kernels.recompute import (
    Granularity,
    Recompute,
    RecomputeError,
    SweepPoint,
    activation_budget,
    apply,
    mark_pareto,
    random_operators,
    sweep,
)

BLOCKS = ("0", "1", "2")


class Block(nn.Module):
    """Two matrix products, an activation and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual feed-forward."""
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout), Block(dropout), Block(dropout))


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module) -> tuple[list[torch.Tensor], Counter[str]]:
    torch.manual_seed(1)
    x = torch.randn(8, 16)
    with _Counter() as counter:
        model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], counter.calls


CHOICES = [
    Recompute(Granularity.BLOCK, BLOCKS),
    Recompute(Granularity.OPERATOR, BLOCKS),
    Recompute(Granularity.OPERATOR, BLOCKS, every_matmul=2),
    Recompute(Granularity.BLOCK, BLOCKS[:1]),
]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.label} {len(c.blocks)}")
def test_gradients_do_not_depend_on_what_is_recomputed(choice: Recompute, dropout: float) -> None:
    want, _ = _gradients(_model(dropout))
    model = _model(dropout)
    apply(model, choice)
    got, _ = _gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_each_granularity_recomputes_what_it_says() -> None:
    counts = {}
    for choice in [Recompute(), *CHOICES]:
        model = _model()
        apply(model, choice)
        _, calls = _gradients(model)
        counts[choice.label, len(choice.blocks)] = (calls["aten::addmm"], calls["aten::gelu"])
    assert counts["none", 0] == (6, 3)
    # The last product of a block isn't needed by its own backward, so recomputation stops before it.
    assert counts["block", 3] == (9, 6) and counts["block", 1] == (7, 4)
    assert counts["operator", 3] == (6, 6)
    assert counts["operator, 1 of 2 matmuls", 3][0] in (6, 9)


def test_names_and_state_stay_and_undo_restores() -> None:
    model = _model()
    names = list(model.state_dict())
    undo = apply(model, CHOICES[0])
    assert list(model.state_dict()) == names
    with pytest.raises(RecomputeError, match="already"):
        apply(model, CHOICES[0])
    undo()
    _, calls = _gradients(model)
    assert calls["aten::addmm"] == 6


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        (Recompute(Granularity.BLOCK, ("9",)), "no such blocks: 9"),
        (Recompute(Granularity.OPERATOR), "no blocks"),
        (Recompute(Granularity.OPERATOR, BLOCKS, every_matmul=0), "can't be kept"),
    ],
)
def test_impossible_choices_are_refused(choice: Recompute, match: str) -> None:
    with pytest.raises(RecomputeError, match=match):
        apply(_model(), choice)


def test_random_operators_are_found_and_nothing_is_left_changed() -> None:
    x = torch.randn(4, 16)
    assert random_operators(_model(0.0), x) == []
    assert random_operators(_model(0.5).eval(), x) == []
    state = torch.get_rng_state()
    model = nn.Sequential(_model(0.5), nn.BatchNorm1d(16))
    before = model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    assert random_operators(model, x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]


def test_attention_without_dropout_counts_as_not_random() -> None:
    class Attention(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.p)

    q = torch.randn(1, 2, 8, 16)
    assert random_operators(Attention(0.0), q) == []
    assert random_operators(Attention(0.1), q) != []


def test_a_budget_is_set_inside_only_and_refused_with_random_operators() -> None:
    import torch._functorch.config as functorch

    with activation_budget(0.5, []):
        assert functorch.activation_memory_budget == 0.5
    assert functorch.activation_memory_budget == 1.0
    with activation_budget(1.0, ["aten::native_dropout"]):
        pass
    with pytest.raises(RecomputeError, match="190758"):
        with activation_budget(0.5, ["aten::native_dropout"]):
            pass
    with pytest.raises(RecomputeError, match="outside"):
        with activation_budget(1.5, []):
            pass


def test_pareto_marks_what_nothing_beats() -> None:
    points = [
        SweepPoint("none", 10.0, 100), SweepPoint("block", 13.0, 40), SweepPoint("worse", 14.0, 60),
        SweepPoint("operator", 11.0, 60), SweepPoint("failed", None, None, error="x"), SweepPoint("cpu", 5.0, None),
    ]  # fmt: skip
    assert [p.label for p in mark_pareto(points) if p.pareto] == ["none", "block", "operator"]


def test_a_sweep_measures_all_and_keeps_failures() -> None:
    freed: list[str] = []

    def build(choice: Recompute) -> Any:
        model = _model()
        apply(model, choice)

        def step() -> None:
            model(torch.randn(8, 16)).sum().backward()

        return step, lambda: freed.append(choice.label)

    choices = [Recompute(), CHOICES[0], Recompute(Granularity.BLOCK, ("9",))]
    points = sweep(build, choices, torch.device("cpu"), warmup=1, steps=2)
    assert [p.label for p in points] == ["none", "block", "block"] and freed == ["none", "block"]
    assert points[0].ms and points[0].peak_bytes is None and "no such blocks" in points[2].error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_recomputing_blocks_saves_memory_on_a_gpu() -> None:
    def build(choice: Recompute) -> Any:
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
        )
        model = model.cuda()
        apply(model, choice)
        x = torch.randn(8192, 1024, device="cuda")
        return lambda: model(x).sum().backward(), lambda: None

    blocks = tuple(str(i) for i in range(8))
    none, block = sweep(build, [Recompute(), Recompute(Granularity.BLOCK, blocks)], torch.device("cuda"))
    assert none.peak_bytes and block.peak_bytes and block.peak_bytes < none.peak_bytes / 2

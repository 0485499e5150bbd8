"""What a user's file may hold: which modules are blocks, and what cannot be trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from costlab.probes.workloads.base import WorkloadContext, WorkloadError, coerce, find_blocks, one_number
from costlab.probes.workloads.loader import load


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(8)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def holding(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers of a transformer": (
        lambda: holding(embedding=nn.Embedding(4, 8), layers=nn.ModuleList(Block() for _ in range(11))),
        [f"layers.{i}" for i in range(11)],
    ),
    "sequences of plain layers": (
        lambda: holding(blocks=nn.ModuleList(perceptron() for _ in range(3)), norm=nn.BatchNorm1d(8)),
        [f"blocks.{i}" for i in range(3)],
    ),
    "sequences with one layer that trains": (
        lambda: holding(blocks=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))),
        [f"blocks.{i}" for i in range(3)],
    ),
    "stages of blocks": (
        lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "one sequence of plain layers": (perceptron, []),
    "a list of plain layers": (lambda: holding(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4))), []),
    "layers by name": (lambda: holding(first=nn.Linear(8, 8), norm=nn.LayerNorm(8), last=nn.Linear(8, 8)), []),
    "a dictionary": (lambda: holding(towers=nn.ModuleDict({"a": Block(), "b": Block()})), ["towers.a", "towers.b"]),
    "nothing that repeats": (lambda: holding(one=nn.Linear(8, 8), two=Block()), ["two"]),
    "a list that does not repeat": (
        lambda: holding(parts=nn.ModuleList([nn.Linear(8, 8), Block()]), head=nn.Linear(8, 8)),
        ["parts.1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_what_repeats_and_can_be_called(name: str) -> None:
    make, blocks = CASES[name]
    model = make()
    found = find_blocks(model)
    assert found == blocks
    assert not any(isinstance(model.get_submodule(b), nn.ModuleList | nn.ModuleDict) for b in found)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_that_cannot_be_trained_is_refused(model: nn.Module) -> None:
    with pytest.raises(WorkloadError, match="here: the model has no parameter that can be trained"):
        coerce((model, [torch.ones(2, 2)], lambda m, b: m(b).sum()), "here")


def ones() -> Iterator[torch.Tensor]:
    for number in range(3):
        yield torch.full((2,), float(number))


class Fresh:
    def __init__(self) -> None:
        self.calls = 0

    def batch(self) -> torch.Tensor:
        self.calls += 1
        return torch.full((2,), float(self.calls))


@pytest.mark.parametrize(
    ("batches", "firsts"),
    [
        (ones, [0, 1, 2, 0, 1]),
        (ones(), [0, 1, 2, 0, 1]),
        (list(ones()), [0, 1, 2, 0, 1]),
        (lambda: list(ones()), [0, 1, 2, 0, 1]),
        (lambda step: torch.full((2,), float(step)), [0, 1, 2, 3, 4]),
        (Fresh().batch, [2, 3, 4, 5, 6]),
    ],
)
def test_batches_come_in_any_of_the_usual_forms(batches: Any, firsts: list[float]) -> None:
    workload = coerce((nn.Linear(2, 2), batches, lambda m, b: m(b).sum()), "here")
    assert [float(workload.batch(step)[0]) for step in range(5)] == firsts


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.ones(3), r"got shape \[3\]"),
        (1.5, "got float"),
        ((torch.ones(1), torch.ones(1)), "got tuple"),
        (SimpleNamespace(loss=torch.ones(1)), "got SimpleNamespace; return its .loss"),
    ],
)
def test_a_loss_that_is_not_one_number_is_said(loss: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        one_number(loss)
    assert float(one_number(torch.tensor([2.0]))) == 2.0


MODEL = "import torch\ndef make({}):\n    return torch.nn.Linear(2, 2), [torch.ones(2)], lambda m, b: m(b).sum()\n"


@pytest.mark.parametrize("arguments", ["ctx", "ctx=None", "*args", ""])
def test_make_may_take_the_context_or_nothing(tmp_path: Path, arguments: str) -> None:
    file = tmp_path / "json.py"
    file.write_text(MODEL.format(arguments))
    before = sys.modules.get("json")
    context = WorkloadContext(torch.device("cpu"), torch.float32, "", 0, 0, 0, 0, 1)
    workload = load(f"{file}:make", context)
    assert workload.name == "json"
    assert sys.modules.get("json") is before
    sys.path.remove(str(tmp_path))

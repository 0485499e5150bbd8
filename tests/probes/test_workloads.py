"""What a user's file may hold: which modules are blocks, and what cannot be trained."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from costlab.probes.workloads.base import (
    WorkloadContext,
    WorkloadError,
    coerce,
    find_blocks,
    one_number,
)
from costlab.probes.workloads.batches import count_samples, tensors, to_device
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


CONTEXT = WorkloadContext(torch.device("cpu"), torch.float32, "", 0, 0, 0, 0, 1)
ARGUMENTS = """
import argparse, torch
{at_import}
def make(ctx):
    {in_make}
    return torch.nn.Linear(2, options.width), [torch.ones(2)], lambda m, b: m(b).sum()
"""
PARSE = (
    "options = argparse.ArgumentParser(); options.add_argument('--width', type=int, {}); options = options.parse_args()"
)


@pytest.mark.parametrize("place", ["at_import", "in_make"])
def test_arguments_of_the_users_file_take_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["costlab", "run", "--ranks", "2"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / f"arguments_{place}.py"
    file.write_text(ARGUMENTS.format(**{"at_import": "", "in_make": "", place: PARSE.format("default=3")}))
    assert load(f"{file}:make", CONTEXT).model.out_features == 3
    assert sys.argv == ["costlab", "run", "--ranks", "2"]


@pytest.mark.parametrize("place", ["at_import", "in_make"])
def test_an_argument_without_a_default_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / f"required_{place}.py"
    file.write_text(ARGUMENTS.format(**{"at_import": "", "in_make": "", place: PARSE.format("required=True")}))
    line = 3 if place == "at_import" else 5
    with pytest.raises(
        WorkloadError, match=rf"SystemExit: 2; .* give your arguments defaults \(required_\w+.py:{line}\)"
    ):
        load(f"{file}:make", CONTEXT)
    assert "--width" in capsys.readouterr().err


def test_a_file_that_ends_the_program_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit('no data in /data')\n")
    with pytest.raises(WorkloadError, match=r"failed: SystemExit: no data in /data \(ends.py:2\)"):
        load(f"{file}:make", CONTEXT)


LAZY = """
import torch
from torch import nn
def make(ctx):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.BatchNorm1d(8), nn.LazyLinear(1))
    return model, [torch.ones(4, {})], lambda m, b: m(b).sum()
"""


def test_lazy_modules_get_their_shapes_from_a_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "lazily.py"
    file.write_text(LAZY.format(5))
    model = load(f"{file}:make", CONTEXT).model
    assert [tuple(p.shape) for p in model.parameters()] == [(8, 5), (8,), (8,), (8,), (8,), (8,), (1, 8), (1,)]
    assert int(model.get_buffer("2.num_batches_tracked")) == 0
    file.write_text(LAZY.format("5, 6, 7"))
    with pytest.raises(WorkloadError, match="a first batch for the model's lazy modules raised"):
        load(f"{file}:make", CONTEXT)


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: tuple[str, ...] = ("a",)


class Encoding(UserDict[str, torch.Tensor]):
    """As a tokenizer's: a mapping, not a dict, that moves itself."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({k: v.to(device) for k, v in self.items()})


def test_batches_of_any_make_are_moved() -> None:
    meta, x = torch.device("meta"), torch.ones(4, 2)
    assert to_device(Sample(x), meta).x.is_meta
    assert to_device(Sample(x), meta).names == ("a",)
    moved = to_device(Encoding(ids=x), meta)
    assert moved["ids"].is_meta
    assert isinstance(moved, Encoding)
    assert to_device(UserDict(ids=[x]), meta)["ids"][0].is_meta
    assert to_device(MappingProxyType({"ids": x}), meta)["ids"].is_meta
    assert not x.is_meta
    for batch in (Sample(x), Encoding(ids=x), UserDict(ids=[x]), (Sample(x), "b")):
        assert count_samples(batch) == 4
        assert [t is x for t in tensors(batch)] == [True]


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    """Built anew from moved parts they would not, and cuDNN refuses them."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = to_device((packed, 1), torch.device("meta"))[0]
    assert moved.data.is_meta
    assert moved.batch_sizes.device.type == "cpu"

"""The user's sampler: what it may yield, and that every mistake is one line that names it."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from costlab.probes.shapes import cut, seen
from costlab.probes.shapes_spec import Shape, ShapesSpec
from costlab.probes.spec import SpecError
from costlab.probes.workloads.base import WorkloadError
from costlab.probes.workloads.batches import tensors


@dataclass
class Sample:
    """A batch of a class of its own."""

    tokens: Tensor
    mask: Tensor
    table: Tensor


def sampler(tmp_path: Path, body: str, samples: int = 1000) -> ShapesSpec:
    file = tmp_path / "my_sampler.py"
    file.write_text(f"import numpy as np\n\ndef pairs():\n    {body}\n")
    return ShapesSpec(sampler=f"{file}:pairs", samples=samples)


@pytest.mark.parametrize(
    "body",
    [
        "return [(4, 96), (4, 128), (4, 96)]",
        "return ([4, n] for n in (96, 128, 96))",
        "return iter([(np.int64(4), np.int32(n)) for n in (96, 128, 96)])",
        "return np.array([[4, 96], [4, 128], [4, 96]])",
    ],
)
def test_pairs_are_counted_in_the_order_first_seen(tmp_path: Path, body: str) -> None:
    assert seen(sampler(tmp_path, body)) == [Shape(batch=4, seq=96, count=2), Shape(batch=4, seq=128)]


def test_an_endless_sampler_is_drawn_from_as_often_as_asked(tmp_path: Path) -> None:
    body = "while True: yield 2, 64"
    assert seen(sampler(tmp_path, body, samples=37)) == [Shape(batch=2, seq=64, count=37)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return []", "yielded nothing"),
        ("return 7", "yielded nothing"),
        ("return [(0, 5)]", "yielded (0, 5)"),
        ("return [(4, -1)]", "yielded (4, -1)"),
        ("return [(4, 8, 2)]", "yielded (4, 8, 2)"),
        ("return [(4.0, 8)]", "yielded (4.0, 8)"),
        ("return [(True, 8)]", "yielded (True, 8)"),
        ("return ['48']", "yielded '48'"),
        ("return [5]", "yielded 5"),
        ("raise KeyError('data')", "raised KeyError: 'data'"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return [(1, n + 1) for n in range(65)]", "65 different shapes"),
    ],
)
def test_what_is_no_pair_is_refused_by_name(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        seen(sampler(tmp_path, body))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_or_function_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no such file: .*gone\.py"):
        seen(ShapesSpec(sampler=f"{tmp_path / 'gone.py'}:pairs"))
    spec = sampler(tmp_path, "return []")
    with pytest.raises(WorkloadError, match="no function 'pears'; it defines: pairs"):
        seen(ShapesSpec(sampler=spec.sampler.replace(":pairs", ":pears")))


def test_every_kind_of_batch_is_cut() -> None:
    """Mappings and dataclasses too; what has other leading dimensions stays."""
    large, small = Shape(batch=4, seq=8), Shape(batch=2, seq=5)
    tokens, mask, table = torch.ones(4, 8), torch.ones(4, 1), torch.ones(3, 8)
    for made in (
        (tokens, mask, table),
        {"a": tokens, "b": mask, "c": table},
        UserDict({"a": tokens, "b": mask, "c": table}),
        Sample(tokens, mask, table),
    ):
        sizes = [tuple(t.shape) for t in tensors(cut(made, large, small))]
        assert sizes == [(2, 5), (2, 1), (3, 8)]
        assert type(cut(made, large, small)) is type(made)
    assert tokens.shape == (4, 8)

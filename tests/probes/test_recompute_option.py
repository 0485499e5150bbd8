"""`--recompute` of a run: what is refused before anything starts, and the activation budget in the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from costlab.probes import parallel
from costlab.probes.spec import RunSpec, SpecError, recompute_budget, validate
from costlab.probes.workloads.base import coerce


@pytest.fixture(autouse=True)
def budget_left_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ExitStack() as stack:
        monkeypatch.setattr(parallel, "_FOR_GOOD", stack)
        yield


def workload(dropout: float) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    return coerce((model, [torch.randn(2, 8)], lambda m, batch: m(batch).sum()), "here")


@pytest.mark.parametrize(
    ("text", "share"), [("none", None), ("operator", None), ("budget:0.5", 0.5), ("budget:1", 1.0)]
)
def test_policies(text: str, share: float | None) -> None:
    assert recompute_budget(text) == share
    validate(RunSpec(recompute=text))


@pytest.mark.parametrize("text", ["budget", "budget:1.1", "budget:nan", "budget:inf", "Block", "block:0.5", ""])
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(SpecError, match="--recompute"):
        validate(RunSpec(recompute=text))


def test_a_budget_without_a_compiler_is_refused() -> None:
    with pytest.raises(SpecError, match="add --compile"):
        validate(RunSpec(recompute="budget:0.5", compile="none"))


@pytest.mark.parametrize("policy", ["block", "operator"])
def test_blocks_cannot_be_recomputed_where_there_are_none(policy: str) -> None:
    model = workload(0.0).model
    with pytest.raises(SpecError, match=f"--recompute {policy}: the model has no repeated blocks; budget:0.5"):
        parallel.wrap(model, [], RunSpec(recompute=policy), torch.device("cpu"))


def test_the_budget_is_set_and_stays() -> None:
    import gc

    import torch._functorch.config as functorch

    parallel.set_activation_budget(workload(0.0), RunSpec(recompute="budget:0.5"))
    gc.collect()
    assert functorch.activation_memory_budget == 0.5


def test_a_budget_is_refused_where_the_forward_draws_random_numbers() -> None:
    import torch._functorch.config as functorch

    with pytest.raises(SpecError, match="pytorch#190758"):
        parallel.set_activation_budget(workload(0.1), RunSpec(recompute="budget:0.5"))
    assert functorch.activation_memory_budget == 1.0
    parallel.set_activation_budget(workload(0.1), RunSpec(recompute="budget:1"))


@pytest.mark.parametrize("policy", ["block", "operator"])
def test_gradients_are_those_without_recomputation(policy: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(2, 8)
    model(batch).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    parallel._recompute(model, ["0", "1"], policy)
    model(batch).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True) if p.grad is not None)
    assert len(wanted) == 6

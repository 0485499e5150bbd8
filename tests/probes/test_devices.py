"""Batches that a user makes on another device than the model's, as on the host for a GPU: every call outside a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from costlab.kernels.fused import registry
from costlab.probes import parallel, tune, worker
from costlab.probes.records import WorkloadFacts
from costlab.probes.spec import RunSpec
from costlab.probes.workloads.base import Workload, batch_beside

MOVES = {"to", "shape", "__get__", "dim", "size", "numel"}


class Elsewhere(Tensor):
    """A tensor of another device: it can be moved and measured, nothing else."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "to":
                return args[0].as_subclass(Tensor).clone()
            if func.__name__ in MOVES:
                return func(*args, **(kwargs or {}))
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


class Classifier(nn.Module):
    """An embedding and a Linear without bias, whose loss can be one op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.embed(x))
        return out


def batch(_step: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(0, 32, (4, 8)).as_subclass(Elsewhere) for _ in range(2))  # type: ignore[return-value]


def loss(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def workload() -> Workload:
    return Workload(model=Classifier(), batch=batch, loss=loss)


def run() -> Any:
    said: list[str] = []
    voice = SimpleNamespace(log=lambda text, _level="info": said.append(text))
    return SimpleNamespace(
        device=torch.device("cpu"), voice=voice, said=said, facts=WorkloadFacts(), spec=RunSpec(dtype="fp32")
    )


def test_the_stand_in_fails_where_another_device_would() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        loss(Classifier(), batch(0))
    assert loss(Classifier(), batch_beside(workload())).isfinite()


def test_flops_are_counted() -> None:
    own, mine = run(), workload()
    worker.count_flops(own, mine)
    assert own.said == []
    assert mine.flops_per_batch == 3 * 2 * 4 * 8 * 16 * 32
    assert "3 x FLOPs" in mine.flops_formula


def test_the_fused_loss_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "available", lambda _: True)
    own, mine = run(), workload()
    worker.put_in_fused_kernels(own, mine)
    assert "linear_cross_entropy: loss" in own.facts.fused
    assert own.facts.fused_notes == []


def test_random_numbers_are_looked_for_before_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as for_now:
        monkeypatch.setattr(parallel, "_FOR_GOOD", for_now)
        parallel.set_activation_budget(workload(), RunSpec(recompute="budget:0.5", dtype="fp32"))


def test_tune_looks_at_the_loss_and_takes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costlab.probes.workloads.loader.load", lambda *_: workload())
    spec = RunSpec(dtype="fp32", compile="none")
    mine = tune.make(spec, torch.device("cpu"))
    findings: list[str] = []
    assert tune.loss_site(mine, findings) is not None
    value, gradients = tune.step_of(mine, spec, None, findings)
    assert value > 0
    assert set(gradients) == {"embed.weight", "head.weight"}
    assert findings == []

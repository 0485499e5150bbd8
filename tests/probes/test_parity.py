"""Steps that are timed, and gradient norms: of plain and of sharded parameters, without moving the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from costlab.probes import parallel
from costlab.probes.parallel import Wrapped
from costlab.probes.parity import gradient_rows
from costlab.probes.spec import RunSpec
from costlab.probes.steps import Trainer, lead_steps, measure
from costlab.probes.workloads.base import Workload


def trainer_of(model: nn.Module) -> Trainer:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    workload = Workload(model=model, batch=lambda step: data * (step + 1), loss=lambda m, x: m(x).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(workload, Wrapped(model=model, base=model, blocks=[]), optimizer, torch.device("cpu"))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_norms_are_those_of_autograd_and_nothing_is_left_behind() -> None:
    model = model_of()
    trainer = trainer_of(model)
    trainer.step()
    before = [p.detach().clone() for p in model.parameters()]
    rows = gradient_rows(trainer, rank=3)
    assert [r.tensor for r in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {(r.rank, r.step) for r in rows} == {(3, 1)}
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    trainer.workload.loss(model, trainer.workload.batch(1)).backward()
    for row, parameter in zip(rows, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert row.norm == pytest.approx(float(parameter.grad.norm()), rel=1e-6)


def test_steps_that_lead_into_the_timed_ones_train_and_are_not_told() -> None:
    trainer, told = trainer_of(model_of()), list[int]()
    losses = [row.loss for row in measure(trainer, 3, 0, lambda index, _: told.append(index), lead=2)]
    assert (trainer.index, told) == (5, [0, 1, 2])
    other = trainer_of(model_of())
    assert [float(other.step()) for _ in range(5)][2:] == losses


@pytest.mark.parametrize(("device", "warmup", "lead"), [("cuda", 5, 4), ("cuda", 2, 2), ("cuda", 0, 0), ("cpu", 5, 0)])
def test_only_a_host_that_runs_ahead_needs_a_lead(device: str, warmup: int, lead: int) -> None:
    assert lead_steps(torch.device(device), warmup) == lead


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["block", "model"])
def test_a_model_of_torchs_own_class_is_one_graph_within_its_wrapper(
    way: Literal["ddp", "fsdp"], how: Literal["block", "model"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(parallel, "_compile_options", lambda *_: {"backend": "eager"})
    wrapped = parallel.wrap(
        model_of(), [], RunSpec(parallel=way, compile=how, dtype="fp32", ranks=1), torch.device("cpu")
    )
    wrapped.model(torch.randn(4, 8))
    assert wrapped.passed_over == {"Sequential": 1}
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_parameter_that_takes_no_part_has_no_row() -> None:
    model = model_of()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    assert "unused" not in [r.tensor for r in gradient_rows(trainer_of(model), rank=0)]


def test_complex_parameters_are_trained_and_have_norms() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x * self.turn).sum(-1)

    torch.manual_seed(0)
    model = Rotation()
    trainer = trainer_of(model)
    trainer.optimizer = parallel.make_optimizer(trainer.wrapped, RunSpec())
    before = model.turn.detach().clone()
    trainer.step()
    assert not torch.equal(model.turn, before)
    (row,) = gradient_rows(trainer, rank=0)
    trainer.workload.loss(model, trainer.workload.batch(trainer.index)).backward()
    assert model.turn.grad is not None
    assert row.norm == pytest.approx(float(torch.view_as_real(model.turn.grad).norm()), rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_adamw_is_fused_on_every_device(name: Literal["adamw", "sgd"], kind: type[torch.optim.Optimizer]) -> None:
    trainer = trainer_of(model_of())
    optimizer = parallel.make_optimizer(trainer.wrapped, RunSpec(optimizer=name))
    assert isinstance(optimizer, kind)
    assert bool(optimizer.defaults["fused"]) == (name == "adamw")


@pytest.mark.usefixtures("group")
def test_sharded_gradients_have_the_norm_of_the_whole() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = {r.tensor: r.norm for r in gradient_rows(trainer_of(model_of()), rank=0)}
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    sharded = {r.tensor: r.norm for r in gradient_rows(trainer_of(model), rank=0)}
    assert sharded == pytest.approx(plain, rel=1e-6)


def test_the_learning_rate_rises_to_the_one_asked_for() -> None:
    trainer = trainer_of(model_of())
    rates = []
    for index in (0, 49, 99, 500):
        trainer.index = index
        trainer.step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.001, 0.05, 0.1, 0.1])

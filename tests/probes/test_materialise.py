"""Models from the meta device: sharded before they are filled, tied as they were, with values that train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from costlab.app.store import Run
from costlab.kernels.fused import registry
from costlab.probes.materialise import fill, unfilled
from costlab.probes.records import AnyEvent, Log, Manifest, StepRow
from costlab.probes.spec import RunSpec
from costlab.probes.warm import Template, WarmLauncher

FILE = Path(__file__).parent / "workload_files" / "meta.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as running:
        yield running


def run(template: Template, path: Path, make: str, **options: object) -> tuple[Manifest, list[str], list[float]]:
    """The manifest, what was logged, and rank 0's losses of two ranks."""
    given = {"workload": f"{FILE}:{make}", "size": "", "ranks": 2, "device": "cpu", "compile": "none", "dtype": "fp32"}
    quick = {"steps": 3, "warmup": 1, "profile_steps": 0, "checkpoint": False}
    said: list[str] = []

    def told(event: AnyEvent) -> None:
        if isinstance(event, Log):
            said.append(event.text)

    spec = RunSpec(**{**given, **quick, **options})  # type: ignore[arg-type]
    manifest = WarmLauncher(template, spec, path).run(told)
    steps = Run(path).table(StepRow.table, StepRow)
    return manifest, said, steps[(steps.role == "timed") & (steps["rank"] == 0)].loss.tolist()


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "ddp"])
@pytest.mark.parametrize("make", ["make", "tied", "initialised"])
def test_a_model_on_the_meta_device_trains(template: Template, tmp_path: Path, way: str, make: str) -> None:
    manifest, said, losses = run(template, tmp_path / "run", make, parallel=way)
    assert manifest.status == "complete", manifest.failure
    assert len(losses) == 3
    # an embedding's own values are wide: tied to the head they make large logits, here as without the meta device
    assert all(0 < loss < (20 if make == "tied" else 2) * math.log(32) for loss in losses)
    how = "by its init_weights()" if make == "initialised" else "by its modules' reset_parameters()"
    assert any(text.endswith(how) for text in said)
    assert manifest.workload is not None
    assert manifest.workload.flops_per_step
    assert not any("FLOPs not counted" in text for text in said)


def test_what_is_filled_is_sharded_already(template: Template, tmp_path: Path) -> None:
    """Its init_weights() fails on a parameter that is whole."""
    _, said, losses = run(template, tmp_path / "run", "sharded", parallel="fsdp")
    assert any(text.endswith("by its init_weights()") for text in said), said
    assert len(losses) == 3
    _, said, _ = run(template, tmp_path / "whole", "sharded", parallel="ddp")
    assert any("init_weights() failed (AssertionError: whole" in text for text in said)


def test_planned_replicas_are_refused_in_one_line(template: Template, tmp_path: Path) -> None:
    manifest, _, _ = run(template, tmp_path / "run", "make", parallel="hsdp", shard_size=1, schedule="ring")
    assert manifest.failure is not None
    assert manifest.failure.kind == "spec"
    assert "--schedule" in manifest.failure.message


class Odd(nn.Module):
    """Tensors that nobody initialises, and one that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(8, 8, device="meta"))
        self.gain = nn.Parameter(torch.empty(8, device="meta"))
        self.my_bias = nn.Parameter(torch.empty(8, device="meta"))
        self.there = nn.Parameter(torch.full((3,), 7.0))
        self.register_buffer("table", torch.empty(4, device="meta"))
        self.register_buffer("count", torch.empty((), dtype=torch.long, device="meta"))
        self.norm = nn.BatchNorm1d(8, device="meta")


def test_every_tensor_gets_a_value_and_what_was_there_keeps_its_own() -> None:
    model = Odd()
    assert unfilled(model)
    filled = fill(model, CPU, seed=3)
    assert not unfilled(model)
    assert model.matrix.std().item() == pytest.approx(0.02, rel=0.5)
    assert model.gain.tolist() == [1.0] * 8
    assert model.my_bias.tolist() == [0.0] * 8
    assert model.there.tolist() == [7.0] * 3
    assert model.norm.running_var is not None
    assert model.norm.running_var.tolist() == [1.0] * 8
    assert any("buffers are zero (table, count" in doubt for doubt in filled.doubts)
    again = Odd()
    fill(again, CPU, seed=3)
    assert torch.equal(again.matrix, model.matrix)


def test_what_was_tied_stays_tied() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, device="meta"), nn.Linear(4, 8, bias=False, device="meta"))
    model[1].weight = model[0].weight  # type: ignore[assignment]
    fill(model, CPU, seed=0)
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 1


def test_an_initialiser_that_fails_is_told_and_the_modules_do_it() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, device="meta")

        def init_weights(self, std: float) -> None:
            raise AssertionError(std)

    model = Picky()
    filled = fill(model, CPU, seed=0)
    assert filled.how.endswith("reset_parameters()")
    assert "init_weights() failed (TypeError" in filled.doubts[0]
    assert model.linear.weight.std() > 0.05  # nn.Linear's own, wider than the plain one


def test_no_loss_is_compared_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, device="meta"), nn.Linear(4, 8, bias=False, device="meta"))
    notes: list[str] = []
    assert registry.fused_loss(model, lambda m, b: m(b[0]).sum(), (torch.zeros(1), torch.zeros(1)), notes) is None
    assert "meta device" in notes[0]


def test_tune_and_shapes_take_it_too() -> None:
    from costlab.probes import shapes, tune
    from costlab.probes.shapes_spec import Shape, ShapesSpec

    spec = RunSpec(workload=f"{FILE}:make", device="cpu", dtype="fp32", compile="none")
    workload = tune.make(spec, CPU)
    assert workload.loss(workload.model, workload.batch(0)).isfinite()
    few = ShapesSpec(workload=f"{FILE}:make", device="cpu", dtype="fp32")
    stage = shapes.build(few, [Shape(batch=4, seq=8)])
    assert not unfilled(stage.workload.model)

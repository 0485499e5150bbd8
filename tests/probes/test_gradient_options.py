"""Gradient compression and accumulation in real runs: what is communicated, what a step is, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from costlab.app.store import Run
from costlab.probes.records import CollectiveRow, Manifest, StepRow
from costlab.probes.spec import RunSpec, SpecError, validate
from costlab.probes.warm import Template, WarmLauncher


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as running:
        yield running


def measured(template: Template, path: Path, **options: object) -> tuple[Manifest, float, list[float]]:
    """The manifest, bytes a rank and step communicated, and rank 0's losses."""
    given = {"workload": "llama", "size": "tiny", "ranks": 2, "device": "cpu", "compile": "none", "dtype": "fp32"}
    quick = {"steps": 4, "warmup": 1, "profile_steps": 1, "checkpoint": False, "lean": True}
    spec = RunSpec(**{**given, **quick, **options})  # type: ignore[arg-type]
    manifest = WarmLauncher(template, spec, path).run(lambda _: None)
    assert manifest.status == "complete", manifest.failure
    run = Run(path)
    rows = run.table(CollectiveRow.table, CollectiveRow)
    mine = rows[(rows["rank"] == 0) & rows.kind.isin(["all_reduce", "all_gather", "reduce_scatter"])]
    steps = run.table(StepRow.table, StepRow)
    losses = steps[(steps.role == "timed") & (steps["rank"] == 0)].loss.tolist()
    return manifest, float(mine[["bytes_in", "bytes_out"]].max(axis=1).sum()), losses


@pytest.fixture(scope="module")
def plain(template: Template, tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, float, list[float]]:
    return measured(template, tmp_path_factory.mktemp("runs") / "plain", parallel="ddp")


def test_a_compressed_gradient_is_half_as_large(
    template: Template, tmp_path: Path, plain: tuple[Manifest, float, list[float]]
) -> None:
    before, bytes_before, losses_before = plain
    after, bytes_after, losses = measured(template, tmp_path / "run", parallel="ddp", grad_compression="fp16")
    assert before.workload is not None
    assert after.workload is not None
    assert after.workload.expected_comm_bytes == pytest.approx((before.workload.expected_comm_bytes or 0) / 2, rel=0.01)
    assert bytes_after == pytest.approx(bytes_before / 2, rel=0.02)
    assert losses == pytest.approx(losses_before, rel=0.01)
    assert losses != losses_before


@pytest.mark.parametrize("hook", ["bf16", "powersgd"])
def test_a_hook_that_gloo_cannot_carry_is_refused_in_one_line(template: Template, tmp_path: Path, hook: str) -> None:
    spec = RunSpec(size="tiny", device="cpu", ranks=2, parallel="ddp", grad_compression=hook, lean=True)  # type: ignore[arg-type]
    manifest = WarmLauncher(template, spec, tmp_path / "run").run(lambda _: None)
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert f"--grad-compression {hook} needs GPUs with NCCL" in manifest.failure.message


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_accumulated_steps_hold_more_and_communicate_gradients_once(
    template: Template, tmp_path: Path, parallel: str
) -> None:
    one, bytes_one, _ = measured(template, tmp_path / "one", parallel=parallel)
    two, bytes_two, _ = measured(template, tmp_path / "two", parallel=parallel, accumulation=2)
    assert one.workload is not None
    assert two.workload is not None
    assert two.workload.units_per_step == 2 * one.workload.units_per_step
    grown = (two.workload.expected_comm_bytes or 0) - (one.workload.expected_comm_bytes or 0)
    assert bytes_two - bytes_one == pytest.approx(grown, rel=0.02, abs=1e5)
    assert bytes_two < 1.9 * bytes_one


def test_a_workload_that_seeds_nothing_trains_the_same_model_however_it_is_wrapped(
    template: Template, tmp_path: Path
) -> None:
    """Weights are alike on all ranks, data is not; another seed is another model."""
    unseeded = {"workload": f"{Path(__file__).parent / 'workload_files' / 'unseeded.py'}:make", "size": ""}
    ways = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}, "hsdp": {"parallel": "hsdp", "shard_size": 1}}
    losses = {way: measured(template, tmp_path / way, **unseeded, **options)[2] for way, options in ways.items()}
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["hsdp"] == pytest.approx(losses["ddp"], rel=1e-5)
    other = measured(template, tmp_path / "other", **unseeded, seed=1)[2]
    assert other != pytest.approx(losses["fsdp"], rel=1e-3)
    steps = Run(tmp_path / "fsdp").table(StepRow.table, StepRow)
    first = steps[(steps.role == "timed") & (steps.step == 0)].set_index("rank").loss
    assert first[0] != pytest.approx(first[1], rel=1e-3)


@pytest.mark.parametrize("way", [{"parallel": "ddp"}, {"parallel": "fsdp"}, {"parallel": "hsdp", "shard_size": 1}])
@pytest.mark.parametrize("make", ["make", "twice", "again"])
def test_frozen_weights_and_repeated_calls_are_in_the_expected_traffic(
    template: Template, tmp_path: Path, way: dict[str, object], make: str
) -> None:
    """Frozen adapters; the model called twice a step; a block called twice a call."""
    adapters = {"workload": f"{Path(__file__).parent / 'workload_files' / 'adapters.py'}:{make}", "size": ""}
    manifest, moved, _ = measured(template, tmp_path / "run", **adapters, **way, lean=False)
    assert manifest.workload is not None
    assert manifest.workload.expected_comm_bytes == moved


def test_mixed_element_types_run_under_autocast_as_the_failure_says(template: Template, tmp_path: Path) -> None:
    file = Path(__file__).parent / "workload_files" / "regression.py"
    options = {"workload": f"{file}:make", "size": "", "dtype": "bf16", "compile": "block"}
    spec = RunSpec(ranks=1, device="cpu", steps=2, warmup=1, profile_steps=0, checkpoint=False, **options)  # type: ignore[arg-type]
    failed = WarmLauncher(template, spec, tmp_path / "failed").run(lambda _: None)
    assert failed.failure is not None
    assert (failed.failure.kind, "--autocast" in failed.failure.advice) == ("dtype", True)
    losses = [
        measured(template, tmp_path / name, **options, **more)[2]
        for name, more in {"fsdp": {"parallel": "fsdp", "autocast": True}, "ddp": {"parallel": "ddp"}}.items()
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("way", [{"parallel": "fsdp"}, {"parallel": "hsdp", "shard_size": 1}])
def test_the_loss_of_a_users_file_gets_fp32_while_weights_are_gathered_in_bf16(
    template: Template, tmp_path: Path, way: dict[str, object]
) -> None:
    file = Path(__file__).parent / "workload_files" / "regression.py"
    wide = {"workload": f"{file}:wide", "size": "", "dtype": "bf16", "lean": False}
    manifest, moved, _ = measured(template, tmp_path / "run", **wide, **way)
    assert manifest.workload is not None
    assert manifest.workload.expected_comm_bytes == moved


def test_wrong_combinations_are_refused() -> None:
    with pytest.raises(SpecError, match="--parallel ddp"):
        validate(RunSpec(grad_compression="bf16"))
    with pytest.raises(SpecError, match="--accumulation must be above zero"):
        validate(RunSpec(accumulation=0))
    with pytest.raises(SpecError, match="--autocast casts to bf16"):
        validate(RunSpec(autocast=True, dtype="fp32"))

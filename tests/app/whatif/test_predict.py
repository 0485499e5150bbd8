"""Predictions follow from the baseline's report, and there is none where there is no model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import RunReport
from costlab.app.store import open_run
from costlab.app.whatif.predict import checked, predict
from costlab.probes.spec import RunSpec
from tests.app.make_run import write_example_run

BASE = RunSpec(ranks=2, batch=4, seq=2048)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return build_report(open_run(write_example_run(tmp_path_factory.mktemp("run") / "example")))


def change(report: RunReport, base: RunSpec = BASE, **options: Any) -> float | None:
    found = predict(report, base, options)
    return None if found is None else found.change


def test_cuda_graphs_save_the_launch_waits(report: RunReport) -> None:
    assert report.waterfall is not None
    assert report.steps is not None
    launch = sum(p.ms for p in report.waterfall.idle if "launch" in p.name)
    assert launch > 0
    assert change(report, cudagraphs=True) == pytest.approx(-launch / report.steps.step_ms.value)  # type: ignore[operator]


def test_recomputation_costs_the_forward_kernels_once_more(report: RunReport) -> None:
    assert report.fusion is not None
    assert report.steps is not None
    forward = sum(
        k.ms for k in report.fusion.kernels if k.phase == "forward" and k.layer and k.category != "communication"
    )
    assert change(report, recompute="block") == pytest.approx(forward / report.steps.step_ms.value)  # type: ignore[operator]


def test_sgd_saves_two_of_seven_accesses_and_adamw_adds_them_back(report: RunReport) -> None:
    saved, added = change(report, optimizer="sgd"), change(report, RunSpec(optimizer="sgd"), optimizer="adamw")
    assert saved is not None
    assert added is not None
    assert saved < 0 < added
    assert added / -saved == pytest.approx(7 / 5)


def test_a_larger_batch_spreads_what_does_not_grow(report: RunReport) -> None:
    twice, eight = change(report, batch=8), change(report, batch=32)
    assert twice is not None
    assert eight is not None
    assert eight < twice < 0
    assert eight == pytest.approx(twice * (4 / 32 - 1) / (4 / 8 - 1))


def test_ddp_moves_fewer_bytes_than_fsdp_in_bf16_on_two_ranks(report: RunReport) -> None:
    found = predict(report, BASE, {"parallel": "ddp"})
    if found is None:
        assert report.collectives is None or not any(r.busbw_gbps for r in report.collectives.rows)
        pytest.skip("the example has no bus bandwidth")
    assert "1.00x" in found.how  # 2 x 4 B all-reduced against 2 x 2 B gathered + 4 B scattered
    assert found.change == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("options", [{"compile": "none"}, {"dtype": "fp32"}, {"seq": 4096}, {"recompute": "none"}])
def test_no_model_no_prediction(report: RunReport, options: dict[str, Any]) -> None:
    base = msgspec.structs.replace(BASE, recompute="block") if "recompute" in options else BASE
    assert predict(report, base, options) is None


def test_a_joint_prediction_needs_a_model_for_every_part(report: RunReport) -> None:
    one, other = change(report, cudagraphs=True), change(report, optimizer="sgd")
    assert one is not None
    assert other is not None
    assert change(report, cudagraphs=True, optimizer="sgd") == pytest.approx((1 + one) * (1 + other) - 1)
    assert predict(report, BASE, {"cudagraphs": True, "compile": "model"}) is None
    assert predict(None, BASE, {"cudagraphs": True}) is None


def test_fused_kernels_save_what_missed_fusions_cost(report: RunReport) -> None:
    assert report.fusion is not None
    assert report.steps is not None
    root = report.fusion.layers[0]
    assert root.saves_ms
    assert change(report, fused=True) == pytest.approx(-root.saves_ms / report.steps.step_ms.value)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        (["cunn_SoftMaxForward<4>", "nll_loss_forward_reduce_cuda_kernel_2d"], 2.0),
        (["triton_red_fused__log_softmax_nll_loss", "nll_loss_forward_reduce_cuda_kernel_2d"], 1.0),
        (["mse_cuda_kernel", "reduce_kernel"], 0.0),
    ],
)
def test_an_eager_cross_entropy_goes_with_its_logits(report: RunReport, names: list[str], saved: float) -> None:
    assert report.fusion is not None
    assert report.steps is not None
    base = [k for k in report.fusion.kernels if k.layer != "loss"]
    like = msgspec.structs.replace(base[0], layer="loss", category="memory", ms=1.0)
    own = [msgspec.structs.replace(like, name=name) for name in names]
    fusion = [msgspec.structs.replace(report.fusion, kernels=kernels) for kernels in (base, [*base, *own])]
    before, after = (change(msgspec.structs.replace(report, fusion=f), fused=True) for f in fusion)
    assert before is not None
    assert after is not None
    assert before - after == pytest.approx(saved / report.steps.step_ms.value)  # type: ignore[operator]


def test_fused_kernels_that_a_cpu_cannot_run_save_nothing(report: RunReport) -> None:
    on_cpu = msgspec.structs.replace(report, environment=msgspec.structs.replace(report.environment, device="cpu"))
    found = predict(on_cpu, BASE, {"fused": True})
    assert found is not None and found.change == 0.0 and "none is put in" in found.how


def test_what_the_timed_steps_do_not_contain_changes_nothing(report: RunReport) -> None:
    assert change(report, checkpoint=False) == 0.0


def test_the_error_is_measured_less_predicted(report: RunReport) -> None:
    found = checked(predict(report, BASE, {"checkpoint": False}), 0.02, -0.01, 0.05)
    assert found is not None
    assert found.error == pytest.approx(0.02)
    assert found.inside is True

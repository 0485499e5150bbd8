"""The toggle `hybrid`: offered where there is an all-reduce, predicted by the alpha-beta model."""

from __future__ import annotations

import msgspec
import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import CollectivesView, CollectiveView, RunReport
from costlab.app.store import open_run
from costlab.app.whatif.predict import predict
from costlab.app.whatif.toggles import TOGGLES, Machine
from costlab.probes.spec import RunSpec
from tests.app.make_run import write_example_run

GPUS, CPU = Machine(gpus=2), Machine(gpus=0)
DDP = RunSpec(parallel="ddp", ranks=4)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return build_report(open_run(write_example_run(tmp_path_factory.mktemp("run") / "example")))


def with_all_reduce(report: RunReport, nbytes: int, busbw: float, exposed: float) -> RunReport:
    row = CollectiveView(
        kind="all_reduce", group="0,1,2,3", group_size=4, dtype="fp32", calls=2.0, bytes_in=nbytes, bytes_out=nbytes,
        bytes_step=2 * nbytes, ms=4.0, transfer_ms=4.0, wait_ms=0.0, exposed_ms=exposed, algbw_gbps=busbw / 1.5,
        busbw_gbps=busbw,
    )  # fmt: skip
    return msgspec.structs.replace(report, collectives=CollectivesView(rows=[row], total_ms=4.0, exposed_ms=exposed))


def test_pure_fsdp_is_told_what_to_combine_it_with() -> None:
    reason = TOGGLES["hybrid"].unavailable(RunSpec(parallel="fsdp"), GPUS)
    assert "no all-reduce" in reason
    assert "hybrid+ddp" in reason
    assert "hybrid+hsdp" in reason


def test_it_is_there_for_ddp_and_hsdp_and_needs_peers() -> None:
    assert TOGGLES["hybrid"].unavailable(RunSpec(parallel="ddp"), GPUS) == ""
    assert TOGGLES["hybrid"].unavailable(RunSpec(parallel="hsdp"), CPU) == ""
    assert "at least 2 ranks" in TOGGLES["hybrid"].unavailable(RunSpec(parallel="ddp", ranks=1), CPU)
    assert "has it already" in TOGGLES["hybrid"].unavailable(RunSpec(parallel="ddp", schedule="auto"), GPUS)
    assert "communication hook" in TOGGLES["hybrid"].unavailable(RunSpec(parallel="ddp", grad_compression="fp16"), GPUS)


def test_small_messages_are_predicted_to_gain_and_hidden_ones_not(example: RunReport) -> None:
    gain = predict(with_all_reduce(example, 1 << 20, 100.0, 4.0), DDP, {"schedule": "auto"})
    hidden = predict(with_all_reduce(example, 1 << 20, 100.0, 0.0), DDP, {"schedule": "auto"})
    assert gain is not None
    assert hidden is not None
    assert gain.change <= 0
    assert hidden.change == 0
    assert "alpha-beta" in gain.how


def test_a_schedule_worse_than_the_librarys_is_predicted_to_cost(example: RunReport) -> None:
    found = predict(with_all_reduce(example, 64 << 10, 100.0, 4.0), DDP, {"schedule": "ring"})
    assert found is not None
    assert found.change > 0


def test_no_prediction_without_an_all_reduce_or_from_a_planned_baseline(example: RunReport) -> None:
    planned = RunSpec(parallel="ddp", ranks=4, schedule="ring")
    assert predict(with_all_reduce(example, 1 << 20, 100.0, 4.0), planned, {"schedule": "auto"}) is None
    bare = msgspec.structs.replace(example, collectives=CollectivesView())
    assert predict(bare, DDP, {"schedule": "auto"}) is None

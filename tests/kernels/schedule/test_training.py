"""Planned all-reduces inside DDP and FSDP2: gradients within the reduction-order bound of stock, equal on all ranks."""

from __future__ import annotations

import pytest
import training_cases as cases
from rank_pool import RankPool

from costlab.kernels.schedule.plan import Layout, Plan

PAIRS: Layout = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "plan",
    [
        Plan("backend"),
        Plan("ring", chunks=2, channels=2),
        Plan("chain", chunks=3),
        Plan("two-level"),
        Plan("hybrid", 4),
    ],
    ids=lambda plan: plan.schedule,
)
def test_ddp_gradients_equal_stock(ranks: RankPool, plan: Plan) -> None:
    for difference, same, buckets in ranks.run(cases.ddp, 4, 4, PAIRS, plan):
        assert difference <= 1
        assert same
        assert buckets >= 1


def test_a_failed_all_reduce_fails_backward(ranks: RankPool) -> None:
    for text in ranks.run(cases.ddp_failure, 2, 2):
        assert "a transfer failed before" in text


@pytest.mark.parametrize("own", [False, True], ids=["backend inside", "rings inside"])
@pytest.mark.parametrize("plan", [Plan("chain", chunks=3), Plan("ring")], ids=lambda plan: plan.schedule)
def test_fsdp_gradients_equal_hsdp(ranks: RankPool, plan: Plan, own: bool) -> None:
    for difference, same, hooked in ranks.run(cases.fsdp, 8, plan, own):
        assert difference <= 1
        assert same
        assert hooked == 4  # three linear layers and the root


def test_fsdp_refuses_what_would_be_wrong(ranks: RankPool) -> None:
    for texts in ranks.run(cases.fsdp_refusals, 8):
        twice, unsharded, others = texts
        assert "reduces over it itself" in twice
        assert "fully_shard was not applied" in unsharded
        assert "FSDP2 shards over ranks" in others

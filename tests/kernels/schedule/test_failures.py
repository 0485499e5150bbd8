"""Nothing hangs: late and dead peers end in an error within the time-out, refusals leave the communicator usable.

A gloo group is unusable after a time-out, so each of these tests has ranks of its own.
"""

from __future__ import annotations

import failure_cases as cases
import pytest
from rank_pool import RankPool

from costlab.kernels.schedule.plan import Plan


@pytest.mark.parametrize(
    ("plan", "late", "asynchronous"),
    [
        (Plan("ring", chunks=4, channels=2), 1, False),
        (Plan("hybrid", chunks=4), 3, True),
        (Plan("two-level"), 0, False),
        (Plan("backend"), 2, False),
    ],
    ids=lambda value: getattr(value, "schedule", str(value)),
)
def test_a_late_peer_is_a_time_out(plan: Plan, late: int, asynchronous: bool) -> None:
    pool = RankPool(4)
    try:
        replies = pool.run(cases.late_peer, 4, 4, plan, late, 2.0, asynchronous)
    finally:
        pool.close()
    others = [reply for rank, reply in enumerate(replies) if rank != late]
    assert any(first.startswith("ScheduleTimeout") for first, _, _ in others)
    for first, second, took in others:
        assert first.startswith(("ScheduleTimeout", "ScheduleError", "ScheduleAborted")), first
        assert second.startswith("ScheduleAborted"), second
        assert took < 15
    named = next(first for first, _, _ in others if first.startswith("ScheduleTimeout"))
    assert plan.schedule in named


def test_a_dead_peer_is_noticed() -> None:
    """At once by a rank that talks with it; a send that gloo forgets as its connection breaks ends by its time-out."""
    pool = RankPool(3)
    try:
        pool.kill(2)
        replies = pool.run(cases.dead_peer, 2, 3, Plan("chain", chunks=3))
    finally:
        pool.close()
    assert any(text.startswith("ScheduleError") for text, _ in replies)
    assert min(took for _, took in replies) < cases.PATIENCE / 2
    for text, took in replies:
        assert text.startswith(("ScheduleError", "ScheduleTimeout", "ScheduleAborted")), text
        assert took < cases.PATIENCE + 5


def test_abort_reaches_the_peers() -> None:
    pool = RankPool(3)
    try:
        replies = pool.run(cases.abort, 3, 3)
    finally:
        pool.close()
    assert replies[0][0].startswith(
        "ScheduleAborted: this communicator is no longer usable: the communicator was aborted"
    )
    for first, second, took in replies:
        assert first.startswith(("ScheduleError", "ScheduleTimeout", "ScheduleAborted")), first
        assert second.startswith("ScheduleAborted"), second
        assert took < cases.PATIENCE + 5
    assert min(took for _, _, took in replies[1:]) < cases.PATIENCE / 2, "long before the time-out"


def test_what_does_not_fit_is_refused(ranks: RankPool) -> None:
    for texts in ranks.run(cases.refusals, 4):
        assert "torch.bool is not supported" in texts["bool"]
        assert "would have to round" in texts["integer average"]
        assert "sum or avg" in texts["operator"]
        assert "not an order" in texts["order"]
        assert "dense tensor" in texts["sparse"]
        assert "int16" in texts["int16"]
        assert "needs CUDA tensors" in texts["symmetric"]
        assert "cpu tensors are not issued on a stream" in texts["stream"]
        assert "segments of equal size" in texts["uneven"]
        assert "do not hold ranks" in texts["layout"]
        assert texts["afterwards"] == "[4.0, 4.0, 4.0, 4.0]"

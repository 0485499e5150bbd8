"""Transfer, waiting, bandwidth and the straggler from the rows of several ranks."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.app.analysis.collectives import (
    CONVENTION,
    bus_factor,
    collectives_view,
    last_arrivals,
    with_transfer,
)
from costlab.app.analysis.views import CollectivesView
from costlab.probes.records import CollectiveRow
from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse, rows
from tests.probes.trace.synthetic import Recording

MB = 1_000_000


def row(rank: int, ms: float, **fields: Any) -> dict[str, Any]:
    base = {
        "rank": rank, "step": 0, "seq": 0, "kind": "all_reduce", "group": "0,1", "group_size": 2, "dtype": "float32",
        "bytes_in": 8 * MB, "bytes_out": 8 * MB, "start_us": 0.0, "ms": ms, "exposed_ms": 0.0, "layer": "", "phase": "",
        "schedule": "",
    }  # fmt: skip
    return base | fields


def view(data: list[dict[str, Any]], steps: int = 1, **options: Any) -> CollectivesView:
    frame = pd.DataFrame(data, columns=list(CollectiveRow.__struct_fields__))
    return collectives_view(frame, expected_bytes=None, formula="", steps=steps, **options)


def recorded(rank: int, world: int, arrive: list[float], end: list[float]) -> pd.DataFrame:
    """Rows of a rank whose all-reduces start at `arrive` and end at `end`, through the trace reader itself."""
    recording = Recording(rank=rank, world=world)
    recording.note("costlab::step::0", 0, 10_000)
    group = {"Group size": world, "Process Group Ranks": str(list(range(world)))}
    for start, stop in zip(arrive, end, strict=True):
        recording.nccl("allreduce", start - 5, start, stop - start, (500_000, 500_000), **group)
    trace = analyse(kineto.read(recording.json()), device="cuda", blocks=[])
    return pd.DataFrame([{f: getattr(r, f) for f in r.__struct_fields__} for r in rows(trace, rank)[0]])


def test_two_ranks_with_known_skew() -> None:
    """Rank 1 is 400, 200, then 200 us late; each transfer takes 50 us."""
    end = [1050.0, 2050.0, 3050.0]
    frames = [recorded(0, 2, [600, 1800, 2800], end), recorded(1, 2, [1000, 2000, 3000], end)]
    result = collectives_view(pd.concat(frames), expected_bytes=None, formula="", steps=1)
    assert result.transfer_ms == pytest.approx(0.150)
    assert result.wait_ms == pytest.approx((0.400 + 0.200 + 0.200) / 2)  # mean over ranks: only rank 0 waits
    assert result.total_ms == pytest.approx(0.150 + 0.400)
    (line,) = result.rows
    assert (line.calls, line.bytes_step, line.last_rank) == (3, 3 * MB, 1)
    assert line.algbw_gbps == line.busbw_gbps == pytest.approx(1 * MB / 50e-6 / 1e9)  # two ranks: factor 1
    assert "rank 1 arrived last in 3 of 3" in result.straggler
    assert "waited 0.8 ms a step" in result.straggler


def test_who_was_last_once_or_twice_is_not_named() -> None:
    end = [1050.0, 2050.0]
    frames = [recorded(0, 2, [600, 1800], end), recorded(1, 2, [1000, 2000], end)]
    result = collectives_view(pd.concat(frames), expected_bytes=None, formula="", steps=1)
    assert result.wait_ms == pytest.approx(0.3)
    assert result.straggler == ""


def test_eight_ranks_with_one_straggler() -> None:
    end = [1020.0 + 1000 * i for i in range(4)]
    late = [e - 20 for e in end]
    frames = []
    for rank in range(8):
        arrive = late if rank == 3 else [e - 300 - 10 * rank for e in end]
        frames.append(recorded(rank, 8, arrive, end))
    result = collectives_view(pd.concat(frames), expected_bytes=None, formula="", steps=1)
    waits = [280 + 10 * r for r in range(8) if r != 3]
    assert result.transfer_ms == pytest.approx(4 * 0.020)
    assert result.wait_ms == pytest.approx(4 * sum(waits) / 8 / 1000)
    assert result.rows[0].last_rank == 3
    assert result.straggler.startswith("rank 3 arrived last in 4 of 4 collectives")
    assert f"waited {4 * sum(waits) / 7 / 1000:.3g} ms a step" in result.straggler
    assert result.rows[0].busbw_gbps == pytest.approx((result.rows[0].algbw_gbps or 0) * 2 * 7 / 8)


def test_balanced_ranks_have_no_straggler() -> None:
    data = [row(r, 5.0 if (seq + r) % 2 else 1.0, seq=seq) for seq in range(6) for r in (0, 1)]
    result = view(data)
    assert result.straggler == ""
    assert "arrived last: rank 0 x3, rank 1 x3" in result.note


def test_a_lead_within_the_clocks_uncertainty_names_nobody() -> None:
    data = [row(0, 1.2), row(1, 1.0)]
    assert view(data).rows[0].last_rank == 1
    for uncertainty in (300.0, {0: 10.0, 1: 300.0}):
        result = view(data, clock_uncertainty_us=uncertainty)
        assert result.rows[0].last_rank is None
        assert result.straggler == ""
        assert result.transfer_ms == 1.0


def test_one_rank_knows_no_transfer() -> None:
    result = view([row(0, 2.0, exposed_ms=0.5)])
    assert (result.transfer_ms, result.wait_ms, result.rows[0].wait_ms, result.straggler) == (None, None, None, "")
    assert result.rows[0].algbw_gbps == pytest.approx(4.0)
    assert result.overlapped == pytest.approx(0.75)
    assert "one rank recorded" in result.note
    assert "lower bounds" in result.note


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 0, None),
        ("unknown", 8, None),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(kind: str, ranks: int, factor: float | None) -> None:
    assert bus_factor(kind, ranks) == factor


def test_size_convention_of_a_gather_is_its_whole_output() -> None:
    """204 MB a rank over 8 ranks is 1632 MB in nccl-tests' size column, not 204."""
    data = [
        row(r, 6.0, kind="all_gather", group_size=8, group="0,1,2,3,4,5,6,7", bytes_in=204 * MB, bytes_out=1632 * MB)
        for r in range(8)
    ]
    result = view(data)
    assert result.rows[0].algbw_gbps == pytest.approx(272.0)
    assert result.rows[0].busbw_gbps == pytest.approx(238.0)
    assert "all_gather: output" in CONVENTION
    assert result.convention == CONVENTION
    assert result.bytes_per_step is not None
    assert result.bytes_per_step.value == 1632 * MB


def test_subgroups_are_matched_within_themselves() -> None:
    data = [row(r, 1.0 + r, group="0,1" if r < 2 else "2,3") for r in range(4)]
    result = view(data)
    assert result.transfer_ms == pytest.approx((1 + 1 + 3 + 3) / 4)
    assert (result.rows[0].calls, result.rows[0].group) == (1, "0,1 … 2,3 (2 groups)")


@pytest.mark.parametrize(
    "other",
    [
        [row(1, 2.0, kind="all_gather")],
        [row(1, 2.0, bytes_in=MB, bytes_out=MB)],
        [row(1, 2.0), row(1, 2.0, seq=1)],
        [row(1, 2.0), row(1, 3.0)],
        [row(1, 2.0), row(2, 3.0)],
    ],
    ids=["kind", "size", "count", "twice", "more ranks than the group"],
)
def test_calls_that_do_not_match_are_said_and_not_paired(other: list[dict[str, Any]]) -> None:
    result = view([row(0, 1.0), *other])
    assert (result.transfer_ms, result.wait_ms) == (None, None)
    assert "do not match across ranks" in result.note
    assert result.total_ms is not None


def test_matching_calls_count_beside_those_that_do_not() -> None:
    data = [row(0, 1.0), row(1, 3.0), row(0, 9.0, step=1), row(1, 9.0, step=1, kind="broadcast")]
    result = view(data, steps=2)
    assert result.transfer_ms == pytest.approx(0.5)
    assert result.wait_ms == pytest.approx(0.5)
    assert "1 collectives do not match" in result.note


def test_missing_sizes_give_no_bandwidth_and_no_sum() -> None:
    data = [row(r, 1.0, bytes_in=None, bytes_out=None) for r in (0, 1)]
    result = view([*data, *(row(r, 1.0, seq=1) for r in (0, 1))])
    unsized = next(r for r in result.rows if r.bytes_in is None)
    assert (unsized.bytes_step, unsized.algbw_gbps, unsized.busbw_gbps) == (None, None, None)
    assert result.bytes_per_step is None
    assert "do not say their size" in result.note


def test_missing_ranks_are_said() -> None:
    result = view([row(r, 1.0, group="0,1,2,3", group_size=4) for r in (0, 1)])
    assert "2 of 4 ranks recorded" in result.note


def test_nothing_recorded() -> None:
    result = view([])
    assert result.rows == []
    assert (result.total_ms, result.exposed_ms, result.transfer_ms, result.bytes_per_step) == (None, None, None, None)
    assert result.note == "no collectives were recorded"


def test_expected_bytes_carry_their_formula() -> None:
    frame = pd.DataFrame([row(0, 1.0), row(1, 1.0)])
    result = collectives_view(frame, expected_bytes=8 * MB, formula="gradients once", steps=1)
    assert result.expected_bytes is not None and result.bytes_per_step is not None
    assert (result.expected_bytes.value, result.expected_bytes.source) == (8 * MB, "derived")
    assert result.expected_bytes.how.endswith("gradients once")
    assert result.bytes_per_step.value == 8 * MB


durations = st.lists(st.lists(st.floats(0.001, 100), min_size=3, max_size=3), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(durations)
def test_wait_and_transfer_are_the_whole_time(calls: list[list[float]]) -> None:
    data = [
        row(rank, ms, seq=seq, group="0,1,2", group_size=3)
        for seq, call in enumerate(calls)
        for rank, ms in enumerate(call)
    ]
    result = view(data)
    assert result.transfer_ms == pytest.approx(sum(min(call) for call in calls))
    assert result.total_ms == pytest.approx((result.transfer_ms or 0) + (result.wait_ms or 0))
    for key, rank in last_arrivals(with_transfer(pd.DataFrame(data))[0]).items():
        assert calls[key[2]][rank] == min(calls[key[2]])

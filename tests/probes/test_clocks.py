"""Offsets of the ranks' clocks: the estimate holds the truth whatever the ways take, real ranks find a known skew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.probes.clocks import RESOLUTION_US, ClockReading, doubts, reading
from tests.probes.clock_ranks import SKEW_NS, read_in_processes

WAYS = st.tuples(st.integers(1, 10**7), st.integers(0, 10**6), st.integers(1, 10**7))  # there, answering, back in ns


@given(st.integers(-(10**12), 10**12), st.lists(WAYS, min_size=1, max_size=30), st.booleans())
def test_the_true_offset_is_within_the_uncertainty(
    skew: int, ways: list[tuple[int, int, int]], one_kernel: bool
) -> None:
    """`skew` is what this rank's clock is behind rank 0's; ways there and back differ as they like."""
    trips, now = [], 10**15
    for there, answer, back in ways:
        at_peer = now + skew + there
        trips.append((now, at_peer, at_peer + answer, now + there + answer + back))
        now += 10**8
    found = reading(1, "start", trips, one_kernel)
    if not (one_kernel and found.offset_us == 0.0):
        assert abs(found.offset_us - skew / 1e3) <= found.uncertainty_us + 1e-3
    assert found.uncertainty_us >= RESOLUTION_US


def test_the_shortest_round_trip_counts() -> None:
    slow, fast = (0, 5_000_000, 5_000_000, 6_000_000), (0, 1_010_000, 1_010_000, 20_000)
    found = reading(1, "end", [slow, fast, slow])
    assert (found.offset_us, found.uncertainty_us, found.round_trip_us) == (1000.0, 10.0, 20.0)
    with pytest.raises(ValueError, match="no round trips"):
        reading(1, "end", [])


def test_one_kernel_has_one_clock_unless_the_round_trips_refute_it() -> None:
    agreeing, refuting = [(0, 12_000, 12_000, 20_000)], [(0, 5_010_000, 5_010_000, 20_000)]
    same = reading(1, "start", agreeing, one_kernel=True)
    assert (same.offset_us, same.uncertainty_us) == (0.0, RESOLUTION_US)
    other = reading(1, "start", refuting, one_kernel=True)
    assert (other.offset_us, other.uncertainty_us) == (5000.0, 10.0)


def at(rank: int, when: str, offset: float, doubt: float) -> ClockReading:
    data = {"rank": rank, "when": when, "offset_us": offset, "uncertainty_us": doubt}
    return msgspec.convert(data, ClockReading)


def test_drift_between_the_readings_widens_the_doubt() -> None:
    found = doubts(
        [at(1, "start", 10.0, 2.0), at(1, "end", 30.0, 3.0), at(0, "start", 0.0, 0.0), at(2, "start", 5.0, 4.0)]
    )
    assert [(d.rank, d.offset_us, d.drift_us, d.uncertainty_us) for d in found] == [
        (0, 0.0, None, 0.0),
        (1, 20.0, 20.0, 13.0),
        (2, 5.0, None, 4.0),
    ]


@pytest.fixture(scope="module")
def readings() -> list[list[ClockReading]]:
    with tempfile.TemporaryDirectory() as folder:
        return read_in_processes(Path(folder))


def test_real_ranks_find_the_skew_of_another_machines_clock(readings: list[list[ClockReading]]) -> None:
    assert readings[0] == readings[1] == readings[2], "every rank has every rank's reading"
    zero, one, two = readings[0]
    assert (zero.rank, zero.offset_us, zero.uncertainty_us) == (0, 0.0, 0.0)
    for found, skew in ((one, SKEW_NS[1]), (two, SKEW_NS[2])):
        assert abs(found.offset_us + skew / 1e3) <= found.uncertainty_us
        assert 0 < found.uncertainty_us < 50_000
        assert found.round_trip_us is not None

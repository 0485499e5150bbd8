"""Small charts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from costlab.app.tui.widgets.plot import Points, round_ticks, size_ticks
from costlab.app.tui.widgets.spark import chart, spark

NUMBERS = st.one_of(st.floats(-1e12, 1e12), st.sampled_from([math.nan, math.inf]))


@given(st.lists(NUMBERS, max_size=300), st.integers(1, 80))
def test_a_trend_fits_and_survives_any_number(values: list[float], width: int) -> None:
    assert len(spark(values, width)) == min(len(values), width)


def test_a_spike_is_never_lost() -> None:
    values = [1.0] * 1000
    values[617] = 9.0
    assert "█" in spark(values, 40)


def test_constant_and_missing_values() -> None:
    assert spark([2.0, 2.0], 10) == "▄▄"
    assert spark([1.0, math.nan, 2.0], 10) == "▁ █"
    assert spark([], 10) == ""


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 80), st.integers(1, 8))
def test_a_chart_has_its_height_and_at_most_its_width(values: list[float], width: int, height: int) -> None:
    rows = chart(values, width, height)
    assert len(rows) == height
    assert all(len(row) <= width for row in rows)


@given(st.floats(1, 1e13), st.floats(1, 1e6))
def test_size_ticks_are_few_and_near_the_data(low: float, factor: float) -> None:
    places, labels = size_ticks(low, low * factor)
    assert 1 <= len(places) <= 8
    assert len(places) == len(labels)


@given(st.floats(1e-3, 1e6))
def test_round_ticks_cover_the_data(high: float) -> None:
    ticks = round_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-9)
    assert len(ticks) <= 6


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    points = Points("p", "x", [1, math.nan, 0, 4, 5], [1, 2, 3, math.inf, 5])
    assert points.finite() == ([1, 5], [1, 5])

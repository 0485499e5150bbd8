"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app import figures as f
from costlab.app.analysis.views import Figure


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (113.94, "114"), (9.847, "9.85"), (0.01234, "0.0123"), (143_812, "144,000"), (999.6, "1,000"),
     (9.996, "10.0"), (-54.12, "-54.1"), (4.2e-9, "4.20e-09"), (None, "–"), (math.nan, "–"), (math.inf, "–")],
)  # fmt: skip
def test_number_has_three_significant_digits(value: float | None, text: str) -> None:
    assert f.number(value) == text


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_number_is_within_half_a_unit_of_the_third_digit(value: float) -> None:
    shown = float(f.number(value).replace(",", ""))
    assert abs(shown - value) <= 0.0051 * value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (113.94, "ms", "114 ms"),
        (0.0021, "ms", "2.10 µs"),
        (0, "ms", "0 ms"),
        (3100, "ms", "3.10 s"),
        (0.9999 * 1000, "ms", "1.00 s"),
        (8.4, "s", "8.40 s"),
        (0.012, "s", "12.0 ms"),
        (300, "s", "5.00 min"),
        (10_800, "s", "3.00 h"),
        (17_100_000_000, "B", "17.1 GB"),
        (999, "B", "999 B"),
        (999_900, "B", "1.00 MB"),
        (396.2, "GB/s", "396 GB/s"),
        (143_812, "tokens/s", "144,000 tokens/s"),
        (0.471, "fraction", "47 %"),
        (0.0862, "fraction", "8.6 %"),
        (0.0001, "fraction", "<0.1 %"),
        (-0.0001, "fraction", ">-0.1 %"),
        (1.0, "fraction", "100 %"),
        (0.9999, "rate", "0.99"),
        (1.0, "rate", "1.00"),
        (1.534, "USD", "$1.53"),
        (2.9, "USD/GPU-hour", "$2.90/GPU-hour"),
        (0.000123456, "USD", "$0.000123"),
        (1.5, "USD per 1 M tokens", "$1.50 per 1 M tokens"),
        (1.5, "CHF", "1.50 CHF"),
        (612.2, "J", "612 J"),
    ],
)
def test_units(value: float, unit: str, text: str) -> None:
    assert f.value(value, unit) == text


@pytest.mark.parametrize("unit", ["ms", "s", "B", "fraction", "rate", "GB/s", "USD", "USD/GPU-hour", "J", "count"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_missing_is_never_zero(unit: str, value: float | None) -> None:
    assert f.value(value, unit) == f.MISSING


def figure(**values: object) -> Figure:
    return Figure(**({"value": 2.0, "unit": "USD per 1 M tokens", "source": "derived", "how": "a x b"} | values))  # type: ignore[arg-type]


def test_figures_with_interval_and_origin() -> None:
    item = figure(low=1.5, high=2.5, n=20)
    assert f.figure(item) == "$2.00 per 1 M tokens"
    assert f.brief(item) == "$2.00"
    assert f.interval(item) == "[$1.50, $2.50]"
    assert f.footnote(item) == "derived, n=20: a x b"
    assert f.figure(None) == f.brief(None) == f.MISSING
    assert f.interval(figure()) == ""


@given(st.floats(min_value=0, max_value=2), st.integers(1, 60))
def test_a_bar_fits_and_shows_what_is_there(fraction: float, width: int) -> None:
    bar = f.bar(fraction, width)
    assert len(bar) <= width
    assert bool(bar) == (fraction > 0)
    assert len(bar) >= min(fraction, 1.0) * width - 1


def test_times() -> None:
    assert [f.times(v) for v in (9.0, 1.5, 12000.0, None)] == ["9", "1.50", "12,000", "–"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(1.0, 3.0, "2.00 ms"), (-1.0, 3.0, "< 3.00 ms"), (-5.0, -1.0, "≤ 0 ms"), (-1.0, 0.0, "≤ 0 ms")],
)
def test_a_difference_is_told_only_where_its_interval_leaves_zero(low: float, high: float, text: str) -> None:
    found = f.resolved(Figure(value=2.0, unit="ms", source="measured", how="", low=low, high=high))
    assert found == text

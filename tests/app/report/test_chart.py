"""The plain chart: points where they belong, a curve without gaps, nothing hostile or endless."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from costlab.app.report.chart import CURVES, Series, chart


def test_points_stand_where_they_belong() -> None:
    lines = chart([Series("own", [(1e3, 10.0), (1e6, 5.0), (1e9, 0.0)])], width=69, height=11)
    plot = [line.partition("│")[2] for line in lines[:11]]
    assert [row.find("o") for row in plot if "o" in row] == [0, 30, 59], "a decade takes equal room"
    assert ["o" in row for row in plot].index(True) == 0
    assert "o" in plot[5]
    assert "o" in plot[10]
    assert [lines[0].split("│")[0].strip(), lines[1].split("│")[0].strip(), lines[10][7]] == ["10.0", "GB/s", "0"]
    assert "1.00 kB" in lines[12]
    assert "1.00 GB" in lines[12]
    assert lines[13] == "o own"


def test_a_curve_leaves_no_column_out_and_goes_under_the_points() -> None:
    lines = chart([Series("own", [(1e6, 3.0)]), Series("ideal", [(1e3, 0.0), (1e9, 6.0)], curve=True)], width=60)
    plot = [line.partition("│")[2].ljust(51) for line in lines[:12]]
    columns = {i for row in plot for i, c in enumerate(row) if c in (CURVES[0], "o")}
    assert columns == set(range(51))
    assert any("o" in row for row in plot)
    assert lines[-2:] == [f"{CURVES[0]} ideal", "o own"]


def test_names_are_plain_and_nothing_gives_nothing() -> None:
    assert chart([]) == []
    assert chart([Series("empty", [])]) == []
    assert chart([Series("nan", [(math.nan, 1.0), (0.0, 1.0), (1.0, math.inf)])]) == []
    assert "\x1b" not in "".join(chart([Series("a\x1b[31m", [(1.0, 1.0)])]))


POINTS = st.lists(st.tuples(st.floats(), st.floats()), max_size=20)


@given(POINTS, st.booleans(), st.integers(0, 120), st.integers(2, 30))
def test_any_points(points: list[tuple[float, float]], curve: bool, width: int, height: int) -> None:
    lines = chart([Series("any", points, curve)], width=width, height=height)
    assert all(len(line) <= max(width, 29) + 16 for line in lines)
    assert not lines or len(lines) == height + 3

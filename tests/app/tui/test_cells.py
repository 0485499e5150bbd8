"""Toned text: what a terminal gets is safe, and fits."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from costlab.app.tui import cells
from costlab.app.tui.cells import bar, beside, crop, crop_start, fit, length, line, stacked, text_of, wrap

WORDS = st.text(st.sampled_from("ab 漢é\x1b\n[]"), max_size=60)
SPANS = st.lists(st.tuples(WORDS, st.sampled_from(cells.TONES)), max_size=5)


@given(SPANS)
def test_no_control_character_survives(spans: list[tuple[str, cells.Tone]]) -> None:
    assert all(unicodedata.category(c) != "Cc" for c in text_of(line(*spans)))


@given(SPANS, st.integers(0, 40))
def test_crop_never_exceeds_the_width(spans: list[tuple[str, cells.Tone]], width: int) -> None:
    assert length(crop(line(*spans), width)) <= width


@given(SPANS, st.integers(0, 40), st.sampled_from(["left", "right"]))
def test_fit_has_exactly_the_width(spans: list[tuple[str, cells.Tone]], width: int, align: cells.Align) -> None:
    assert length(fit(line(*spans), width, align)) == width


@given(SPANS, st.integers(2, 40))
def test_wrapping_loses_no_letter_and_no_line_is_too_long(spans: list[tuple[str, cells.Tone]], width: int) -> None:
    whole = line(*spans)
    rows = wrap(whole, width)
    assert all(length(row) <= width for row in rows)
    assert "".join(text_of(row) for row in rows).replace(" ", "") == text_of(whole).replace(" ", "")


def test_what_follows_a_label_stays_beside_it() -> None:
    rows = [text_of(row) for row in wrap(line(("do   ", "muted"), "one two three four"), 14)]
    assert rows == ["do   one two ", "     three ", "     four"]


def test_a_number_stays_with_its_unit() -> None:
    assert [text_of(row).strip() for row in wrap(line("takes about 6.20 ms, 55 % of it"), 17)] == [
        "takes about",
        "6.20 ms, 55 % of",
        "it",
    ]


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_with_a_target_keeps_its_width_and_shows_the_mark(share: float, width: int) -> None:
    drawn = text_of(bar(share, width, target=0.9))
    assert cell_len(drawn) == width
    assert drawn.count("│") == 1


def test_a_bar_is_empty_only_for_zero() -> None:
    assert text_of(bar(0.0, 10)) == ""
    assert text_of(bar(1e-9, 10)) != ""
    assert bar(None, 10) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 50))
def test_stacked_parts_fill_what_they_sum_to(shares: list[float], width: int) -> None:
    total = sum(shares)
    drawn = stacked([(share / (total or 1), "x", "") for share in shares], width)
    assert length(drawn) == (width if total else 0)


def test_parts_have_the_decimals_of_the_whole() -> None:
    assert [beside(v, 113.9) for v in (54.13, 0.2, 0.0, 113.9)] == ["54", "<1", "0", "114"]
    assert [beside(v, 37.2) for v in (22.74, 0.04, 5.0)] == ["22.7", "<0.1", "5.0"]
    assert beside(0.00353, 0.00579) == "0.00353"


def test_the_end_of_a_path_is_kept() -> None:
    assert crop_start("/a/very/long/path/train.py:88", 12) == "…train.py:88"
    assert crop_start("short", 12) == "short"

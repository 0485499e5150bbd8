"""The ranks' clocks in a report: every difference between ranks carries what they are uncertain by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from costlab.app.analysis.build import build_report
from costlab.app.analysis.clocks import NOT_COMPARED, clock_doubts, clock_sentence, pair_doubt_us
from costlab.app.analysis.collectives import collectives_view
from costlab.app.report.markdown import render_markdown
from costlab.app.store import Run
from costlab.probes.clocks import ClockReading, When, reading
from costlab.probes.records import CollectiveRow, Manifest
from costlab.probes.tables import write_bytes
from tests.app.make_run import write_example_run


def reading_of(rank: int, when: When, skew_us: float, way_us: float) -> ClockReading:
    """A rank whose clock is `skew_us` behind rank 0's, asked over ways of `way_us` each."""
    there = int(1e3 * way_us)
    return reading(rank, when, [(0, int(1e3 * skew_us) + there, int(1e3 * skew_us) + there, 2 * there)])


def skewed(way_us: float, drift_us: float = 0.0) -> list[ClockReading]:
    zero = [ClockReading(rank=0, when=w, offset_us=0.0, uncertainty_us=0.0) for w in ("start", "end")]
    return [*zero, reading_of(1, "start", 700.0, way_us), reading_of(1, "end", 700.0 + drift_us, way_us)]


def call(rank: int, ms: float, seq: int = 0) -> dict[str, Any]:
    return {
        "rank": rank, "step": 0, "seq": seq, "kind": "all_reduce", "group": "0,1", "group_size": 2, "dtype": "float32",
        "bytes_in": 8_000_000, "bytes_out": 8_000_000, "start_us": 0.0, "ms": ms, "exposed_ms": 0.0, "layer": "",
        "phase": "", "schedule": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("way_us", "drift_us", "named"), [(50.0, 0.0, 1), (150.0, 0.0, 1), (50.0, 400.0, None), (250.0, 0.0, None)]
)
def test_a_straggler_is_named_only_beyond_the_clocks(way_us: float, drift_us: float, named: int | None) -> None:
    """Rank 1 arrives 0.2 ms late in each of four calls; its clock is uncertain by a way and half of the drift."""
    doubts = clock_doubts(msgspec.to_builtins(skewed(way_us, drift_us)))
    rows = pd.DataFrame([call(r, 1.2 - 0.2 * r, seq) for seq in range(4) for r in (0, 1)])
    rows = rows[list(CollectiveRow.__struct_fields__)]
    clocks = {d.rank: d.uncertainty_us for d in doubts}
    view = collectives_view(rows, expected_bytes=None, formula="", steps=1, clock_uncertainty_us=clocks)
    expected = way_us + drift_us / 2
    assert pair_doubt_us(doubts) == pytest.approx(expected)
    assert view.clock_uncertainty_us == pytest.approx(expected)
    assert view.rows[0].last_rank == named
    assert bool(view.straggler) == (named is not None)
    assert named is None or f"waited 0.8 ±{4 * expected / 1000:.2g} ms a step" in view.straggler
    assert view.wait_ms == pytest.approx(4 * 0.2 / 2)
    assert view.wait_doubt_ms == pytest.approx(4 * expected / 1000 / 2), "one of two ranks waits in each of four calls"
    assert view.rows[0].wait_doubt_ms == view.wait_doubt_ms
    assert f"{expected:.0f}" in clock_sentence(doubts)


@pytest.mark.parametrize(
    "stored",
    [None, 5, "x", [], {}, [{"rank": "a"}], [{"rank": 0, "when": "start", "offset_us": 1, "uncertainty_us": -1}],
     [{"rank": 0, "when": "never", "offset_us": 1, "uncertainty_us": 1}]],
)  # fmt: skip
def test_what_is_no_reading_is_no_clock(stored: object) -> None:
    assert clock_doubts(stored) == []
    assert clock_sentence(clock_doubts(stored)) == NOT_COMPARED


def test_the_report_of_a_run_carries_them(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "run")
    before = build_report(Run(path)).collectives
    assert before is not None
    assert before.clock == NOT_COMPARED
    assert before.wait_doubt_ms is None
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    manifest.extra["clocks"] = msgspec.to_builtins(skewed(5000.0))
    write_bytes(path / "manifest.json", msgspec.json.encode(manifest))
    report = build_report(Run(path))
    view = report.collectives
    assert view is not None
    assert view.clock_uncertainty_us == pytest.approx(5000.0)
    assert view.wait_doubt_ms is not None
    assert view.straggler == ""
    assert {r.last_rank for r in view.rows} == {None}
    text = render_markdown(report)
    assert "±" in text
    assert "measured by round trips at start and end" in text

"""What a checkpoint codec changes: foretold from the baseline's leg, measured in the variant's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from costlab.app.analysis.checkpoint import checkpoint_view
from costlab.app.analysis.views import RunReport
from costlab.app.report.whatif import saving
from costlab.app.whatif.deltas import deltas
from costlab.app.whatif.results import LegRecord
from costlab.app.whatif.saves import save_effect
from costlab.app.whatif.spec import BASELINE, CONTROL, make_whatif
from costlab.app.whatif.toggles import Machine
from costlab.probes.records import CheckpointRow
from costlab.probes.spec import RunSpec
from tests.app.analysis.tables import frame
from tests.app.diagnosis.reports import healthy as example

BASE = RunSpec(device="cpu", ranks=2)
FP8 = msgspec.structs.replace(BASE, checkpoint_codec="fp8")


def row(mode: str, op: str = "save", **values: Any) -> CheckpointRow:
    return CheckpointRow(**({"rank": 0, "mode": mode, "op": op, "ok": True} | values))


def saved(codec: str, *rows: CheckpointRow) -> RunReport:
    return msgspec.structs.replace(example(), checkpoint=checkpoint_view(frame(CheckpointRow, rows), 500, codec))


SYNC = row("sync", bytes=12_000_000, stall_ms=900.0, stall_low_ms=800.0, stall_high_ms=1000.0)
OWN = row(
    "costlab:fp8", bytes=3_300_000, lossy=True, stall_ms=20.0, stall_low_ms=10.0, stall_high_ms=30.0, update_error=0.02
)
LOADED = row("costlab:fp8", "load", lossy=True, within_bound=True)


def test_stall_and_bytes_are_of_the_way_each_arm_asks_for() -> None:
    effect = save_effect(saved("dcp", SYNC, OWN), saved("fp8", SYNC, OWN, LOADED), BASE, FP8)
    assert effect is not None
    assert (effect.before, effect.after) == ("sync", "costlab:fp8")
    assert (effect.stall.a, effect.stall.b, effect.stall.verdict) == (900.0, 20.0, "better")
    assert (effect.bytes.a, effect.bytes.b) == (12_000_000, 3_300_000)
    assert effect.predicted_stall is not None and effect.predicted_stall.value == 20.0
    assert effect.predicted_bytes == pytest.approx(12e6 * (8.125 + 8.125 + 8) / 96)
    assert effect.restored is True and effect.lossy and effect.update_error == 0.02
    words = saving(effect)
    assert "stalls training for 20.0 ms [10.0 ms, 30.0 ms] instead of 900 ms" in words
    assert "within its error bound, first resumed update off by 2.0 %" in words


def test_the_deltas_hold_the_stall_and_the_bytes() -> None:
    found = {c.name: c for c in deltas([], "fp8", saved("dcp", SYNC), saved("fp8", SYNC, OWN))}
    assert (found["checkpoint stall of a save"].a, found["checkpoint stall of a save"].b) == (900.0, 20.0)
    assert (found["checkpoint bytes"].a, found["checkpoint bytes"].b) == (12_000_000, 3_300_000)
    assert found["checkpoint stall per step"].b == pytest.approx(0.04)


def test_a_change_within_what_two_alike_legs_differ_by_is_none() -> None:
    def exposing(ms: float) -> RunReport:
        plain = example()
        assert plain.collectives is not None
        return msgspec.structs.replace(plain, collectives=msgspec.structs.replace(plain.collectives, exposed_ms=ms))

    def verdicts(*ms: float) -> list[tuple[str, float | None]]:
        before, after, again = map(exposing, ms)
        found = deltas([], "fused", before, after, again)
        return [(c.verdict, c.again) for c in found if c.name == "exposed communication"]

    assert verdicts(50.0, 24.0, 20.0) == [("same", pytest.approx(-0.6))]
    assert verdicts(50.0, 24.0, 80.0) == [("same", pytest.approx(0.6))]
    assert verdicts(50.0, 24.0, 40.0) == [("same", pytest.approx(-0.2))]
    assert verdicts(50.0, 24.0, 45.0) == [("better", pytest.approx(-0.1))]


def collecting(arm: str, gc_ms: float | None) -> LegRecord:
    return LegRecord(
        arm=arm, round=0, position=0, directory="", seed=0, status="complete", seconds=9.0, step_ms=100.0, gc_ms=gc_ms
    )


def test_rare_collections_are_compared_by_their_mean_where_they_matter() -> None:
    def found(base: list[float], own: list[float | None]) -> list[tuple[float | None, float | None]]:
        legs = [*(collecting(BASELINE, ms) for ms in base), *(collecting("gc-freeze", ms) for ms in own)]
        changes = deltas([*legs, collecting(CONTROL, base[0])], "gc-freeze", None, None)
        return [(c.a, c.b) for c in changes if c.name == "garbage collection per step"]

    assert found([0.0, 12.0, 0.0], [0.0, 0.0, 0.0]) == [(3.0, 0.0)]
    assert found([0.4, 0.4, 0.4], [0.1, 0.2, 0.3]) == []
    assert found([12.0, 12.0], [None]) == [(12.0, None)]


def test_stalls_whose_intervals_overlap_are_the_same() -> None:
    other = row("sync", bytes=12_000_000, stall_ms=700.0, stall_low_ms=500.0, stall_high_ms=900.0)
    found = {c.name: c for c in deltas([], "fused", saved("dcp", SYNC), saved("dcp", other))}
    assert {found[n].verdict for n in ("checkpoint stall of a save", "checkpoint stall per step")} == {"same"}


def test_a_save_that_was_refused_or_left_out_says_why() -> None:
    refused = row("costlab:fp8", ok=False, lossy=True, note="a lossy save is refused")
    effect = save_effect(saved("dcp", SYNC), saved("fp8", SYNC, refused), BASE, FP8)
    assert effect is not None and effect.stall.b is None and effect.predicted_stall is None
    assert "A lossy save is refused." in saving(effect)
    effect = save_effect(saved("dcp", SYNC), saved("fp8", SYNC), BASE, FP8)
    assert effect is not None and "No save with costlab:fp8 was measured" in saving(effect)


def test_other_variants_have_no_effect_on_saves() -> None:
    other = msgspec.structs.replace(BASE, optimizer="sgd")
    assert save_effect(saved("dcp", SYNC), saved("dcp", SYNC), BASE, other) is None
    assert save_effect(None, None, BASE, FP8) is None


def test_sgd_has_one_moment_less_to_write() -> None:
    sgd = msgspec.structs.replace(BASE, optimizer="sgd")
    effect = save_effect(saved("dcp", SYNC), None, sgd, msgspec.structs.replace(sgd, checkpoint_codec="fp8"))
    assert effect is not None and effect.predicted_bytes == pytest.approx(12e6 * 16.25 / 64)


@pytest.mark.parametrize("toggle", ["fp8", "exact"])
def test_the_toggle_makes_the_arms_save_though_a_whatif_does_not_by_default(toggle: str) -> None:
    machine = Machine(gpus=0)
    whatif = make_whatif(BASE, [toggle], machine=machine)
    assert whatif.baseline.checkpoint and whatif.arm(toggle).checkpoint_codec == toggle
    assert not make_whatif(BASE, ["sgd"], machine=machine).baseline.checkpoint


def test_traffic_that_the_trace_cannot_hold_is_not_a_saving() -> None:
    """The all-reduces of a communication hook are missing in the trace: fewer bytes there are not fewer bytes sent."""
    plain = example()
    assert plain.collectives is not None
    before = msgspec.structs.replace(plain, collectives=msgspec.structs.replace(plain.collectives, exposed_ms=5.0))
    hooked = msgspec.structs.replace(before.run, spec={**before.run.spec, "schedule": "auto"})
    after = msgspec.structs.replace(before, run=hooked)
    found = {c.name: c for c in deltas([], "hybrid", before, after)}
    for name in ("communicated bytes", "exposed communication"):
        assert found[name].a is not None
        assert found[name].b is None

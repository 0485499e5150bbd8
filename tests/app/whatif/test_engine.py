"""The engine over legs of known speed: order, verdicts, failures, budget, cancelling, storing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from costlab.app.whatif import engine as engine_module
from costlab.app.whatif import events
from costlab.app.whatif.commands import answer
from costlab.app.whatif.engine import WhatIf
from costlab.app.whatif.legs import leg_spec, missing_bytes
from costlab.app.whatif.results import LegRecord, WhatIfResult
from costlab.app.whatif.spec import BASELINE, CONTROL, WhatIfSpec, make_whatif
from costlab.app.whatif.static_dynamic import COMPILED_FSDP, static_dynamic, static_dynamic_spec
from costlab.app.whatif.store import accuracy, find_cached, list_whatifs, load, new_whatif_directory, prediction_records
from costlab.app.whatif.toggles import Machine
from costlab.probes.spec import RunSpec
from costlab.probes.warm import TemplateError
from tests.app.whatif.fakes import CUDA_OOM, FakeLeg, FakeMachine, out_of_memory

BASE = RunSpec(ranks=1, dtype="fp32", batch=4, seq=2048, steps=10, compile="block")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))


def ask(*items: str, legs: int = 2, budget_s: float | None = None, factorial: bool = False) -> WhatIfSpec:
    return make_whatif(BASE, items, legs=legs, budget_s=budget_s, factorial=factorial, machine=Machine(gpus=1))


def run(spec: WhatIfSpec, machine: FakeMachine, told: list[events.WhatIfEvent] | None = None) -> WhatIfResult:
    heard = told if told is not None else []
    return WhatIf(spec, new_whatif_directory(), launcher=machine).run(heard.append)


def kinds(told: Iterable[events.WhatIfEvent]) -> list[str]:
    return [k for k, _ in itertools.groupby(type(e).__name__ for e in told)]


def slower(**factors: float) -> FakeMachine:
    """A machine on which each option value costs its factor: slower(sgd=0.9)."""

    def slowdown(spec: RunSpec) -> float:
        out = 1.0
        for value, factor in factors.items():
            out *= factor if value in (spec.optimizer, spec.recompute, spec.dtype) else 1.0
        return out

    return FakeMachine(slowdown, noise=0.001)


def test_verdicts_follow_the_speed_and_the_control_stays_put() -> None:
    result = run(ask("sgd", "recompute", legs=3), slower(sgd=0.9, block=1.2))
    assert result.status == "complete"
    assert result.arm("sgd").verdict == "faster"
    assert result.arm("recompute").verdict == "slower"
    assert result.control.verdict == "no difference"
    change = result.arm("sgd").change
    assert change is not None
    assert change.low is not None
    assert change.high is not None
    assert change.low <= -0.1 <= change.high
    both = result.arm("sgd + recompute").change
    assert both is not None
    assert both.value == pytest.approx(0.9 * 1.2 - 1, abs=0.01)
    assert result.rounds == 3
    assert len(result.legs) == 3 * 5


def test_legs_alternate_share_their_round_s_seed_and_only_the_first_is_profiled() -> None:
    machine = slower()
    result = run(ask("sgd"), machine)
    assert [leg.arm for leg in result.legs[:6]] == [BASELINE, "sgd", CONTROL, CONTROL, "sgd", BASELINE]
    assert [spec.seed for spec in machine.started] == [0, 0, 0, 1, 1, 1]
    assert [spec.profile_steps > 0 for spec in machine.started] == [True, True, True, *([False] * 3)]
    assert not any(spec.checkpoint or spec.keep_raw for spec in machine.started)


def test_only_legs_whose_saves_are_compared_save() -> None:
    machine = slower()
    run(ask("sgd", "fp8"), machine)
    saving = [(spec.optimizer, spec.checkpoint_codec) for spec in machine.started if spec.checkpoint]
    assert saving == [("adamw", "dcp"), ("adamw", "fp8")]


def test_what_is_kept_of_an_unfinished_whatif_answers_nothing() -> None:
    """A what-if that is killed leaves its last interim result; that of too few rounds is no answer to reuse."""
    kept: list[str] = []

    def told(event: events.WhatIfEvent) -> None:
        if isinstance(event, events.Interim):
            ((_, stored),) = list_whatifs()
            kept.append(stored.status)
            assert find_cached(stored.spec_key, stored.environment_key) is None

    result = WhatIf(ask("sgd", legs=3), new_whatif_directory(), launcher=slower()).run(told)
    assert kept and set(kept) == {"running"}
    assert find_cached(result.spec_key, result.environment_key) is not None


def test_eager_legs_time_the_same_training_steps_as_compiled_ones() -> None:
    whatif = ask("eager")
    eager, compiled = leg_spec(whatif, "eager", 0), leg_spec(whatif, BASELINE, 0)
    assert eager.warmup + 2 == compiled.warmup + 4  # first steps: two eager, four compiled (cold and warm)


def test_legs_find_what_their_own_arm_compiled_in_the_same_what_if() -> None:
    whatif = ask("sgd")
    salts = {(w, a, r): leg_spec(whatif, a, r, w).cache_salt for w in "xy" for a in whatif.arms() for r in (0, 1, 2)}
    assert all(salt for salt in salts.values())
    assert {salts[w, a, 0] == salts[w, a, r] for w, a, r in salts} == {True}
    assert len({salts[w, a, 0] for w, a, _ in salts}) == 2 * len(whatif.arms())


def test_events_come_in_order_with_predictions_before_any_variant() -> None:
    told: list[events.WhatIfEvent] = []
    run(ask("sgd"), slower(), told)
    leg = ["LegStarted", "LegEvent", "LegEnded"]
    assert kinds(told)[:7] == [*leg, "Predicted", *leg]
    assert isinstance(told[-1], events.Ended)
    assert sum(isinstance(e, events.Interim) for e in told) == 1
    started = [e for e in told if isinstance(e, events.LegStarted)]
    assert [e.number for e in started] == [1, 2, 3, 4, 5, 6]
    assert {e.total for e in started} == {6}
    assert started[0].eta_s is None
    assert started[-1].eta_s is not None


@pytest.mark.parametrize(
    ("first", "later", "eta"),
    [
        ([40.0], [], 2 * 40 + 3 * 0.45 * 40),
        ([40.0, 30.0, 20.0], [], 3 * 0.45 * 30),
        ([40.0, 30.0, 20.0], [8.0, 10.0], 9.0),
    ],
)
def test_the_time_left_tells_first_legs_from_later_ones(first: list[float], later: list[float], eta: float) -> None:
    engine = WhatIf(ask("sgd", legs=2), new_whatif_directory(), launcher=FakeMachine())
    arms = engine.spec.arms()
    engine._evidence.legs += [leg_record(arm, 0, seconds) for arm, seconds in zip(arms, first, strict=False)]
    engine._evidence.legs += [leg_record(arm, 1, seconds) for arm, seconds in zip(arms, later, strict=False)]
    number = 0 if len(first) < len(arms) else 1
    assert engine._announcement(arms[0], number).eta_s == pytest.approx(eta)


def leg_record(arm: str, number: int, seconds: float) -> LegRecord:
    return LegRecord(arm=arm, round=number, position=0, directory="", seed=0, status="complete", seconds=seconds)


def test_predictions_are_checked_and_recorded() -> None:
    result = run(ask("sgd"), slower(sgd=0.9))
    predicted = result.arm("sgd").predicted
    assert predicted is not None
    assert predicted.error is not None
    change = result.arm("sgd").change
    assert change is not None
    assert change.value is not None
    assert predicted.error == pytest.approx(change.value - predicted.change)
    (record,) = prediction_records()
    assert record.toggle == "sgd"
    assert record.error == pytest.approx(predicted.error)
    run(ask("sgd"), slower(sgd=0.9))
    (row,) = accuracy()
    assert row.count == 2


def test_a_variant_that_does_not_fit_is_a_result_and_the_others_go_on() -> None:
    machine = slower(sgd=0.9)
    machine.fail = lambda spec: out_of_memory() if spec.recompute == "block" else None
    result = run(ask("recompute", "sgd"), machine)
    assert result.status == "complete"
    lost = result.arm("recompute")
    assert lost.verdict == "invalid"
    assert not lost.fits
    assert lost.needs_bytes == 1.5 * 1024**3
    assert lost.change is None
    assert "out of memory" in lost.failure
    assert result.arm("sgd").verdict == "faster"
    assert sum(spec.recompute == "block" for spec in machine.started) == 2  # alone and together, once each


def test_a_variant_that_cannot_start_is_a_result_too() -> None:
    machine = slower()
    machine.fail = lambda spec: "cannot start torchrun" if spec.optimizer == "sgd" else None
    result = run(ask("sgd"), machine)
    assert result.status == "complete"
    assert result.arm("sgd").failure == "cannot start torchrun"
    assert len(machine.started) == 2


# Medians of a real what-if on one GPU: after four rounds the second looked disturbed, beside the fifth it did not.
BORDERLINE = [
    [129.64, 125.99, 129.95, 128.39, 129.06],
    [129.42, 131.64, 129.86, 127.51, 129.74],
    [129.72, 127.14, 129.36, 127.86, 129.85],
    [129.70, 127.60, 130.30, 128.98, 129.64],
    [130.25, 127.22, 129.69, 127.13, 129.82],
]  # ms, in the order of running


def test_a_round_more_than_asked_says_why() -> None:
    machine = FakeMachine()
    turns = itertools.chain.from_iterable(BORDERLINE)
    machine.slowdown = lambda _: next(turns)
    result = run(ask("fused", "fp8", legs=4), machine)
    assert result.rounds == 5
    assert "1 round more than asked: an earlier one looked disturbed, and beside the new legs does not" in result.notes
    asked = run(ask("sgd", legs=3), slower())
    assert not any("more than asked" in note for note in asked.notes)


def test_two_rounds_are_told_to_be_few() -> None:
    few = "two rounds can hardly tell noise from an effect: a third makes the intervals two to five times narrower"
    assert few in run(ask("sgd", legs=2), slower()).notes
    assert few not in run(ask("sgd", legs=3), slower()).notes


def test_a_baseline_that_fails_ends_the_whatif() -> None:
    machine = slower()
    machine.fail = lambda _: out_of_memory()
    result = run(ask("sgd"), machine)
    assert result.status == "failed"
    assert len(machine.started) == 1
    assert result.baseline.failure == CUDA_OOM


def test_legs_that_cannot_be_forked_are_run_all_the_same_and_the_notes_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unfit:
        def __init__(self) -> None:
            raise TemplateError("ImportError: \x1b[31mno torch")

    machine = FakeMachine()
    monkeypatch.setattr(engine_module, "Template", Unfit)
    monkeypatch.setattr(engine_module, "Launcher", machine)
    monkeypatch.delenv(engine_module.NO_FORK, raising=False)
    result = run(ask("sgd"), machine)
    assert result.status == "complete"
    assert result.notes[0] == "no leg could be forked (ImportError: no torch): all were started by torchrun"


def test_cancelling_keeps_what_is_complete() -> None:
    machine = slower(sgd=0.9)
    spec = ask("sgd", legs=6)
    whatif = WhatIf(spec, new_whatif_directory(), launcher=machine)

    def cancel_in_round_three(leg: FakeLeg) -> None:
        if leg.spec.seed == 2:
            whatif.cancel()

    machine.on_leg = cancel_in_round_three
    result = whatif.run(lambda _: None)
    assert result.status == "cancelled"
    assert result.rounds == 2
    assert len(machine.started) == 7
    assert result.legs[-1].status == "cancelled"
    assert result.arm("sgd").change is not None
    assert load(whatif.directory) == result


def test_a_budget_stops_when_all_is_decided() -> None:
    result = run(ask("sgd", legs=12, budget_s=1e6), slower(sgd=0.8))
    assert result.status == "stopped early"
    assert result.rounds == 3
    assert result.level > 0.95
    assert result.arm("sgd").verdict == "faster"


def test_a_budget_that_is_used_up_ends_after_two_rounds_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=10)
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: float(next(now)))
    result = run(ask("sgd", legs=12, budget_s=30), FakeMachine(noise=0.05))
    assert result.status == "out of time"
    assert result.rounds == 2


def test_without_a_budget_all_legs_are_run() -> None:
    assert run(ask("sgd", legs=3), slower(sgd=0.5)).rounds == 3


def test_a_factorial_reports_effects_of_all_orders() -> None:
    result = run(ask("sgd", "recompute", factorial=True), slower(sgd=0.9, block=1.2))
    found = {tuple(e.factors): e.change.value for e in result.effects}
    assert found[("sgd",)] == pytest.approx(-0.1, abs=0.005)
    assert found[("recompute",)] == pytest.approx(0.2, abs=0.005)
    assert found[("sgd", "recompute")] == pytest.approx(0.0, abs=0.005)


def test_other_work_is_compared_by_time_per_unit() -> None:
    """The fake's steps hold 8192 tokens whatever is asked, so pretend that the batch doubled them."""
    machine = FakeMachine(lambda spec: 1.6 if spec.batch == 8 else 1.0)
    spec = ask("batch=8", legs=2)
    whatif = WhatIf(spec, new_whatif_directory(), launcher=machine)
    read = whatif._read

    def doubled(path: Path, arm: str, *rest: object) -> object:
        record = read(path, arm, *rest)  # type: ignore[arg-type]
        return msgspec.structs.replace(record, units_per_step=record.units_per_step * (2 if arm == "batch=8" else 1))

    whatif._read = doubled  # type: ignore[method-assign,assignment]
    arm = whatif.run(lambda _: None).arm("batch=8")
    assert arm.measure == "time per token"
    assert arm.change is not None
    assert arm.change.value == pytest.approx(0.8 - 1, abs=0.01)
    assert arm.verdict == "faster"
    assert arm.parity is not None
    assert arm.parity.verdict == "not comparable"


def test_money_and_memory_are_compared() -> None:
    arm = run(ask("sgd"), slower(sgd=0.9)).arm("sgd")
    assert arm.money is not None
    assert arm.money.ratio == pytest.approx(-0.1, abs=0.01)
    assert {d.name for d in arm.deltas} >= {"peak memory", "kernels", "fusion rate"}


def test_a_question_asked_before_is_answered_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = slower(sgd=0.9)
    first = answer(ask("sgd"), quiet=True, launcher=machine)
    again = answer(ask("sgd"), quiet=True, launcher=machine)
    assert again.cached
    assert again.result == first.result
    assert len(machine.started) == 6
    other = answer(ask("recompute"), quiet=True, launcher=machine)
    assert not other.cached
    fresh = answer(ask("sgd"), fresh=True, quiet=True, launcher=machine)
    assert not fresh.cached
    key = first.result.spec_key
    assert find_cached(key, "another machine")[2] is True  # type: ignore[index]
    assert find_cached(key, first.result.environment_key)[2] is False  # type: ignore[index]
    assert find_cached("never asked", first.result.environment_key) is None


def test_damaged_and_cancelled_ones_are_no_answers() -> None:
    found = answer(ask("sgd"), quiet=True, launcher=slower())
    file = found.directory / "whatif.json"
    file.write_bytes(file.read_bytes()[:200])
    assert list_whatifs() == []
    assert find_cached(found.result.spec_key, found.result.environment_key) is None


@pytest.mark.parametrize(
    ("message", "lacking"),
    [
        (CUDA_OOM, 1.5 * 1024**3),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 80 GiB of which 30.00 MiB is free",
            None,
        ),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.", None),
        ("rank 0 was killed by SIGKILL", None),
    ],
)
def test_what_is_lacking_is_read_from_the_message_or_not_claimed(message: str, lacking: float | None) -> None:
    assert missing_bytes(message) == lacking


def test_static_against_dynamic_measures_ratios_against_eager_ddp() -> None:
    machine = FakeMachine(lambda spec: 1.0 if spec.compile == "none" else 0.8, noise=0.005)
    table = static_dynamic(run(static_dynamic_spec(BASE), machine))
    assert [r.name for r in table.rows] == ["eager DDP", "eager FSDP2", COMPILED_FSDP]
    assert [s.parallel for s in machine.started[:3]] == ["ddp", "fsdp", "fsdp"]
    compiled = table.rows[-1]
    assert compiled.speedup == pytest.approx(1.25, abs=0.03)
    assert compiled.speedup_low is not None
    assert compiled.speedup_high is not None
    assert compiled.speedup_low <= 1.25 <= compiled.speedup_high
    assert compiled.memory_ratio == pytest.approx(1.0)
    assert table.rows[0].speedup is None
    assert table.rows[0].step_ms is not None

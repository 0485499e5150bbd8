"""Each rule on both sides of its boundary, and what its finding says."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from costlab.app.analysis.views import (
    BreakView,
    CacheView,
    CollectivesView,
    CollectorView,
    CompileView,
    FusionView,
    PatternView,
    RunReport,
    StepsView,
)
from costlab.app.diagnosis import RULES, diagnose
from costlab.probes.sources import OWN_BUCKETS, OWN_HOOKS
from costlab.probes.spec import RunSpec
from tests.app.diagnosis.reports import (
    checkpoint,
    collective,
    figure,
    found,
    healthy,
    ids,
    layer,
    line,
    memory,
    miss,
    parts,
)


def fusion(**values: Any) -> FusionView:
    base: dict[str, Any] = {"rate": figure(0.8, "rate"), "strict_rate": 0.7, "target": 0.95, "status": "partial"}
    return FusionView(**(base | {"quality": figure(1.0, "fraction")} | values))


def compiled(**values: Any) -> CompileView:
    base: dict[str, Any] = {"cold_s": figure(10.0, "s"), "warm_s": figure(2.0, "s")}
    return CompileView(**(base | values))


def late(wait: float, transfer: float, exposed: float = 20.0) -> RunReport:
    rows = [collective(last_rank=1), collective(last_rank=1), collective(last_rank=0)]
    view = CollectivesView(wait_ms=wait, transfer_ms=transfer, rows=rows, straggler="rank 1 is late", overlapped=0.25)
    share = wait / (wait + transfer)
    return healthy(collectives=view, waterfall=parts(wait=exposed * share, exposed_communication=exposed))


def warm(**counts: int) -> CompileView:
    return compiled(
        caches=[CacheView(**({"rank": 0, "run": "warm", "cache": "fx", "hit": 0, "miss": 0, "bypass": 0} | counts))]
    )


def collecting(lost: float, paused: int = 2) -> RunReport:
    view = CollectorView(per_step_ms=2 * lost, longest_ms=300.0, rank=1, step=14, paused=paused, lost_ms=lost)
    return healthy(steps=StepsView(step_ms=figure(100.0, n=20), series_ms=[100.0] * 20, collector=view))


def test_a_healthy_run_has_no_findings() -> None:
    assert ids(healthy()) == []


def with_pattern(kind: str) -> FusionView:
    pattern = PatternView(
        kind=kind,
        text="written in place",
        mend="assign once",
        layer="mlp",
        phase="",
        source="m.py:1",
        bytes=0,
        saves_ms=None,
        count=3,
    )
    return msgspec.structs.replace(fusion(), patterns=[pattern])


EAGER = {"run__compile": "none", "waterfall": parts(memory_bound_kernels=5.0)}
SYNC, FAST = line("sync", 3000.0), line("async:pinned", 10.0)

CASES: dict[str, tuple[RunReport, RunReport]] = {  # rule -> fires, just does not
    "launch-bound": (healthy(waterfall=parts(idle_launch=3.0)), healthy(waterfall=parts(idle_launch=2.9))),
    "anti-pattern": (healthy(fusion=with_pattern("mutation")), healthy(fusion=with_pattern("hidden_copy"))),
    "host-sync": (healthy(waterfall=parts(idle_sync=2.0)), healthy(waterfall=parts(idle_sync=1.9))),
    "data-loading": (healthy(waterfall=parts(idle_data=2.0)), healthy(waterfall=parts(idle_data=1.9))),
    "garbage-collection": (collecting(1.0), collecting(0.99)),
    "exposed-communication": (late(0.0, 10.0, 3.0), late(1.0, 9.0, 3.0)),
    "straggler": (late(2.0, 8.0, 10.0), late(1.9, 8.1, 10.0)),
    "communicated-bytes": (
        healthy(collectives=CollectivesView(bytes_per_step=figure(106.0), expected_bytes=figure(100.0))),
        healthy(collectives=CollectivesView(bytes_per_step=figure(104.0), expected_bytes=figure(100.0))),
    ),
    "broken-fusion": (
        healthy(fusion=fusion(layers=[layer("loss", "broken")])),
        healthy(fusion=fusion(layers=[layer("loss", "partial")])),
    ),
    "missed-fusion": (
        healthy(fusion=fusion(misses=[miss("mlp", "layout_copy", 0.5)])),
        healthy(fusion=fusion(misses=[miss("mlp", "layout_copy", 0.49), miss("mlp", "through_extern", None)])),
    ),
    "graph-break": (healthy(compile=compiled(breaks=[BreakView(reason="print", source="m.py:1")])), healthy()),
    "passed-over": (healthy(run__passed_over={"Sequential": 3}), healthy()),
    "recompiles": (healthy(compile=compiled(recompiles=[BreakView(reason="size", source="m.py:1")])), healthy()),
    "uncompiled": (healthy(**EAGER), healthy(waterfall=parts(memory_bound_kernels=5.0))),
    "compile-cost": (healthy(compile=compiled(amortised_ms=2.0)), healthy(compile=compiled(amortised_ms=1.9))),
    "cache-misses": (healthy(compile=warm(miss=3)), healthy(compile=warm(miss=3, hit=1))),
    "checkpoint-stall": (
        healthy(checkpoint=checkpoint(line("sync", 160.0), FAST)),
        healthy(checkpoint=checkpoint(line("sync", 159.0), FAST)),
    ),
    "checkpoint-damaged": (
        healthy(checkpoint=checkpoint(line("sync", 1.0, "load", identical=False))),
        healthy(checkpoint=checkpoint(line("sync", 1.0, "load", identical=True))),
    ),
    "memory-free": (
        healthy(memory=memory(60.0), waterfall=parts(idle_other=10.0)),
        healthy(memory=memory(24.0, peak=20.0), waterfall=parts(idle_other=10.0)),
    ),
    "memory-full": (healthy(memory=memory(4.9)), healthy(memory=memory(5.0))),
    "recompute-unneeded": (
        healthy(memory=memory(40.0), spec={"recompute": "block"}),
        healthy(memory=memory(39.0), spec={"recompute": "block"}),
    ),
    "low-precision": (healthy(run__dtype="fp32"), healthy(run__dtype="fp32", run__device="cpu")),
    "loss-not-finite": (
        healthy(steps=StepsView(step_ms=figure(100.0), series_ms=[100.0] * 9, loss_bad=1, loss_bad_from=8)),
        healthy(steps=StepsView(step_ms=figure(100.0), series_ms=[100.0] * 9)),
    ),
    "trace-quality": (
        healthy(fusion=fusion(quality=figure(0.89, "fraction"))),
        healthy(fusion=fusion(quality=figure(0.9, "fraction"))),
    ),
    "unsteady-steps": (
        healthy(steps=StepsView(step_ms=figure(100.0, n=20), p10_ms=95.0, p90_ms=110.0)),
        healthy(steps=StepsView(step_ms=figure(100.0, n=20), p10_ms=95.0, p90_ms=109.9)),
    ),
    "profiler-cost": (
        healthy(steps=StepsView(step_ms=figure(100.0), profiled_ms=150.0)),
        healthy(steps=StepsView(step_ms=figure(100.0), profiled_ms=149.0)),
    ),
}  # fmt: skip


def test_every_rule_has_a_boundary_test() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_at_its_boundary_and_not_below(rule: str) -> None:
    fires, not_quite = CASES[rule]
    assert [f.id for f in found(rule, fires)] == [rule]
    assert found(rule, not_quite) == []


@pytest.mark.parametrize("rule", CASES)
def test_a_finding_is_whole(rule: str) -> None:
    (finding,) = found(rule, CASES[rule][0])
    assert finding.title and finding.action
    assert any(re.search(r"\d", text) for text in (finding.title, *finding.evidence)) or rule in ("checkpoint-damaged",)
    assert all(finding.evidence)
    if finding.saves_ms is not None:
        assert 0 < finding.saves_ms <= 100.0
        assert finding.saves_share == pytest.approx(finding.saves_ms / 100)
        # 3.6 an hour x 2 GPUs = 2e-6 a ms; 10,000 tokens a step; 100,000 steps
        assert finding.saves_money == pytest.approx(finding.saves_ms * 2e-6 * 100)
        assert finding.saves_run_money == pytest.approx(finding.saves_ms * 2e-6 * 100_000)
        assert finding.how


@pytest.mark.parametrize("rule", CASES)
def test_what_proves_it_is_options_of_a_run(rule: str) -> None:
    for finding in found(rule, CASES[rule][0]):
        words = finding.proves.split()
        options = [w.removeprefix("--").replace("-", "_") for w in words if w.startswith("--")]
        assert set(options) <= set(RunSpec.__struct_fields__)
        values = dict(zip(options, (w for w in words if not w.startswith("--")), strict=False))
        for name, text in values.items():
            value: object = int(text) if text.isdigit() else text
            msgspec.convert({name: value}, RunSpec)


@pytest.mark.parametrize("rule", CASES)
def test_no_price_no_money(rule: str) -> None:
    report = msgspec.structs.replace(CASES[rule][0], cost=None)
    for finding in found(rule, report):
        assert (finding.saves_money, finding.saves_run_money) == (None, None)


def empty() -> RunReport:
    sections = ("steps", "waterfall", "fusion", "collectives", "checkpoint", "compile", "memory", "energy", "cost")
    return msgspec.structs.replace(healthy(), **dict.fromkeys(sections))


def test_a_report_without_anything_has_no_findings_and_no_errors() -> None:
    errors: list[str] = []
    assert diagnose(empty(), errors.append) == []
    assert diagnose(msgspec.structs.replace(healthy(), steps=None), errors.append) == []
    assert errors == []


def test_a_rule_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> list[Any]:
        raise ZeroDivisionError("x")

    monkeypatch.setitem(RULES, "launch-bound", fail)
    errors: list[str] = []
    report = healthy(waterfall=parts(idle_launch=10.0, idle_sync=10.0))
    assert [f.id for f in diagnose(report, errors.append)] == ["host-sync"]
    assert errors == ["rule launch-bound failed (ZeroDivisionError: x)"]


def test_the_largest_saving_comes_first_and_unknown_ones_by_severity() -> None:
    report = healthy(
        waterfall=parts(idle_launch=3.0, idle_sync=30.0),
        compile=compiled(breaks=[BreakView(reason="print", source="m.py:1")]),
        fusion=fusion(quality=figure(0.5, "fraction"), misses=[miss("mlp", "layout_copy", 0.6)]),
    )
    assert ids(report) == ["host-sync", "launch-bound", "graph-break", "missed-fusion", "trace-quality"]


def test_severity_follows_the_share_of_the_step() -> None:
    shares = {5.0: "high", 4.9: "medium", 3.0: "medium"}
    for ms, severity in shares.items():
        assert found("launch-bound", healthy(waterfall=parts(idle_launch=ms)))[0].severity == severity


@pytest.mark.parametrize(
    ("options", "proves"),
    [
        ({"run__compile": "none"}, "--compile block"),
        ({"run__compile": ""}, ""),
        ({}, "--cudagraphs"),
        ({"spec": {"cudagraphs": True}}, "--batch 8"),
        ({"spec": {"cudagraphs": True, "batch": 0}}, ""),
        ({"run__device": "cpu"}, "--batch 8"),
    ],
)
def test_launch_idle_asks_for_the_next_option(options: dict[str, Any], proves: str) -> None:
    (finding,) = found("launch-bound", healthy(waterfall=parts(idle_launch=10.0), **options))
    assert finding.proves == proves


def test_one_garbage_collection_says_little_of_how_often_it_comes() -> None:
    (once,), (often,) = (found("garbage-collection", collecting(6.0, paused=n)) for n in (1, 2))
    assert (once.severity, often.severity) == ("low", "high")
    assert any("--steps 200" in text for text in once.evidence)
    assert not any("--steps" in text for text in often.evidence)
    (always,) = found("garbage-collection", collecting(6.0, paused=11))  # of 20 steps
    assert [("gc.collect(), leave that out" in f.action) for f in (once, often, always)] == [False, False, True]
    assert once.saves_ms is None
    assert once.proves == "--gc freeze"


@pytest.mark.parametrize(
    ("bound", "words"), [(True, "at most, if the device waits"), (False, "longer than the others")]
)
def test_what_collections_cost_says_what_it_was_compared_with(bound: bool, words: str) -> None:
    report = collecting(6.0)
    assert report.steps is not None and report.steps.collector is not None
    view = msgspec.structs.replace(report.steps.collector, bound=bound)
    report = msgspec.structs.replace(report, steps=msgspec.structs.replace(report.steps, collector=view))
    (finding,) = found("garbage-collection", report)
    assert any(words in text for text in finding.evidence)


def test_what_is_frozen_already_is_not_frozen_again() -> None:
    report = collecting(6.0)
    frozen = msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, spec={"gc": "freeze"}))
    (finding,) = found("garbage-collection", frozen)
    assert finding.proves == ""
    assert "gc.freeze" not in finding.action


def test_waiting_and_transfer_are_two_findings_that_share_the_time() -> None:
    report = late(15.0, 5.0)
    (exposed,), (straggler,) = found("exposed-communication", report), found("straggler", report)
    assert (exposed.saves_ms, straggler.saves_ms) == (5.0, 15.0)
    assert "rank 1" in straggler.title
    assert "rank 1 is late" in straggler.evidence
    assert "99.0 ms to 100 ms" in " ".join(straggler.evidence)
    assert "25 %" in " ".join(exposed.evidence)


@pytest.mark.parametrize(("steps", "said"), [(1, True), (3, False)])
def test_a_straggler_of_one_step_says_so_and_one_that_is_not_proven_is_not_named(steps: int, said: bool) -> None:
    report = late(15.0, 5.0)
    report = msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, spec={"profile_steps": steps}))
    (named,) = found("straggler", report)
    assert "rank 1" in named.title
    assert any("--profile-steps 10" in text for text in named.evidence) == said
    assert report.collectives is not None
    unproven = msgspec.structs.replace(report.collectives, straggler="")
    (finding,) = found("straggler", msgspec.structs.replace(report, collectives=unproven))
    assert "a late one" in finding.title


def test_unknown_waiting_is_no_straggler() -> None:
    view = CollectivesView(wait_ms=None, transfer_ms=None)
    report = healthy(collectives=view, waterfall=parts(exposed_communication=50.0))
    assert found("straggler", report) == []
    assert found("exposed-communication", report)[0].saves_ms == 50.0


def test_broken_fusion_names_the_innermost_layer_with_reason_and_line() -> None:
    rows = [
        layer("", "broken"),
        layer("layers.*", "broken"),
        layer("layers.*.mlp", "broken"),
        layer("head", "complete"),
    ]
    view = fusion(layers=rows, misses=[miss("layers.*.mlp", "graph_break", 2.0), miss("head", "mutation", 9.0)])
    (finding,) = found("broken-fusion", healthy(fusion=view))
    assert finding.layer == "layers.*.mlp"
    assert finding.where == "m.py:7"
    assert "cut into several graphs" in finding.title
    assert "a and b: because" in finding.evidence
    assert finding.action.startswith("Remove the print")


def test_a_broken_model_alone_is_reported_as_the_model() -> None:
    (finding,) = found("broken-fusion", healthy(fusion=fusion(layers=[layer("", "broken")])))
    assert "the model" in finding.title


def test_a_layer_without_modelled_saving_is_still_reported() -> None:
    row = layer("head", "broken", saves_ms=None, rate=None, bytes=None, lost=None, main_cause="uncompiled")
    (finding,) = found("broken-fusion", healthy(fusion=fusion(layers=[row])))
    assert (finding.saves_ms, finding.severity) == (None, "medium")
    assert "outside any compiled graph" in finding.title


def test_misses_inside_a_broken_layer_are_not_counted_again() -> None:
    view = fusion(
        layers=[layer("layers.*.mlp", "broken")],
        misses=[miss("layers.*.mlp", "layout_copy", 5.0), miss("layers.*.attention", "layout_copy", 4.0)],
    )
    assert [f.layer for f in found("missed-fusion", healthy(fusion=view))] == ["layers.*.attention"]


def test_an_eager_run_gets_one_finding_not_one_a_layer() -> None:
    view = fusion(layers=[layer(f"l{n}", "broken") for n in range(9)])
    report = healthy(fusion=view, **EAGER)
    assert "broken-fusion" not in ids(report)
    assert found("uncompiled", report)[0].proves == "--compile block"


def test_autotuning_is_offered_only_where_it_may_help() -> None:
    tune = "--compile-mode max-autotune-no-cudagraphs"
    loops = fusion(misses=[miss("mlp", "backend_loop_mismatch", 5.0)])
    copies = fusion(misses=[miss("mlp", "layout_copy", 5.0)])
    assert found("missed-fusion", healthy(fusion=loops))[0].proves == tune
    assert found("missed-fusion", healthy(fusion=copies))[0].proves == "--fused"
    assert found("missed-fusion", healthy(fusion=copies, spec={"fused": True}))[0].proves == ""
    done = healthy(fusion=loops, spec={"compile_mode": "max-autotune-no-cudagraphs"})
    assert found("missed-fusion", done)[0].proves == "--fused"


def test_breaks_by_sharding_inside_the_compiled_model_have_a_mend_of_their_own() -> None:
    breaks = [BreakView(reason=r, source="m.py:1") for r in ("print", f"FSDP runs {OWN_HOOKS}")]
    users, wrappers = found("graph-break", healthy(compile=compiled(breaks=breaks)))
    assert users.proves == "" and "print" in users.action
    assert wrappers.proves == "--compile block" and "sharded" in wrappers.action


@pytest.mark.parametrize(("how", "proves"), [("model", "--compile block"), ("block", "")])
def test_cuts_at_ddps_buckets_are_intended(how: str, proves: str) -> None:
    cuts = [BreakView(reason=OWN_BUCKETS, source="torch/_dynamo/backends/distributed.py:0", count=3)]
    report = healthy(compile=compiled(breaks=cuts))
    report = msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, spec={"compile": how}))
    (finding,) = found("graph-break", report)
    assert (finding.severity, finding.proves, finding.where) == ("info", proves, "")
    assert "seen 3 times" in finding.evidence
    assert "print" not in finding.action


@pytest.mark.parametrize(
    ("reason", "count", "severity", "words"),
    [
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", 1, "info", "Nothing to mend"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", 2, "medium", "with and without gradient"),
        ("0/1: GLOBAL_STATE changed: grad_mode", 1, "info", "two modes"),
        ("0/0: GLOBAL_STATE changed: autocast(cpu)_enabled", 1, "info", "another autocast"),
        ("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5", 1, "low", "mark_dynamic"),
        ("0/0: tensor 'x' rank mismatch. expected 2, actual 1", 1, "low", "mark_dynamic"),
        ("0/0: 768*x.size()[1]*x.size()[0] < 5242880", 1, "low", "costlab shapes"),
        ("0/0: tensor 'x' stride mismatch at index 0. expected 5, actual 1", 1, "low", "memory layout"),
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", 1, "low", "one element type"),
        ("0/0: n == 2 # g=lambda x,n: x*n", 3, "medium", "keep it constant"),
        ("", 1, "low", "keep it constant"),
    ],
)
def test_the_advice_on_a_recompile_fits_its_guard(reason: str, count: int, severity: str, words: str) -> None:
    item = BreakView(reason=reason, source="m.py:1", count=count)
    (finding,) = found("recompiles", healthy(compile=compiled(recompiles=[item])))
    assert finding.severity == severity
    assert words in finding.action


def test_lists_of_findings_are_short() -> None:
    breaks = [BreakView(reason=f"r{n}", source=f"m.py:{n}", count=9 - n) for n in range(8)]
    findings = found("graph-break", healthy(compile=compiled(breaks=breaks)))
    assert [f.where for f in findings] == ["m.py:0", "m.py:1", "m.py:2"]
    assert "8 different breaks in all" in " ".join(findings[0].evidence)


def test_a_bypassed_cache_gets_other_advice_than_a_missing_one() -> None:
    bypass, missing = (found("cache-misses", healthy(compile=warm(**{k: 2})))[0] for k in ("bypass", "miss"))
    assert "uuid" in bypass.action
    assert "TORCHINDUCTOR_CACHE_DIR" in missing.action
    assert "rank 0: 0 hits, 0 misses, 2 bypasses" in bypass.evidence
    assert found("cache-misses", healthy(compile=warm())) == []


def test_the_checkpoint_saving_is_the_difference_of_the_stalls() -> None:
    (finding,) = found("checkpoint-stall", healthy(checkpoint=checkpoint(SYNC, FAST, line("async:process", 100.0))))
    assert finding.saves_ms == pytest.approx((3000 - 10) / 500)
    assert finding.source == "measured"
    assert "BlockingAsyncStager" in finding.action
    assert finding.proves == ""


@pytest.mark.parametrize(("mode", "proves"), [("costlab:exact", "--checkpoint-codec exact"), ("async:process", "")])
@pytest.mark.parametrize(("stall", "words"), [(10.0, "10.0 ms"), (-2.0, "less than could be told")])
def test_a_way_of_saving_is_proved_by_itself(mode: str, proves: str, stall: float, words: str) -> None:
    (finding,) = found("checkpoint-stall", healthy(checkpoint=checkpoint(SYNC, line(mode, stall))))
    assert finding.proves == proves
    assert words in finding.title


def test_a_stall_without_a_measured_alternative_is_a_finding_without_a_saving() -> None:
    left_out = line("async:pinned", None, ok=False, note="not run: 1 s left of the budget")
    (finding,) = found("checkpoint-stall", healthy(checkpoint=checkpoint(SYNC, left_out)))
    assert (finding.saves_ms, finding.severity) == (None, "high")
    assert "asynchronous (pinned): not run: 1 s left of the budget" in finding.evidence
    assert "was not measured" in finding.action
    (other,) = found("checkpoint-stall", healthy(checkpoint=checkpoint(SYNC, line("async:a", 4000.0))))
    assert "no asynchronous way stalled less" in other.action
    assert found("checkpoint-stall", healthy(checkpoint=checkpoint(line("sync", 499.0)))) == []


def test_a_small_or_rare_stall_is_no_finding() -> None:
    assert found("checkpoint-stall", healthy(checkpoint=checkpoint(SYNC, FAST, every=10_000))) == []
    assert found("checkpoint-stall", healthy(checkpoint=checkpoint(line("sync", 5.0), line("async:a", 9.0)))) == []


def test_a_save_left_out_has_not_failed() -> None:
    left_out = line("async:process", None, ok=False, note="not run: /dev/shm is too small")
    failed = line("async:default", None, ok=False, note="KeyError: type")
    (finding,) = found("checkpoint-damaged", healthy(checkpoint=checkpoint(left_out, failed)))
    assert "async:default" in finding.title
    assert finding.severity == "medium"


@pytest.mark.parametrize(
    ("headroom", "peak", "batch"),
    [
        (90.0, 15.0, 32),  # 5 more bytes a batch, 80 to spend: sixteen times would fit, eight times is the most
        (60.0, 40.0, 8),  # 30 a batch, 50 to spend
        (40.0, 30.0, 8),  # 20 a batch, 30 to spend
        (30.0, 17.0, 8),  # 7 a batch, 20 to spend: 3 x 7 is too much
        (31.0, 17.0, 16),  # 21 to spend: 3 x 7 fits
        (40.0, 60.0, None),  # 50 a batch, 30 to spend
    ],
)
def test_the_batch_grows_as_far_as_memory_allows(headroom: float, peak: float, batch: int | None) -> None:
    # a step takes peak - 10 beyond the model; a tenth of the device of 100 stays free
    report = healthy(memory=memory(headroom, peak), waterfall=parts(idle_other=20.0))
    assert [f.proves for f in found("memory-free", report)] == ([] if batch is None else [f"--batch {batch}"])
    for finding in found("memory-free", report):
        assert finding.saves_ms == pytest.approx(20.0 * (1 - 4 / (batch or 4)))


def test_a_batch_of_unknown_size_is_not_doubled() -> None:
    report = healthy(memory=memory(90.0), waterfall=parts(idle_other=20.0), spec={"batch": 0})
    assert found("memory-free", report) == []


def test_a_device_without_an_allocator_is_silent() -> None:
    report = msgspec.structs.replace(healthy(), memory=None)
    assert not {"memory-free", "memory-full", "recompute-unneeded"} & set(ids(report))

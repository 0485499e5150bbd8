"""Candidates, policies and decisions, with legs that need no process."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from costlab.app import cli
from costlab.app.analysis.build import build_report
from costlab.app.report import render_markdown
from costlab.app.store import Run
from costlab.app.tune import candidates as rules
from costlab.app.tune import flow
from costlab.app.tune.candidates import Evidence, candidates, chosen, hit_rates, predict
from costlab.app.tune.decide import plan_of, verdict
from costlab.app.tune.flow import TuneError, Tuning
from costlab.app.tune.render import render
from costlab.app.tune.stored import TUNE_FILE, read_tuning, write_tuning
from costlab.app.whatif.results import Arm
from costlab.kernels.fused.plan import read
from costlab.probes.records import MissRow
from costlab.probes.spec import RunSpec, SpecError
from costlab.probes.tune_l2 import CountersUnavailable, measure, parse, reason
from costlab.probes.tune_records import CacheRow, Scan
from tests.app.make_run import write_example_run
from tests.app.tune.examples import scan, tuning
from tests.app.whatif.fakes import FakeMachine


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))


def example(path: Path) -> Path:
    """A run in the store's format."""
    write_example_run(path, run_id=path.name, ranks=1, layers=2)
    return path


def evidence(path: Path, found: Scan, misses: list[MissRow] | None = None) -> Evidence:
    """Evidence of the example run, with misses of our own."""
    report = build_report(Run(path))
    return Evidence(report=report, misses=misses or [], scan=found, copy_gbps=4000.0)


def miss(layer: str, first: str, second: str, size: int = 1 << 30) -> MissRow:
    return MissRow(
        rank=0, layer=layer, phase="forward", cause="layout_copy", addressable=True, bytes=size, reason="",
        producer_kernel=first, consumer_kernel=second,
    )  # fmt: skip


def test_prediction_is_measured_time_less_the_kernels_traffic() -> None:
    assert predict(3.0, 4_000_000_000, 0, 4000.0)[0] == pytest.approx(2.0)
    assert predict(0.5, 4_000_000_000, 0, 4000.0)[0] == 0.0
    assert predict(None, None, 4_000_000_000, 4000.0)[0] == pytest.approx(1.0)
    assert predict(None, 10, 0, 4000.0)[0] is None
    assert predict(1.0, 10, 10, None)[0] is None


def test_candidates_of_a_run_and_what_each_policy_chooses(tmp_path: Path) -> None:
    path = example(tmp_path / "run")
    report = build_report(Run(path))
    assert report.fusion is not None
    kernels = [k for k in report.fusion.kernels if k.category == "memory" and k.bytes]
    layer = rules.any_index(kernels[0].layer)
    found = scan()
    sites = [msgspec.structs.replace(found.sites[0], where=layer, inside=(), bytes=0), *found.sites[1:]]
    other = next(k for k in kernels if k.name != kernels[0].name)
    known = evidence(
        path, msgspec.structs.replace(found, sites=sites), [miss(layer, kernels[0].name, kernels[0].name),
                                                            miss(kernels[0].layer, other.name, kernels[0].name)]
    )  # fmt: skip
    listed = candidates(known)
    first = next(c for c in listed if c.where == layer)
    assert first.span_ms and first.predicted_ms == pytest.approx(first.span_ms)
    assert first.roofline and first.lost == 2 << 30
    assert [c.how for c in listed].count("none") == 0  # the only misses are in a covered layer
    assert first in chosen(listed, "roofline")
    assert not any(c.kernel == "rope" for c in listed)


def test_seed_rule_needs_a_pair_and_a_hit_rate(tmp_path: Path) -> None:
    report = build_report(Run(example(tmp_path / "run")))
    assert report.fusion is not None
    slow, fast = sorted(report.fusion.kernels, key=lambda k: -k.ms)[:2]
    assert rules.seed_rule(None, 0.5) == (None, "no two measured kernels with a missed fusion between them")
    assert rules.seed_rule((slow, fast), None)[0] is None
    assert rules.seed_rule((slow, fast), 0.5)[0] is True
    assert rules.seed_rule((slow, fast), 0.15)[0] is False
    other = msgspec.structs.replace(fast, ms=slow.ms * 2)
    assert rules.seed_rule((slow, other), 0.5)[0] is False
    known = evidence(tmp_path / "run", scan())
    hits = Evidence(report, [], scan(), hit_rates([CacheRow(kernel=fast.name, hit_rate=0.3, launches=1)]), 1.0)
    assert rules.miss_rate(hits, (slow, fast)) == (0.7, "measured by ncu on one replayed step")
    big = msgspec.structs.replace(fast, bytes=4 << 20, calls=1.0)
    share, how = rules.miss_rate(known, (slow, big))
    assert share == pytest.approx(0.75) and how.startswith("estimated")


def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Scan, **options: object) -> flow.Tuned:
    """A whole tuning on fake legs: add_norm makes steps 10 % faster, gated 10 % slower, the loss nothing."""
    path = example(tmp_path / "run")

    def slowdown(spec: RunSpec) -> float:
        if not spec.plan:
            return 1.0
        names = {r.kernel for r in read(spec.plan).kept()}
        return (0.9 if "add_norm" in names else 1.0) * (1.1 if "gated" in names else 1.0)

    monkeypatch.setattr(Tuning, "scan", lambda _self, _spec: found)
    every = rules.candidates

    def all_of_them(known: Evidence) -> list[object]:
        return [msgspec.structs.replace(c, roofline=True) if c.how != "none" else c for c in every(known)]

    monkeypatch.setattr(flow, "candidates", all_of_them)
    machine = FakeMachine(slowdown, noise=0.002)
    tuning = Tuning(
        spec=None, run=str(path), legs=4, l2="estimate", tell=lambda _: None, launcher=machine, **options  # type: ignore[arg-type]
    )  # fmt: skip
    return tuning.run_all(tmp_path / "plan.json")


def test_what_wins_is_kept_and_the_plan_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(tmp_path, monkeypatch, scan())
    by = {c.kernel: c for c in found.view.candidates if c.kernel}
    assert by["add_norm"].decision == "kept" and by["add_norm"].change == pytest.approx(-0.1, abs=0.02)
    assert by["gated"].decision == "dropped" and "slower" in by["gated"].why
    assert by["linear_cross_entropy"].decision == "dropped" and "noise" in by["linear_cross_entropy"].why
    plan = read(tmp_path / "plan.json")
    assert [r.kernel for r in plan.kept()] == ["add_norm"]
    kept = next(r for r in plan.rewrites if r.kernel == "add_norm")
    assert kept.measured is not None and kept.measured.low < kept.measured.change < kept.measured.high
    assert found.view.together is not None and found.view.whatif
    assert found.view.layers, "before and after side by side"
    assert read_tuning(tmp_path / "run") == found.view
    for form in ("text", "md", "json"):
        assert "faster beyond the noise" in " ".join(render(found, form, 80).split())
    assert all(len(line) <= 80 for line in render(found, "text", 80).splitlines() if "fusion-plan" not in line)


def test_what_was_cut_short_is_untried_and_not_called_the_same() -> None:
    decision, why = verdict(Arm(name="together", verdict="no difference"))
    assert decision == "untried"
    assert "two rounds" in why


def test_wrong_numerics_are_never_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(tmp_path, monkeypatch, scan(ok=False))
    gated = next(c for c in found.view.candidates if c.kernel == "gated")
    assert gated.decision == "dropped" and "numerics" in gated.why and gated.change is None


def test_together_is_one_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(tmp_path, monkeypatch, scan(), together=True)
    real = [c for c in found.view.candidates if c.how != "none"]
    assert all(c.change is None for c in real) and len({c.decision for c in real}) == 1
    assert all("together" in c.why for c in real)


def test_without_triton_nothing_is_measured_and_nothing_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuned(tmp_path, monkeypatch, scan("Triton kernels are not available on cpu"))
    assert found.measured is None
    assert all(c.change is None and c.measured_ms is None for c in found.view.candidates)
    text = render(found, "text", 80)
    assert "not available on cpu" in text and "nothing was measured" in " ".join(text.split())
    assert {r.decision for r in found.plan.rewrites} <= {"untried", "dropped"}


def test_a_run_that_was_tuned_reports_it(tmp_path: Path) -> None:
    path = example(tmp_path / "run")
    write_tuning(tuning(), path)
    report = build_report(Run(path))
    assert report.fusion is not None and report.fusion.tuning == tuning()
    text = render_markdown(report)
    assert ("Profile-guided fusion" in text and "add\\_norm" in text.replace("`", "")) or "add_norm" in text
    (path / TUNE_FILE).write_bytes(b'{"created": 1}')
    damaged = build_report(Run(path))
    assert damaged.fusion is not None and damaged.fusion.tuning is None
    assert any("tuning" in note for note in damaged.run.notes)


def test_a_run_that_has_fused_kernels_is_refused(tmp_path: Path) -> None:
    path = example(tmp_path / "run")
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["spec"]["fused"] = True
    (path / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(cli.app, ["tune", str(path), "--out", str(tmp_path / "p.json")])
    assert result.exit_code == 2 and "without --fused" in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--policy", "luck"], 2, "none of roofline, seed"),
        (["--legs", "1"], 2, "at least 2"),
        (["--l2", "guess"], 2, "none of auto, ncu, estimate"),
        (["no-such-run"], 5, "no-such-run"),
    ],
)
def test_bad_options_are_one_line(options: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(cli.app, ["tune", *options])
    assert result.exit_code == code and words in result.stderr and "Traceback" not in result.stderr


def test_a_plan_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "plan.json"
    bad.write_text('{"format": "costlab-fusion-plan", "version": 99}')
    for path in (bad, tmp_path / "absent.json"):
        result = CliRunner().invoke(cli.app, ["run", "--plan", str(path)])
        assert result.exit_code == 5 and result.stderr.count("\n") == 1, result.stderr
    result = CliRunner().invoke(cli.app, ["whatif", "--set", f"plan={bad}"])
    assert result.exit_code == 2 and "version 99" in result.stderr


def test_ncus_table_is_read_and_its_refusal_told(monkeypatch: pytest.MonkeyPatch) -> None:
    head = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    rows = '"0","1","triton_poi_0(float*)","lts__t_sector_hit_rate.pct","%","30.5"\n'
    rows += '"1","1","triton_poi_0(float*)","lts__t_sector_hit_rate.pct","%","50.5"\n'
    rows += '"2","1","bad","lts__t_sector_hit_rate.pct","%","n/a"\n'
    assert parse(f"==PROF== Connected\n{head}{rows}") == [CacheRow(kernel="triton_poi_0", hit_rate=0.405, launches=2)]
    assert parse("") == []
    assert "ERR_NVGPUCTRPERM" in reason("==ERROR== ERR_NVGPUCTRPERM - no permission")
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(CountersUnavailable, match="not on the PATH"):
        measure(RunSpec(), 1.0)


def test_a_failed_profile_run_ends_the_tuning(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.fail = lambda _spec: "torchrun is missing"
    tuning = Tuning(spec=RunSpec(), run=None, tell=lambda _: None, launcher=machine)
    with pytest.raises(TuneError, match="torchrun is missing"):
        tuning.run_all(tmp_path / "plan.json")


@pytest.mark.parametrize("out", ["absent/plan.json", "."])
def test_a_plan_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path, out: str) -> None:
    machine = FakeMachine()
    with pytest.raises(SpecError, match="--out: cannot write"):
        Tuning(spec=RunSpec(), run=None, tell=lambda _: None, launcher=machine).run_all(tmp_path / out)
    assert not machine.started


def test_a_full_disk_is_told_with_the_plans_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_plan: object, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flow, "write", full)
    with pytest.raises(TuneError, match=r"plan\.json: No space left"):
        flow.save_plan(plan_of([], scan(), "llama", "roofline", []), tmp_path / "plan.json")


def test_cancelling_ends_the_look_at_the_model() -> None:
    tuning = Tuning(spec=RunSpec(), run=None, tell=lambda _: None, cancelled=True)
    with pytest.raises(TuneError, match="cancelled while looking at the model"):
        tuning.scan(RunSpec(device="cpu"))


def test_ncu_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\nsleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(tool))
    with pytest.raises(CountersUnavailable, match="took more than 1 s"):
        measure(RunSpec(), 1.0)
    with pytest.raises(CountersUnavailable, match="cancelled"):
        measure(RunSpec(), 60.0, lambda: True)


def test_plan_holds_only_what_has_a_kernel(tmp_path: Path) -> None:
    plan = plan_of(tuning().candidates, scan(), "llama", "roofline", [])
    assert [r.kernel for r in plan.rewrites] == ["add_norm", "rope"]
    assert plan.rewrites[0].chosen_by == ("roofline", "seed")

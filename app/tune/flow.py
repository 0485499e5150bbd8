"""Profile, look, choose, try, keep: the steps of profile-guided fusion, each with its own failure said in words."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from costlab.app.analysis.views import CandidateView, RunReport, TuneView
from costlab.app.tune.candidates import Evidence, candidates, chosen, hit_rates
from costlab.app.tune.decide import TOGETHER, before_after, decide, plan_of
from costlab.app.tune.stored import write_tuning
from costlab.app.whatif.results import WhatIfResult
from costlab.app.whatif.spec import Variant, WhatIfSpec
from costlab.kernels.fused.plan import Plan, Policy, write
from costlab.probes.child import ChildCancelled, ask, last_words
from costlab.probes.launch import Launcher, LaunchError
from costlab.probes.records import MissRow
from costlab.probes.spec import RunSpec, SpecError
from costlab.probes.tune_records import CacheRow, Scan

SCAN_TIMEOUT_S, NCU_TIMEOUT_S = 300.0, 240.0
SHARED = "candidates that share a layer count its time twice: predictions do not add up"


class TuneError(Exception):
    """The tuning could not be done; the message says why and what to do."""


@dataclass(frozen=True)
class Tuned:
    """What came out."""

    view: TuneView
    plan: Plan
    plan_file: Path
    run: Path
    measured: WhatIfResult | None = None


@dataclass
class Tuning:
    """One tuning; `cancel` may be called from another thread or a signal handler."""

    spec: RunSpec | None
    run: str | None
    policy: Policy = "roofline"
    legs: int = 3
    budget_s: float | None = None
    together: bool = False
    l2: str = "auto"
    tell: Callable[[str], None] = print
    launcher: Any = Launcher
    cancelled: bool = False
    notes: list[str] = field(default_factory=list)
    _current: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """End what is running; legs that are complete are concluded from."""
        self.cancelled = True
        current = self._current
        if current is not None:
            current.cancel()

    def run_all(self, out: Path) -> Tuned:
        """All steps; writes the plan to `out` and the tuning to the run. Raises TuneError, SpecError, StoreError."""
        from costlab.app.analysis.build import build_report
        from costlab.app.store import Run

        check_plan_file(out)
        run = self.profile()
        spec, report = self.spec_of(run), build_report(Run(run))
        self.tell(f"looking at {report.run.title or spec.workload} for places where fused kernels fit")
        found = self.scan(spec)
        evidence = self.evidence(run, report, found, spec)
        listed = candidates(evidence)
        tried = chosen(listed, self.policy)
        self.tell(f"{sum(c.how != 'none' for c in listed)} candidates, {len(tried)} chosen by the {self.policy} policy")
        self.notes += found.findings[:8]
        result, after = None, None
        if found.unavailable:
            self.notes.append(f"{found.unavailable}: predictions only, nothing was measured")
            listed = [self.untried(c, tried, found.unavailable) for c in listed]
        elif not self.legs:
            listed = [self.untried(c, tried, "--legs 0: nothing was measured") for c in listed]
        elif tried and not self.cancelled:
            result, after = self.measure(spec, listed, tried, found, report.run.title)
            listed = decide(listed, [c.name for c in tried], result)
        else:
            listed = decide(listed, [], None)
        self.notes.append(SHARED)
        plan = plan_of(listed, found, report.run.title, self.policy, self.notes)
        save_plan(plan, out)
        view = self.view(listed, plan, out, result, after, evidence)
        write_tuning(view, run)
        return Tuned(view=view, plan=plan, plan_file=out, run=run, measured=result)

    def profile(self) -> Path:
        """The run to start from; a new one is recorded where none was named."""
        from costlab.app.store import new_run_directory, open_run

        if self.run is not None:
            return open_run(self.run).path
        assert self.spec is not None
        spec = msgspec.structs.replace(self.spec, plan="", fused=False, checkpoint=False)
        run_dir = new_run_directory(spec.workload, spec.size)
        self.tell(f"recording a run to profile: {run_dir.name}")
        launcher = self.launcher(spec, run_dir)
        self._current = launcher
        if self.cancelled:  # between two things that could be ended
            launcher.cancel()
        try:
            manifest = launcher.run(lambda _event: None)
        except LaunchError as error:
            raise TuneError(str(error)) from error
        finally:
            self._current = None
        if manifest.status != "complete":
            why = manifest.failure.message if manifest.failure else f"it is {manifest.status}"
            raise TuneError(f"the run to profile did not complete: {why}")
        return run_dir

    def spec_of(self, run: Path) -> RunSpec:
        """The options of the run, which are those of the legs too."""
        from costlab.app.store import Run

        try:
            spec = msgspec.convert(Run(run).manifest.spec, RunSpec)
        except msgspec.ValidationError as error:
            raise TuneError(f"the run's options cannot be repeated here: {str(error).partition(' - ')[0]}") from error
        if spec.fused or spec.plan:
            raise SpecError("the run has fused kernels already; tune one without --fused and --plan")
        if spec.nnodes > 1:
            raise SpecError("tuning runs on one host; the run has several")
        return msgspec.structs.replace(spec, preset=None)

    def scan(self, spec: RunSpec) -> Scan:
        """Look at the model in a process of its own."""
        with tempfile.TemporaryDirectory(prefix="costlab-tune-") as folder:
            asked, answer = Path(folder, "spec.json"), Path(folder, "scan.json")
            asked.write_bytes(msgspec.json.encode(spec))
            command = [sys.executable, "-m", "costlab.probes.tune", str(asked), str(answer)]
            try:
                done = ask(command, timeout_s=SCAN_TIMEOUT_S, cancelled=lambda: self.cancelled)
            except subprocess.TimeoutExpired:
                raise TuneError(f"looking at the model took more than {SCAN_TIMEOUT_S:.0f} s") from None
            except ChildCancelled:
                raise TuneError("cancelled while looking at the model: there is no plan yet") from None
            if done.returncode or not answer.is_file():
                raise TuneError(f"the model could not be looked at: {last_words(done)[:300]}")
            return msgspec.json.decode(answer.read_bytes(), type=Scan)

    def evidence(self, run: Path, report: RunReport, found: Scan, spec: RunSpec) -> Evidence:
        """The run's tables as the candidates need them."""
        from costlab.app.store import Run

        store = Run(run)
        ranks = sorted(store.rank_directories)[:1]
        table = store.table(MissRow.table, MissRow, tuple(ranks))
        misses = [msgspec.convert(_filled(row), MissRow) for row in table.to_dict("records")]
        facts = store.manifest.workload
        return Evidence(
            report=report,
            misses=misses,
            scan=found,
            hits=hit_rates(self.cache_rows(spec, found)),
            copy_gbps=facts.copy_gbps if facts else None,
        )

    def cache_rows(self, spec: RunSpec, found: Scan) -> list[CacheRow]:
        """L2 hit rates by ncu where that is allowed; [] with a note where they are estimated."""
        from costlab.probes.tune_l2 import CountersUnavailable, measure

        if self.l2 == "estimate" or found.unavailable:
            self.notes.append("L2 hit rates are estimated from sizes, not measured")
            return []
        self.tell("counting L2 hits of one replayed step with ncu")
        try:
            return measure(spec, NCU_TIMEOUT_S, lambda: self.cancelled)
        except CountersUnavailable as reason:
            if self.l2 == "ncu":
                raise TuneError(f"--l2 ncu: {reason}") from reason
            self.notes.append(f"L2 hit rates are estimated from sizes: {reason}")
            return []

    def untried(self, c: CandidateView, tried: list[CandidateView], why: str) -> CandidateView:
        """A candidate where nothing can be measured: kept for a machine where it can, if the policy chooses it."""
        if c.how == "none":
            return c
        if c.checked is False:
            return msgspec.structs.replace(c, decision="dropped", why=f"its numerics differ: {c.check}")
        if c in tried:
            return msgspec.structs.replace(c, decision="untried", why=why)
        return msgspec.structs.replace(c, decision="dropped", why="the policy does not choose it")

    def measure(
        self, spec: RunSpec, listed: list[CandidateView], tried: list[CandidateView], found: Scan, title: str
    ) -> tuple[WhatIfResult, RunReport | None]:
        """Alternate legs with and without; the result, and the report of the run with all candidates."""
        from costlab.app.analysis.build import build_report
        from costlab.app.store import Run
        from costlab.app.whatif.commands import ask
        from costlab.app.whatif.engine import WhatIf
        from costlab.app.whatif.narrate import WhatIfNarrator
        from costlab.app.whatif.store import new_whatif_directory

        directory = new_whatif_directory()
        names = [c.name for c in tried]
        groups = {} if self.together else {name: [name] for name in names}
        if self.together or len(names) > 1:
            groups[TOGETHER] = names
        plans: dict[str, Path] = {}
        for number, (name, members) in enumerate(groups.items()):
            path = directory / f"plan-{number:02d}.json"
            only = [msgspec.structs.replace(c, decision="untried") for c in listed if c.name in members]
            write(plan_of(only, found, title, self.policy, []), path)
            plans[name] = path
        first = ask(spec, [], [f"plan={next(iter(plans.values()))}"], legs=self.legs, budget_s=self.budget_s)
        variants = [Variant(name=n, options={"plan": str(path)}, factors=[n]) for n, path in plans.items()]
        whatif = WhatIfSpec(baseline=first.baseline, variants=variants, legs=self.legs, budget_s=self.budget_s)
        engine = WhatIf(whatif, directory, launcher=self.launcher)
        self._current = engine
        if self.cancelled:
            engine.cancel()
        narrator = WhatIfNarrator(sys.stderr, quiet=self.tell is not print and not sys.stderr.isatty())
        try:
            result = engine.run(narrator.tell)
        finally:
            narrator.close()
            self._current = None
        best = next((a for a in reversed(result.variants) if a.run), None)
        after = build_report(Run(directory / best.run)) if best is not None else None
        return result, after

    def view(
        self,
        listed: list[CandidateView],
        plan: Plan,
        out: Path,
        result: WhatIfResult | None,
        after: RunReport | None,
        evidence: Evidence,
    ) -> TuneView:
        """What the run keeps of the tuning."""
        whole = next((a for a in result.variants if a.name == TOGETHER), None) if result else None
        change = whole.change if whole else None
        return TuneView(
            created=plan.created,
            policy=self.policy,
            plan=out.name,
            whatif=result.id if result else "",
            unavailable=evidence.scan.unavailable,
            step_ms=evidence.step_ms,
            candidates=listed,
            layers=before_after(evidence.fusion, after.fusion if after else None),
            together=change.value if change else None,
            together_low=change.low if change else None,
            together_high=change.high if change else None,
            notes=list(self.notes),
        )


def check_plan_file(path: Path) -> None:
    """SpecError where no plan could be written, before minutes are spent on one."""
    try:
        folder = path.absolute().parent
        problem = "it is a folder" if path.is_dir() else "" if folder.is_dir() else "no such folder"
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem and not os.access(folder, os.W_OK):
        problem = "permission denied"
    if problem:
        raise SpecError(f"--out: cannot write {path}: {problem}")


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan file. Raises TuneError where the disk won't take it."""
    try:
        write(plan, path)
    except OSError as error:
        raise TuneError(f"cannot write {path}: {error.strerror or error}") from error


def _filled(row: dict[Any, Any]) -> dict[str, Any]:
    """A table's row without what is missing, as the struct's defaults have it."""
    known = {str(k): v for k, v in row.items() if not (v is None or (isinstance(v, float) and math.isnan(v)))}
    return {k: v.item() if hasattr(v, "item") else v for k, v in known.items()}

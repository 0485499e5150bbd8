"""From a run directory to its report: one module a section; a section that cannot be made is named in the notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from costlab.app.analysis import fusion_targets
from costlab.app.analysis.checkpoint import checkpoint_view
from costlab.app.analysis.compilation import compile_view
from costlab.app.analysis.cost import Plan, cost_view
from costlab.app.analysis.energy import energy_view
from costlab.app.analysis.frames import real, whole
from costlab.app.analysis.fusion import fusion_view
from costlab.app.analysis.info import run_info
from costlab.app.analysis.memory import memory_view
from costlab.app.analysis.patterns import pattern_views
from costlab.app.analysis.sources import longest
from costlab.app.analysis.steps import steps_view
from costlab.app.analysis.views import (
    CheckpointView,
    CollectivesView,
    CompileView,
    CostView,
    FusionView,
    RunReport,
    StepsView,
)
from costlab.app.analysis.waterfall import waterfall_view
from costlab.app.text import plain
from costlab.app.tune.stored import read_tuning
from costlab.probes import records as rec

if TYPE_CHECKING:
    import pandas as pd

    from costlab.app.store import Run

T = TypeVar("T")


def build_report(run: Run) -> RunReport:
    """Everything known about `run`, findings included. Reads its tables; raises nothing for what is missing in them."""
    return _Builder(run).report()


class _Builder:
    """The inputs of all sections; tables are read once by the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.spec = run.manifest.spec
        self.facts = run.manifest.workload or rec.WorkloadFacts()
        self.environment = run.manifest.environment or rec.Environment()
        self.ranks = run.manifest.ranks or len(run.rank_directories)

    def table(self, row: type[rec.Row], ranks: tuple[int, ...] | None = None) -> pd.DataFrame:
        return self.run.table(row.table, row, ranks)

    def section(self, name: str, make: Callable[[], T]) -> T | None:
        """`make()`; an error in it costs this section and is noted, since the other sections are still worth having."""
        try:
            return make()
        except Exception as error:
            self.run.note(f"{name}: could not be analysed ({type(error).__name__}: {plain(error, 160)})")
            return None

    def report(self) -> RunReport:
        from costlab.app.diagnosis import diagnose

        steps = self.section("steps", self.steps)
        collectives = self.section("collectives", self.collectives)
        checkpoint = self.section("checkpoint", self.checkpoint)
        report = RunReport(
            run=run_info(self.run.manifest, self.run.status, ()),
            environment=self.environment,
            steps=steps,
            waterfall=self.section(
                "waterfall", lambda: waterfall_view(self.table(rec.PartRow), steps, collectives, checkpoint)
            ),
            fusion=self.section("fusion", self.fusion),
            collectives=collectives,
            checkpoint=checkpoint,
            compile=self.section("compile", lambda: self.compilation(steps)),
            memory=self.section("memory", lambda: memory_view(self.table(rec.MemoryRow))),
            energy=self.section("energy", lambda: energy_view(self.table(rec.PowerRow), self.ranks)),
            cost=self.section("cost", lambda: self.cost(steps, checkpoint)),
        )
        if report.fusion is not None:
            report = msgspec.structs.replace(report, fusion=fusion_targets.priced(report.fusion, report.cost))
        findings = self.section("findings", lambda: diagnose(report, self.run.note)) or []
        info = run_info(self.run.manifest, self.run.status, self.run.notes)
        return msgspec.structs.replace(report, run=info, findings=findings)

    def steps(self) -> StepsView | None:
        return steps_view(self.table(rec.StepRow), self.facts, self.ranks)

    def collectives(self) -> CollectivesView | None:
        from costlab.app.analysis.clocks import EXTRA, clock_doubts, clock_sentence
        from costlab.app.analysis.collectives import collectives_view
        from costlab.app.analysis.schedules import HOOKED, schedules
        from costlab.probes.schedule_choice import EXTRA as SCHEDULES

        profiled = self.table(rec.PartRow)
        rows = self.table(rec.CollectiveRow)
        chosen, how = schedules(self.run.manifest.extra.get(SCHEDULES))
        if rows.empty and profiled.empty and not chosen:
            return None
        clocks = clock_doubts(self.run.manifest.extra.get(EXTRA))
        view = collectives_view(
            rows,
            expected_bytes=self.facts.expected_comm_bytes,
            formula=self.facts.expected_comm_formula,
            steps=int(profiled.step.nunique() if len(profiled) else rows.step.nunique()),
            clock_uncertainty_us={c.rank: c.uncertainty_us for c in clocks} or None,
        )
        view = msgspec.structs.replace(view, schedules=chosen, schedules_how=how)
        if self.spec.get("schedule", "stock") != "stock" and not any(row.schedule for row in view.rows):
            view = msgspec.structs.replace(view, note="; ".join(filter(None, (view.note, HOOKED))))
        if not view.rows:
            return view
        view = msgspec.structs.replace(view, clock=clock_sentence(clocks))
        return self.section("links", lambda: self.on_links(view)) or view

    def on_links(self, view: CollectivesView) -> CollectivesView:
        """The collectives with their ideal time on this machine's graph, and the curves that they lie on."""
        from costlab.app.store import home
        from costlab.app.topology.of_run import on_machine, read_links

        links, env = read_links(self.run.path), self.environment
        hosts = whole(self.spec.get("nnodes")) or 1
        return on_machine(view, links, self.run.path, home(), cpu=env.device == "cpu", hosts=hosts)

    def fusion(self) -> FusionView | None:
        """Of the lowest rank that has spans: all ranks compile the same model, and reading all would cost memory."""
        ranks = sorted(self.run.rank_directories)
        first = next((r for r in ranks if (self.run.rank_directories[r] / "spans.parquet").is_file()), None)
        chosen = (first,) if first is not None else tuple(ranks[:1])
        note = f"read from rank {chosen[0]}" if chosen and self.ranks > 1 else ""
        with fusion_targets.using(fusion_targets.active()):  # read once, not for every layer
            view = fusion_view(
                self.table(rec.SpanRow, chosen),
                self.table(rec.MissRow, chosen),
                self.table(rec.KernelRow, chosen),
                self.facts,
            )
        if view is None:
            return None
        patterns = pattern_views(self.table(rec.PatternRow, chosen), self.facts.copy_gbps, view.kernels, view.layers)
        tuning = self.section("tuning", lambda: read_tuning(self.run.path))
        sources = self.section("sources", lambda: longest(self.run, view.kernels)) or []
        words = "; ".join(n for n in (view.note, note, fusion_targets.active().problem) if n)
        return msgspec.structs.replace(view, patterns=patterns, sources=sources, tuning=tuning, note=words)

    def checkpoint(self) -> CheckpointView | None:
        return checkpoint_view(
            self.table(rec.CheckpointRow),
            whole(self.spec.get("checkpoint_every")) or 0,
            str(self.spec.get("checkpoint_codec") or "dcp"),
            self.table(rec.CheckpointStageRow),
            self.table(rec.CheckpointCodecRow),
            self.table(rec.ResumeRow),
        )

    def compilation(self, steps: StepsView | None) -> CompileView | None:
        return compile_view(
            self.table(rec.CompileRow),
            self.table(rec.MemoryRow),
            steps.step_ms.value if steps else None,
            whole(self.spec.get("run_steps")) or 0,
            None if "compile" not in self.spec else self.spec["compile"] != "none",
        )

    def cost(self, steps: StepsView | None, checkpoint: CheckpointView | None) -> CostView:
        plan = Plan(
            price=real(self.spec.get("price_per_gpu_hour")),
            price_note=str(self.spec.get("price_note") or ""),
            run_steps=whole(self.spec.get("run_steps")) or 0,
        )
        return cost_view(self.environment, self.facts, self.ranks, steps, checkpoint, plan)

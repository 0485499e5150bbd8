"""The report of a run as a document: what was run, on what, what it cost, where that went, and what to change."""

from __future__ import annotations

from collections.abc import Callable

from costlab.app.analysis.views import Figure, RunReport
from costlab.app.figures import (
    MISSING,
    brief,
    count,
    counted,
    figure,
    footnote,
    fused_kernels,
    interval,
    ms,
    seconds,
    share,
    size,
)
from costlab.app.report.checkpoint import write_checkpoint
from costlab.app.report.document import Bar, Bars, Code, Document, Log, sentence
from costlab.app.report.findings import write_findings
from costlab.app.report.fusion import write_fusion
from costlab.app.report.systems import write_collectives, write_compile, write_memory


def build_document(report: RunReport) -> Document:
    """All sections; one that the run does not have says so."""
    doc = Document()
    _write_title(doc, report)
    _write_headline(doc, report)
    sections: list[Callable[[Document, RunReport], None]] = [
        _write_waterfall,
        write_findings,
        write_fusion,
        write_collectives,
        write_checkpoint,
        write_compile,
        write_memory,
        _write_energy,
        _write_cost,
        _write_run,
        _write_environment,
        _write_missing,
        _write_sources,
    ]
    for write in sections:
        write(doc, report)
    return doc


def _write_title(doc: Document, report: RunReport) -> None:
    run = report.run
    doc.heading(run.title or run.id, 1)
    took = f", took {seconds(run.duration_s)}" if run.duration_s is not None else ""
    when = f"{run.created[:16].replace('T', ' ')} UTC" if run.created else "date unknown"
    doc.say("costlab run ", Code(run.id), f", {when}: {run.status}{took}.")
    doc.say(sentence(_setting(report)))
    if run.fused:
        doc.say(sentence(f"{counted(sum(run.fused.values()), 'fused kernel')} put in: {fused_kernels(run.fused)}"))
    if run.failure:
        doc.say(f"It ended early: {run.failure}.", f" What to try: {run.failure_advice}." if run.failure_advice else "")
        if run.log_tail:
            inner = Document([Log(run.log_tail)])
            doc.details("Last log lines", inner)


def _setting(report: RunReport) -> str:
    """What ran on what, in one sentence."""
    run, env = report.run, report.environment
    each = run.units_per_step // run.ranks if run.ranks else 0
    parts = [
        f"{count(run.parameters)} parameters" if run.parameters else "",
        f"{count(each)} {run.unit} a rank and step" if each else "",
        f"{run.spec['optimizer']} optimizer" if "optimizer" in run.spec else "",
        f"torch {env.torch}" if env.torch else "",
        _sample(report),
    ]
    return ", ".join(p for p in parts if p)


def _sample(report: RunReport) -> str:
    steps = report.steps
    if steps is None or not steps.step_ms.n:
        return ""
    return (
        f"{count(steps.step_ms.n)} {'profiled' if steps.profiled_only else 'timed'} step{'s' * (steps.step_ms.n > 1)}"
    )


def headline(report: RunReport) -> list[tuple[str, Figure]]:
    """The figures that sum a run up, those that were had."""
    steps, memory, energy, cost = report.steps, report.memory, report.energy, report.cost
    wanted = [
        ("step time", steps.step_ms if steps else None),
        ("throughput", steps.throughput if steps else None),
        ("MFU", steps.mfu if steps else None),
        ("peak memory", memory.peak if memory else None),
        ("fusion rate", report.fusion.rate if report.fusion else None),
        ("energy per step", energy.per_step if energy else None),
        ("cost per 1 M " + report.run.unit, cost.per_million if cost else None),
        (f"cost of {cost.run_steps:,} steps" if cost else "", cost.per_run if cost else None),
    ]
    return [(name, item) for name, item in wanted if item is not None and item.value is not None]


def origin(item: Figure) -> str:
    """ "measured, n=20" """
    return item.source + ("" if item.n is None else f", n={item.n}")


def _write_headline(doc: Document, report: RunReport) -> None:
    doc.heading("In short")
    rows = [[name, brief(item), interval(item), origin(item)] for name, item in headline(report)]
    if not rows:
        doc.say("No step was measured.")
    doc.table(["figure", "value", "95 % interval", "origin"], rows, right=(1, 2), drop=(2,))
    steps = report.steps
    if steps and steps.profiled_ms and steps.step_ms.value and not steps.profiled_only:
        off = steps.profiled_ms / steps.step_ms.value - 1
        doc.say(
            f"Step times come from unprofiled steps. The profiled steps took {ms(steps.profiled_ms)}, "
            f"{share(abs(off))} {'more' if off > 0 else 'less'}, and are never taken for step times."
        )


def _write_waterfall(doc: Document, report: RunReport) -> None:
    doc.heading("Where a step goes")
    view = report.waterfall
    if view is None:
        doc.say("Not measured: it needs timed and profiled steps.")
        return
    largest = max((p.share for p in view.parts), default=0.0) or 1.0
    shown = [p for p in view.parts if p.ms > 0]
    bars = [Bar(p.name, f"{ms(p.ms)} {share(p.share):>6}", p.share / largest, p.note) for p in shown]
    doc.blocks.append(Bars(bars, f"{ms(view.step_ms)} {share(1.0):>6}"))
    none = [p.name for p in view.parts if p.ms <= 0]
    doc.say(f"Measured as zero: {', '.join(none)}." if none else "")
    spread = f" Ranks differ by {ms(view.rank_spread_ms)} in their median step." if view.rank_spread_ms else ""
    sample = f"{view.profiled_steps} profiled step{'s' * (view.profiled_steps > 1)}"
    doc.say(f"Parts sum to the step. From {sample}; {view.method}.{spread}")


def _write_energy(doc: Document, report: RunReport) -> None:
    doc.heading("Energy")
    view = report.energy
    if view is None or view.per_step is None:
        doc.say(sentence(view.note if view and view.note else "not measured"))
        return
    units = report.run.units_per_step
    per_million = (view.per_step.value or 0.0) * 1e6 / units if units else None
    rows = [["per step", figure(view.per_step), origin(view.per_step)]]
    if per_million is not None:
        rows.append([f"per 1 M {report.run.unit}", f"{count(per_million)} J", "derived"])
    if view.average_w is not None:
        rows.append(["average power", figure(view.average_w), origin(view.average_w)])
    doc.table(["energy", "value", "origin"], rows, right=(1,))
    doc.say(sentence(view.note))


def _write_cost(doc: Document, report: RunReport) -> None:
    doc.heading("Cost")
    view = report.cost
    if view is None or view.price_per_gpu_hour is None:
        doc.say(sentence(view.note if view and view.note else "no price is known"))
        return
    named = [
        ("price", view.price_per_gpu_hour),
        ("a step", view.per_step),
        (f"1 M {report.run.unit}", view.per_million),
        (f"{view.run_steps:,} steps", view.per_run),
    ]
    rows = [[name, brief(item), interval(item), origin(item)] for name, item in named if item is not None]
    doc.table(["cost", "value", "95 % interval", "origin"], rows, right=(1, 2), drop=(2,))
    doc.say(sentence(view.price_per_gpu_hour.how), " ", sentence(view.note))


def _write_run(doc: Document, report: RunReport) -> None:
    run = report.run
    doc.heading("What was run")
    rows: list[tuple[str, str]] = [
        ("workload", f"{run.workload} {run.size}".strip()),
        ("parameters", count(run.parameters) if run.parameters else MISSING),
        ("ranks", str(run.ranks or MISSING)),
        ("parallelism", run.parallel or MISSING),
        ("compile", run.compile or MISSING),
        ("precision", run.dtype or MISSING),
        (f"{run.unit} a step, all ranks", count(run.units_per_step) if run.units_per_step else MISSING),
    ]
    for key in ("batch", "seq", "optimizer", "recompute", "compile_mode", "cudagraphs", "autocast", "steps", "seed"):
        if key in run.spec:
            rows.append((key.replace("_", " "), str(run.spec[key])))
    doc.table(["option", "value"], [[k, Code(v)] for k, v in rows], wide=1)


def _write_environment(doc: Document, report: RunReport) -> None:
    env = report.environment
    doc.heading("On what")
    gpus = sorted({g.name for g in env.gpus})
    memory = next((g.memory_bytes for g in env.gpus if g.memory_bytes), None)
    rows = [
        ("GPUs", f"{len(env.gpus)} x {' / '.join(gpus)}" if env.gpus else "none"),
        ("memory of one GPU", size(memory) if memory else ""),
        ("CPU", f"{env.cpu}, {env.cpu_count} logical cores" if env.cpu else ""),
        ("host memory", size(env.memory_bytes) if env.memory_bytes else ""),
        ("platform", env.platform),
        ("backend", env.backend),
    ]
    rows += [(k, str(getattr(env, k) or "")) for k in ("torch", "triton", "cuda", "cudnn", "nccl", "driver", "python")]
    rows += [("costlab", env.costlab), ("code revision", env.git or "")]
    doc.table(["", ""], [[k, v] for k, v in rows if v], wide=1)


def _write_missing(doc: Document, report: RunReport) -> None:
    doc.heading("What is missing")
    notes = list(report.run.notes)
    names = ("steps", "waterfall", "fusion", "collectives", "checkpoint", "compile", "memory", "energy", "cost")
    notes += [f"no {name} section: nothing was recorded for it" for name in names if getattr(report, name) is None]
    if not notes:
        doc.say("Nothing that this kind of run can measure.")
    doc.items([[note] for note in notes])


def _write_sources(doc: Document, report: RunReport) -> None:
    """Where every figure comes from, in words."""
    doc.heading("How the figures were obtained")
    doc.say(
        "Measured: read from a clock or counter in this run. Derived: arithmetic on measured figures. Modelled: what a "
        "change should bring, by the rule named beside it. Quoted: from a list, not from this run."
    )
    doc.items([[f"{name}: {footnote(item)}."] for name, item in sources(report)])


def sources(report: RunReport) -> list[tuple[str, Figure]]:
    """Every figure of the report with its name."""
    steps, compiled, comm = report.steps, report.compile, report.collectives
    more: list[tuple[str, Figure | None]] = [
        ("matrix peak", steps.peak_tflops if steps else None),
        ("copy bandwidth", steps.copy_gbps if steps else None),
        ("trace quality", report.fusion.quality if report.fusion else None),
        ("communicated bytes", comm.bytes_per_step if comm else None),
        ("expected bytes", comm.expected_bytes if comm else None),
        ("cold compile", compiled.cold_s if compiled else None),
        ("warm compile", compiled.warm_s if compiled else None),
        ("host memory while compiling", compiled.peak_host_bytes if compiled else None),
        ("device memory while compiling", compiled.peak_device_bytes if compiled else None),
        ("free device memory", report.memory.headroom if report.memory else None),
        ("average power", report.energy.average_w if report.energy else None),
        ("price", report.cost.price_per_gpu_hour if report.cost else None),
    ]
    lines = report.checkpoint.lines if report.checkpoint else []
    more += [(f"stall of {c.mode}", c.stall) for c in lines]
    return headline(report) + [(n, f) for n, f in more if f is not None and f.value is not None]

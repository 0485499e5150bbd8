"""The shape report as text, Markdown and JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from costlab.app.figures import MISSING, ms, seconds, share, size
from costlab.app.report.document import Cell, Code, Document, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.app.shapes.strategy import Advice, StrategyRow, advise, strategies
from costlab.probes.shapes_spec import PathResult, ShapesResult

TITLES = {"static": "static specialisation", "mark_dynamic": "mark_dynamic", "eager": "eager"}
RECOMPILES = 12


def render_shapes(result: ShapesResult, form: str, steps: int, width: int = 100) -> str:
    """`form` is text, md or json; `steps` is the length of the run that compiles are spread over."""
    advice = advise(result, steps)
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(_plain(result, advice)), indent=2).decode() + "\n"
    doc = _document(result, advice)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def _plain(result: ShapesResult, advice: Advice) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(result)
    for path, plain_path in zip(result.paths, data["paths"], strict=True):
        plain_path["step_ms"] = path.step_ms
    return {**data, "strategies": msgspec.to_builtins(strategies(result)), "advice": msgspec.to_builtins(advice)}


def _document(result: ShapesResult, advice: Advice) -> Document:
    doc = Document()
    spec = result.spec
    doc.heading(f"Shapes of {result.title}: {len(result.shapes)} seen, {spec.dtype}, {result.device}", 1)
    doc.say(
        f"One rank, unsharded, compiled per {spec.compile}, torch {result.torch}. A step is forward, backward and"
        f" AdamW; times are medians of {spec.steps} steps; a compile is what a shape's first step takes longer."
    )
    _write_costs(doc, result)
    _write_recompiles(doc, result)
    _write_strategies(doc, strategies(result))
    _write_advice(doc, advice)
    doc.items([[sentence(note)] for note in [*result.notes, *_remarks(result)]])
    return doc


def _write_costs(doc: Document, result: ShapesResult) -> None:
    doc.heading("Cost of each shape")
    by_path = {p.path: {(s.batch, s.seq): s for s in p.shapes} for p in result.paths}
    headers = ["shape", "seen"]
    for path in result.paths:
        headers += [f"{path.path.replace('_', ' ')} ms"] + (["compile"] if path.path != "eager" else [])
    rows: list[list[Cell]] = []
    for shape in result.shapes:
        cells: list[Cell] = [f"{shape.batch} x {shape.seq}" if shape.seq else str(shape.batch), str(shape.count)]
        for path in result.paths:
            cost = by_path[path.path].get((shape.batch, shape.seq))
            cells.append(ms(cost.step_ms) if cost else MISSING)
            if path.path != "eager":
                cells.append(seconds(cost.compile_s) if cost else MISSING)
        rows.append(cells)
    rows.append(["weighted", str(sum(s.count for s in result.shapes)), *_sums(result)])
    doc.table(headers, rows, right=tuple(range(1, len(headers))))


def _sums(result: ShapesResult) -> list[Cell]:
    cells: list[Cell] = []
    for path in result.paths:
        cells.append(ms(path.step_ms))
        if path.path != "eager":
            cells.append(seconds(sum(s.compile_s for s in path.shapes)))
    return cells


def _write_recompiles(doc: Document, result: ShapesResult) -> None:
    doc.heading("Compiles and recompiles")
    rows: list[list[Cell]] = [
        [TITLES[p.path], str(p.graphs), str(len(p.recompiles)), _entries(p), seconds(p.compile_s), p.problem or "ok"]
        for p in result.paths
        if p.path != "eager"
    ]
    doc.table(["path", "graphs", "recompiles", "cache entries", "compile", "ended"], rows, right=(1, 2, 3, 4), wide=5)
    failed: list[list[Cell]] = [
        [TITLES[p.path], r.shape, r.guard, Code(r.source) if r.source else "", seconds(r.seconds)]
        for p in result.paths
        for r in p.recompiles
    ]
    headers = ["path", "at shape", "failed guard", "where", "compile"]
    doc.table(headers, failed[:RECOMPILES], right=(4,), wide=2, drop=(3,))
    if len(failed) > RECOMPILES:
        doc.say(f"{len(failed) - RECOMPILES} more are in the JSON report.")


def _entries(path: PathResult) -> str:
    return MISSING if path.cache_entries is None else str(path.cache_entries)


def _write_strategies(doc: Document, rows: list[StrategyRow]) -> None:
    doc.heading("Strategies: claimed and measured")
    cells: list[list[Cell]] = [
        [
            f"{r.claim.strategy} ({r.claim.path.replace('_', ' ')})",
            r.claim.latency,
            f"{ms(r.step_ms)}, {r.of_fastest:.2f} x" if r.of_fastest is not None else MISSING,
            r.claim.memory,
            size(r.peak_bytes),
            {True: "yes", False: "no", None: "not told apart"}[r.holds],
        ]
        for r in rows
    ]
    headers = ["strategy", "claimed latency", "measured", "claimed memory", "peak", "claim holds"]
    doc.table(headers, cells, right=(2, 4), drop=(4, 3))


def _write_advice(doc: Document, advice: Advice) -> None:
    doc.heading(f"Over {advice.steps:,} steps")
    if not advice.plans:
        doc.say("No path ran all shapes: there is nothing to recommend.")
        return
    rows: list[list[Cell]] = [[p.name, ms(p.step_ms), seconds(p.compile_s), seconds(p.total_s)] for p in advice.plans]
    doc.table(["plan", "mean step", "compiles", "whole run"], rows, right=(1, 2, 3))
    best = advice.plans[0]
    buckets = advice.bucketing
    doc.say(f"Cheapest: {best.name}.")
    if buckets is not None:
        listed = ", ".join(f"{b.batch} x {b.seq}" if b.seq else str(b.batch) for b in buckets.buckets)
        how = "no other choice among the seen shapes is cheaper" if buckets.exact else "found by dropping one by one"
        doc.say(
            f"Recommended buckets: {listed} ({share(buckets.padding)} of the computed tokens are padding; {how})."
            " Padded tokens must not count in the loss or the attention."
        )


def _remarks(result: ShapesResult) -> list[str]:
    remarks = []
    if len(result.shapes) > result.recompile_limit:
        remarks.append(
            f"{len(result.shapes)} shapes are more than torch's recompile limit of {result.recompile_limit}: outside"
            " this measurement, which raises it, later shapes would run eagerly"
        )
    if result.device == "cpu":
        remarks.append("peak memory is measured on GPUs only")
    return remarks

"""Fusion as a section: by class, by layer, missed fusions, slowest kernels."""

from __future__ import annotations

from costlab.app.analysis.layers import strip_index
from costlab.app.analysis.views import FusionView, KernelView, LayerRow, MissView, RunReport
from costlab.app.diagnosis.fusion import between
from costlab.app.figures import MISSING, count, figure, money, ms, rate, share, size, times
from costlab.app.report.document import Cell, Code, Document, Log, sentence
from costlab.probes.records import FusionStatus

STATUS: dict[FusionStatus, str] = {
    "complete": "● complete",
    "partial": "◐ partial",
    "broken": "○ broken",
    "unknown": "? unknown",
}
LAYERS, MISSES, KERNELS = 24, 8, 20  # rows before the rest is folded
MOST_LAYERS, MOST_ROWS = 400, 100
SOURCES, SOURCE_LINES = 5, 120  # so that the report still fits in an issue
LANGUAGES = {"triton": "python", "cpp": "cpp"}


def write_fusion(doc: Document, report: RunReport) -> None:
    """The section; says so where there is no trace."""
    doc.heading("Fusion")
    view = report.fusion
    if view is None:
        doc.say("Not measured: no fusion trace and no profiled kernels.")
        return
    parts = [
        f"rate {figure(view.rate)}" if view.rate else "",
        f"{rate(view.strict_rate)} with structural losses" if view.strict_rate is not None else "",
        f"target {rate(view.target)}" if view.target is not None else "",
        f"trace quality {figure(view.quality)}" if view.quality else "",
    ]
    doc.say(f"{STATUS[view.status]}. {sentence(', '.join(p for p in parts if p))} {sentence(view.note)}".strip())
    _write_classes(doc, view, report.cost.currency if report.cost else "USD")
    _write_layers(doc, view)
    _write_misses(doc, view)
    _write_patterns(doc, view)
    if view.tuning is not None:
        from costlab.app.tune.render import write_candidates

        doc.heading("Profile-guided fusion", 3)
        write_candidates(doc, view.tuning)
    _write_kernels(doc, view)
    _write_sources(doc, view)


def _write_classes(doc: Document, view: FusionView, currency: str) -> None:
    rows: list[list[Cell]] = [
        [c.layer_class or "(none)", str(c.layers), STATUS[c.status], rate(c.rate), rate(c.target), ms(c.ms),
         size(c.bytes), size(c.lost), ms(c.saves_ms), ms(c.gap_ms),
         MISSING if c.gap_run_money is None else money(c.gap_run_money, currency)]
        for c in view.classes
    ]  # fmt: skip
    headers = ["layer class", "layers", "status", "rate", "target", "time", "bytes", "lost", "saves", "gap", "gap, run"]
    doc.table(headers, rows, right=(1, 3, 4, 5, 6, 7, 8, 9, 10), drop=(6, 1, 8, 10, 9))
    if view.classes:
        doc.say("gap: time a step that reaching the target would save, modelled at the measured copy bandwidth.")


def _write_layers(doc: Document, view: FusionView) -> None:
    if not view.layers:
        return
    doc.heading("By layer", 3)
    shown = [r for r in view.layers if r.depth <= 2][:LAYERS]
    doc.table(LAYER_HEADERS, [_layer(r) for r in shown], right=(2, 3, 4, 5, 6), wide=0, drop=(3, 5))
    if len(shown) < len(view.layers):
        inner = Document()
        inner.table(LAYER_HEADERS, [_layer(r) for r in view.layers[:MOST_LAYERS]], right=(2, 3, 4, 5, 6), wide=0)
        _more(inner, len(view.layers), MOST_LAYERS)
        doc.details(f"All {len(view.layers)} layers", inner)


PATTERNS = 12
LAYER_HEADERS = ["layer", "status", "rate", "target", "time", "lost", "saves", "main cause"]


def _layer(row: LayerRow) -> list[Cell]:
    indent = "\u2003" * row.depth
    cause = row.main_cause.replace("_", " ")
    return [f"{indent}{row.label}", STATUS[row.status], rate(row.rate), rate(row.target), ms(row.ms), size(row.lost),
            ms(row.saves_ms), cause]  # fmt: skip


def _write_patterns(doc: Document, view: FusionView) -> None:
    if not view.patterns:
        return
    doc.heading("Anti-patterns in the model", 3)
    shown = view.patterns[:PATTERNS]
    rows: list[list[Cell]] = [
        [p.layer or "model", p.text, f"{ms(p.cost_ms)} {p.cost_kind}".strip(), size(p.bytes or None), p.source, p.mend]
        for p in shown
    ]
    headers = ["layer", "what", "cost a step", "bytes a call", "where", "mend"]
    doc.table(headers, rows, right=(2, 3), wide=1, drop=(5, 3))
    _more(doc, len(view.patterns), PATTERNS)


def _write_misses(doc: Document, view: FusionView) -> None:
    can = [m for m in view.misses if m.addressable]
    if not view.misses:
        return
    doc.heading("Missed fusions", 3)
    structural = sum(m.bytes for m in view.misses if not m.addressable)
    doc.say(
        f"{len(can)} that a change of the model, its layout or a setting would bring; "
        f"{size(structural)} a step are structural (a matrix product, a collective or a reduction lies between)."
    )
    headers = ["layer", "between", "cause", "times", "bytes", "saves", "where"]
    doc.table(headers, [_miss(m) for m in can[:MISSES]], right=(3, 4, 5), wide=2, drop=(3, 4, 1))
    rest = [m for m in view.misses if m not in can[:MISSES]]
    inner = Document()
    inner.table(headers, [_miss(m) for m in rest[:MOST_ROWS]], right=(3, 4, 5), wide=2)
    _more(inner, len(rest), MOST_ROWS)
    doc.details(f"{len(rest)} more", inner)
    told = [m for m in can[:MISSES] if m.reason]
    reasons = Document()
    reasons.items([[f"{m.layer or 'model'}, {between(m)}: ", Code(m.reason)] for m in told])
    doc.details("The compiler's own reasons", reasons)


def _miss(m: MissView) -> list[Cell]:
    pair = between(m)
    where = " → ".join(dict.fromkeys(p for p in (m.producer_source, m.consumer_source) if p))
    return [m.layer or "model", pair, m.cause_text or m.cause, count(m.count), size(m.bytes),
            ms(m.saves_ms) if m.addressable else "structural", Code(where)]  # fmt: skip


def _write_kernels(doc: Document, view: FusionView) -> None:
    groups: dict[tuple[str, str, str], list[KernelView]] = {}
    for k in view.kernels:
        groups.setdefault((k.name, strip_index(k.layer), k.phase), []).append(k)
    longest = sorted(groups.items(), key=lambda g: -sum(k.ms for k in g[1]))[:KERNELS]
    inner = Document()
    headers = ["kernel", "layer", "phase", "calls", "time", "bytes", "of copy", "status"]
    inner.table(headers, [_kernel(layer, ks) for (_, layer, _), ks in longest], right=(3, 4, 5, 6), wide=0)
    inner.say(f"{len(groups) - KERNELS:,} more are in the JSON report." if len(groups) > KERNELS else "")
    doc.details(f"The {len(longest)} longest kernels, alike layers together", inner)


def _write_sources(doc: Document, view: FusionView) -> None:
    inner = Document()
    for one in view.sources[:SOURCES]:
        lines = [row.expandtabs(4) for row in one.source.splitlines()]
        rest = len(lines) - SOURCE_LINES
        cut = (
            f"; {rest:,} more lines are in the JSON report" if rest > 0 else "; the end was not kept" if one.cut else ""
        )
        alike = f"; the newest of {one.variants} kernels of that name" if one.variants > 1 else ""
        inner.say(Code(one.name), f", {one.phase}, {ms(one.ms)} a step{alike}{cut}:")
        inner.blocks.append(Log(lines[:SOURCE_LINES], LANGUAGES.get(one.language, "text")))
    _more(inner, len(view.sources), SOURCES)
    doc.details(f"Generated code of the {len(view.sources[:SOURCES])} longest kernels that have one", inner)


def _kernel(layer: str, alike: list[KernelView]) -> list[Cell]:
    k, moved = alike[0], [a.bytes for a in alike if a.bytes is not None]
    known = [a.of_copy for a in alike if a.of_copy is not None]
    status = STATUS[k.status] if k.category not in ("communication", "copy") else ""
    calls, took = sum(a.calls for a in alike), sum(a.ms for a in alike)
    reached = share(sum(known) / len(known)) if known else MISSING
    moves = size(sum(moved)) if moved else MISSING
    return [Code(k.name), layer or "model", k.phase, times(calls), ms(took), moves, reached, status]


def _more(doc: Document, have: int, shown: int) -> None:
    if have > shown:
        doc.say(f"{have - shown:,} more are in the JSON report.")

"""The comparison of two runs, as a document and in every form."""

from __future__ import annotations

import msgspec

from costlab.app.analysis.compare import Change, CollectiveChange, Comparison, LayerChange, Verdict
from costlab.app.figures import MISSING, ms, rate, share, size, value
from costlab.app.report.document import Cell, Code, Document, sentence
from costlab.app.report.fusion import STATUS
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text

VERDICT: dict[Verdict, str] = {"better": "● better", "worse": "○ worse", "same": "= same", "unknown": ""}
LAYERS = 20


def render_comparison(comparison: Comparison, form: str, width: int = 80) -> str:
    """The comparison as "md", "text" (for `width` columns) or "json"; ends with a line feed."""
    if form == "json":
        return render_comparison_json(comparison).decode()
    return render_comparison_markdown(comparison) if form == "md" else render_comparison_text(comparison, width)


def render_comparison_markdown(comparison: Comparison) -> str:
    """Two runs beside each other; ends with a line feed."""
    return to_markdown(build_comparison(comparison))


def render_comparison_text(comparison: Comparison, width: int = 80) -> str:
    """Two runs beside each other for a terminal of `width` columns."""
    return to_text(build_comparison(comparison), width)


def render_comparison_json(comparison: Comparison) -> bytes:
    """The comparison as UTF-8 JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n"


def build_comparison(c: Comparison) -> Document:
    """Verdict first, then what cannot be compared, then parts, figures, memory, layers and collectives."""
    doc = Document()
    doc.heading("Two runs compared", 1)
    doc.table(
        ["", "run", "what", "status"],
        [["A", Code(c.a.id), c.a.title, c.a.status], ["B", Code(c.b.id), c.b.title, c.b.status]],
        wide=2,
    )
    doc.say(verdict(c))
    doc.items([[m] for m in c.moved])
    _write_mismatches(doc, c)
    _write_changes(doc, "Where the step changed", c.parts, of_total=True)
    _write_changes(doc, "Figures", c.headline)
    _write_changes(doc, "Memory", c.memory)
    _write_layers(doc, c.layers)
    _write_collectives(doc, c.collectives)
    doc.say(sentence(c.note))
    return doc


ONE_EACH = "That is of these two runs; two of the same would differ too, by how much `costlab whatif` measures."


def verdict(c: Comparison) -> str:
    """The answer in a sentence."""
    step = c.step
    if step is None or step.change is None or step.a is None or step.b is None:
        return "Step times cannot be compared: one of the runs has none."
    between = f"A {ms(step.a)}, B {ms(step.b)}"
    limits = ", too few steps for an interval"
    if step.low is not None and step.high is not None:
        limits = f", 95 % interval [{signed(step.low, 'ms')}, {signed(step.high, 'ms')}]"
    if step.verdict == "same":
        return f"No difference in step time that the noise allows to see: {between}{limits}."
    faster = "faster" if step.change < 0 else "slower"
    off = "" if c.comparable else " The runs are not comparable, see below."
    return (
        f"B's step is {share(abs(step.ratio or 0.0))} {faster}: {between} ({signed(step.change, 'ms')}{limits})."
        f" {ONE_EACH}{off}"
    )


def signed(amount: float | None, unit: str) -> str:
    """A change with its sign: +1.20 ms, -3.0 %."""
    if amount is None:
        return MISSING
    return f"{'+' if amount > 0 else '-' if amount < 0 else '±'}{value(abs(amount), unit)}".rstrip()


def _write_mismatches(doc: Document, c: Comparison) -> None:
    if c.mismatches:
        doc.heading("Not comparable")
        doc.table(
            ["what", "A", "B", "so"], [[m.what, m.a or MISSING, m.b or MISSING, m.effect] for m in c.mismatches], wide=3
        )
    if c.options:
        doc.heading("Options that differ")
        rows: list[list[Cell]] = [[Code(m.what), m.a or MISSING, m.b or MISSING] for m in c.options]
        doc.table(["option", "A", "B"], rows, wide=1)


def _write_changes(doc: Document, title: str, changes: list[Change], *, of_total: bool = False) -> None:
    if not changes:
        return
    doc.heading(title)
    headers = ["", "A", "B", "change", "relative", *(["of the change"] if of_total else []), "verdict"]
    rows: list[list[Cell]] = []
    for c in (c for c in changes if c.a or c.b):
        unit = c.unit.partition(" per ")[0]
        change = signed(c.change * 100, "points") if unit == "fraction" and c.change is not None else None
        change = signed(c.change, "") if unit == "rate" else change or signed(c.change, unit)
        row: list[Cell] = [c.name, value(c.a, unit), value(c.b, unit), change]
        row.append(signed(c.ratio, "fraction"))
        if of_total:
            row.append(share(c.of_total))
        rows.append([*row, VERDICT[c.verdict]])
    doc.table(headers, rows, right=range(1, 6 if of_total else 5), drop=(4,))


def _write_layers(doc: Document, layers: list[LayerChange]) -> None:
    moved = sorted((r for r in layers if _differs(r)), key=lambda r: -abs(r.change_ms or 0.0))
    if not moved:
        return
    doc.heading("Layers that changed")
    headers = ["layer", "status A", "status B", "rate A", "rate B", "time A", "time B", "change", "of the change"]
    rows = [_layer(r) for r in moved[:LAYERS]]
    doc.table(headers, rows, right=range(3, 9), drop=(1, 3, 8, 4))
    if len(moved) > LAYERS:
        doc.say(f"{len(moved) - LAYERS} more are in the JSON form.")


def _differs(r: LayerChange) -> bool:
    """Time that moved by more than 0.5 %, or a verdict that both runs have and that differs."""
    moved = r.change_ms is not None and abs(r.change_ms) > 0.005 * max(r.ms_a or 0.0, r.ms_b or 0.0)
    judged = None not in (r.status_a, r.status_b) and "unknown" not in (r.status_a, r.status_b)
    return moved or (judged and r.status_a != r.status_b)


def _layer(r: LayerChange) -> list[Cell]:
    status = [STATUS[s] if s else MISSING for s in (r.status_a, r.status_b)]
    return [r.path or "model", *status, rate(r.rate_a), rate(r.rate_b), ms(r.ms_a), ms(r.ms_b),
            signed(r.change_ms, "ms"), share(r.of_total)]  # fmt: skip


def _write_collectives(doc: Document, rows: list[CollectiveChange]) -> None:
    if not rows:
        return
    doc.heading("Collectives")
    headers = ["collective", "ranks", "bytes A", "bytes B", "time A", "time B", "exposed A", "exposed B"]
    cells: list[list[Cell]] = [
        [f"{r.kind} {r.dtype}".strip(), str(r.group_size), size(r.bytes_a), size(r.bytes_b), ms(r.ms_a), ms(r.ms_b),
         ms(r.exposed_a), ms(r.exposed_b)]
        for r in rows
    ]  # fmt: skip
    doc.table(headers, cells, right=range(1, 8), drop=(1,))

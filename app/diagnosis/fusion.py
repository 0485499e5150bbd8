"""Layers whose fusion is broken, and fusions that an edit would bring."""

from __future__ import annotations

from costlab.app.analysis.layers import covers
from costlab.app.analysis.views import Finding, FusionView, LayerRow, MissView
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, rate, size
from costlab.app.text import operators, plain
from costlab.probes.fusion.causes import mend_of, text_of

MISSED_SHARE = 0.005  # of the step, below which a missed fusion is not worth a finding
MOST = 3  # findings of one rule
REASON, NAMES = 160, 60  # characters of the compiler's reason and of operator names
_AUTOTUNE = ("backend_loop_mismatch", "extern_boundary", "heuristic_limit")


def broken_layers(view: FusionView) -> list[LayerRow]:
    """Broken lines of the tree that have no broken line below them, the largest loss first."""
    rows = [r for r in view.layers if r.status == "broken"]
    leaves = [r for r in rows if not any(o is not r and o.depth > r.depth and _inside(o, r) for o in rows)]
    return sorted(leaves, key=lambda r: (-(r.saves_ms or 0.0), -(r.ms or 0.0)))


def _inside(inner: LayerRow, outer: LayerRow) -> bool:
    return not outer.path or inner.path == outer.path or inner.path.startswith(f"{outer.path}.")


def _misses_of(view: FusionView, row: LayerRow) -> list[MissView]:
    return [m for m in view.misses if m.addressable and covers(row.path, m.layer)]


def broken(context: Context) -> list[Finding]:
    """Layers with status broken; in an eager run all are, and `uncompiled` says so once."""
    view = context.report.fusion
    if view is None or not context.compiled:
        return []
    return [_broken(context, view, row) for row in broken_layers(view)[:MOST]]


def _broken(context: Context, view: FusionView, row: LayerRow) -> Finding:
    misses = _misses_of(view, row)
    miss = misses[0] if misses else None
    cause = row.main_cause or (miss.cause if miss else "")
    where = (miss.producer_source or miss.consumer_source) if miss else ""
    why = text_of(cause) if cause else "no cause was recorded"
    return context.finding(
        "broken-fusion",
        f"Fusion is broken in {row.path or 'the model'}: {why}",
        [
            f"fusion rate {rate(row.rate)}, target {rate(row.target)}" if row.rate is not None else "",
            f"{size(row.lost)} of {size(row.bytes)} a step are written and read again"
            if row.lost and row.bytes
            else "",
            f"measured time of the layer: {context.of_step(row.ms)}" if row.ms is not None else "",
            f"{between(miss)}: {plain(miss.reason, REASON)}" if miss else "",
        ],
        f"{_sentence(mend_of(cause))}" if cause else "Open the layer in the Fusion pane to see its kernels.",
        saves_ms=row.saves_ms or None,
        severity=None if row.saves_ms else "medium",
        how="lost bytes / measured copy bandwidth",
        layer=row.path,
        where=where,
    )


def between(miss: MissView) -> str:
    """The operators of a missed fusion, as far as they are known."""
    known = [operators(o, NAMES) for o in (miss.producer, miss.consumer) if o]
    return " and ".join(known) or "operators without a name"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def missed(context: Context) -> list[Finding]:
    """Missed fusions that can be mended, outside broken layers, from 0.5 % of the step each."""
    view = context.report.fusion
    if view is None or not context.compiled:
        return []
    reported = broken_layers(view)[:MOST]
    rest = [m for m in view.misses if m.addressable and not any(covers(r.path, m.layer) for r in reported if r.path)]
    worth = [m for m in rest if (context.share_of(m.saves_ms) or 0.0) >= MISSED_SHARE]
    return [_missed(context, m) for m in sorted(worth, key=lambda m: -(m.saves_ms or 0.0))[:MOST]]


def _fused(context: Context) -> str:
    """Costlab's own kernels, where they are not in already."""
    return "--fused" if context.on_gpu and not context.option("fused", False) else ""


def _missed(context: Context, miss: MissView) -> Finding:
    tune = miss.cause in _AUTOTUNE and context.option("compile_mode", "default") == "default" and context.on_gpu
    times = f" in {miss.count} places" if miss.count > 1 else ""
    return context.finding(
        "missed-fusion",
        f"Not fused in {miss.layer or 'the model'}: {between(miss)}, {miss.cause_text}",
        [
            f"{size(miss.bytes)} a step written and read again{times}, {miss.phase}",
            f"{ms(miss.saves_ms)} at the measured copy bandwidth",
            f"the compiler's reason: {plain(miss.reason, REASON)}" if miss.reason else "",
        ],
        _sentence(mend_of(miss.cause)),
        saves_ms=miss.saves_ms,
        how="lost bytes / measured copy bandwidth",
        proves="--compile-mode max-autotune-no-cudagraphs" if tune else _fused(context),
        layer=miss.layer,
        where=miss.producer_source or miss.consumer_source,
    )

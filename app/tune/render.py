"""A tuning as text, Markdown or JSON: candidates, what each policy chooses, what was kept and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from costlab.app.figures import MISSING, ms, size
from costlab.app.report.document import Cell, Code, Document
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text

if TYPE_CHECKING:
    from costlab.app.analysis.views import CandidateView, TuneView
    from costlab.app.tune.flow import Tuned

MARKS = {"kept": "● kept", "dropped": "○ dropped", "untried": "? untried"}
_YES = {True: "yes", False: "no", None: MISSING}


def render(tuned: Tuned, form: str, width: int = 80) -> str:
    """The result as "text", "md" or "json"; ends with a line feed."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(tuned.view), indent=2).decode() + "\n"
    doc = build(tuned.view)
    kept = len(tuned.plan.kept())
    doc.say("Plan with ", str(kept), f" of {len(tuned.plan.rewrites)} rewrites: ", Code(str(tuned.plan_file)))
    doc.say(
        "Use it: ", Code(f"costlab run --plan {tuned.plan_file}"), " or ", Code("costlab.kernels.apply(model, plan)")
    )
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def build(view: TuneView) -> Document:
    """The tuning as a document."""
    doc = Document()
    doc.heading("Profile-guided fusion", 1)
    if view.unavailable:
        doc.say(f"{view.unavailable}: candidates and predictions only, nothing was measured.")
    write_candidates(doc, view)
    return doc


def write_candidates(doc: Document, view: TuneView) -> None:
    """The tables and reasons, for the report's Fusion section too."""
    if not view.candidates:
        doc.say("No place where a fused kernel fits.")
    doc.table(HEADERS, [_row(c) for c in view.candidates], right=(2, 3, 4), wide=0, drop=(5, 2))
    if view.together is not None:
        low, high = (v if v is not None else view.together for v in (view.together_low, view.together_high))
        doc.say(f"All candidates together: {view.together:+.1%} [{low:+.1%}, {high:+.1%}] of the step time.")
    doc.say(policies(view))
    doc.items([[f"{c.name}: {reason}"] for c in view.candidates if (reason := why(c))])
    checks = sorted({c.check for c in view.candidates if c.check and c.checked})
    doc.items([[f"numerics: {text}"] for text in checks] + [[note] for note in view.notes])


HEADERS = ["candidate", "decision", "lost", "predicted", "measured", "numerics", "roofline", "seed"]


def _row(c: CandidateView) -> list[Cell]:
    measured = MISSING if c.measured_ms is None else ms(c.measured_ms)
    return [
        f"{c.name} ×{c.places}" if c.places > 1 else c.name, MARKS.get(c.decision, c.decision), size(c.lost),
        ms(c.predicted_ms), measured, _YES[c.checked], _YES[c.roofline], _YES[c.seed],
    ]  # fmt: skip


def why(c: CandidateView) -> str:
    """The decision's reason and the prediction's ground, in a sentence or two."""
    parts = [c.why, f"predicted from {c.predicted_how}" if c.predicted_how else ""]
    if c.seed_why:
        parts.append(f"seed rule: {c.seed_why}" + (f" ({c.miss_how})" if c.miss_how else ""))
    return "; ".join(p for p in parts if p)


def policies(view: TuneView) -> str:
    """Which candidates each policy would choose."""
    real = [c for c in view.candidates if c.how != "none"]
    if not real:
        return ""
    names = {
        "roofline": [c.name for c in real if c.roofline],
        "seed (L2 miss > 15 %, latency ratio < 0.6)": [c.name for c in real if c.seed],
    }
    words = [f"{policy}: {', '.join(found) or 'none'}" for policy, found in names.items()]
    unknown = sum(c.seed is None for c in real)
    more = f" The seed's rule cannot say for {unknown}: it needs two measured kernels." if unknown else ""
    return f"Each policy would choose: {'; '.join(words)}. This one used {view.policy}.{more}"

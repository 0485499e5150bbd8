"""What `costlab tune` found on the run: each candidate's predicted and measured saving, the layers before and after."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical

from costlab.app import figures as fmt
from costlab.app.analysis.views import BeforeAfter, CandidateView, TuneView
from costlab.app.tui.cells import EMPTY, Line, Tone, crop_start, line
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Column, Table, col

DECISIONS: dict[str, tuple[str, Tone]] = {
    "kept": ("● kept", "good"),
    "dropped": ("○ dropped", "muted"),
    "untried": ("? untried", "warn"),
}
UNTUNED: tuple[Line, ...] = (
    line((" This run was not tuned.", "strong")),
    EMPTY,
    line(" ", ("costlab tune RUN", "accent"), "  finds where fused kernels fit, tries them and keeps what wins"),
)


def _name(row: CandidateView, width: int) -> Line:
    times = f" ×{row.places}" if row.places > 1 else ""
    kernel, at, where = row.name.partition("@")
    room = width - len(times) - len(kernel) - 1
    name = f"{kernel}{at}{crop_start(where, room)}" if room >= 4 else crop_start(row.name, max(width - len(times), 4))
    return line(name, (times, "faint"))


def _number(text: str) -> Line:
    return line((text, "faint" if text == fmt.MISSING else ""))


def _measured(row: CandidateView) -> Line:
    if row.change is None:
        return line((fmt.MISSING, "faint"))
    low, high = row.change_low, row.change_high
    sure = low is not None and high is not None and (high < 0 or low > 0)
    tone: Tone = "" if not sure else "good" if row.change < 0 else "bad"
    return line((f"{row.change * 100:+.1f} %", tone))


def _policies(row: CandidateView) -> Line:
    """r where the roofline policy chooses it, s where the seed's rule does, ? where that cannot say."""
    seed = "?" if row.seed is None else "s" if row.seed else "·"
    return line(("r" if row.roofline else "·", ""), (seed, "faint" if seed == "?" else ""))


CANDIDATES: list[Column[CandidateView]] = [
    Column("name", "candidate", _name, 22, flex=3, max_width=60),
    col("decision", "decision", lambda r: line(DECISIONS.get(r.decision, (r.decision, ""))), 9),
    col("lost", "lost", lambda r: _number(fmt.size(r.lost)), 8, "right", priority=3),
    col("predicted", "predicted", lambda r: _number(fmt.ms(r.predicted_ms)), 9, "right"),
    col("measured", "measured", _measured, 9, "right"),
    col("policies", "by", _policies, 2, priority=1),
    col("why", "why", lambda r: line((r.why, "muted")), 16, flex=4, priority=2, max_width=80),
]


def _label(row: BeforeAfter, width: int) -> Line:
    indent = "  " * row.depth
    return line(indent, crop_start(row.label, max(width - len(indent), 1)))


def _after(before: float | None, after: float | None, text: str, lower_is_better: bool) -> Line:
    if before is None or after is None or before == after:
        return line((text, "faint" if text == fmt.MISSING else ""))
    better = (after < before) == lower_is_better
    return line((text, "good" if better else "bad"))


LAYERS: list[Column[BeforeAfter]] = [
    Column("layer", "layer", _label, 18, flex=3, max_width=50),
    col("rate", "rate", lambda r: _number(fmt.rate(r.rate)), 5, "right"),
    col("rate_after", "after", lambda r: _after(r.rate, r.rate_after, fmt.rate(r.rate_after), False), 5, "right"),
    col("ms", "time", lambda r: _number(fmt.ms(r.ms)), 8, "right"),
    col("ms_after", "after", lambda r: _after(r.ms, r.ms_after, fmt.ms(r.ms_after), True), 8, "right"),
    col("lost", "lost", lambda r: _number(fmt.size(r.lost)), 8, "right", priority=1),
    col("lost_after", "after", lambda r: _after(r.lost, r.lost_after, fmt.size(r.lost_after), True), 8, "right",
        priority=1),
]  # fmt: skip


class TunePanel(Vertical):
    """Candidates, or the layers before and after; the line under the cursor is told in full below."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    TunePanel { height: 1fr; display: none; }
    TunePanel #tune-candidates { height: 1fr; }
    TunePanel #tune-layers { height: 1fr; display: none; }
    TunePanel.-layers #tune-layers { display: block; }
    TunePanel.-layers #tune-candidates { display: none; }
    TunePanel #tune-why { height: auto; max-height: 7; padding: 0 1; }
    TunePanel.-none Table { display: none; }
    TunePanel.-layers #tune-why { display: none; }
    """

    def compose(self) -> ComposeResult:
        """Head, both tables, the reason."""
        yield Lines(id="tune-head", classes="wrap")
        yield Table[CandidateView](CANDIDATES, id="tune-candidates")
        yield Table[BeforeAfter](LAYERS, id="tune-layers")
        yield Lines(id="tune-why", classes="wrap")

    def show(self, view: TuneView | None) -> None:
        """Show a run's tuning, or what to do where there is none."""
        self.set_class(view is None, "-none")
        self.query_one("#tune-head", Lines).show(UNTUNED if view is None else head(view))
        self.query_one("#tune-candidates", Table).set_rows(view.candidates if view else [], cursor=0)
        self.query_one("#tune-layers", Table).set_rows(view.layers if view else [], cursor=0)
        self.query_one("#tune-why", Lines).show(told(view.candidates[0]) if view and view.candidates else ())

    def show_layers(self, view: TuneView | None, on_: bool) -> None:
        """Turn to the layers before and after, or back to the candidates."""
        self.set_class(on_, "-layers")
        if on_ and view is not None:
            missing = line((" No run with the rewrites was traced: nothing to set beside.", "muted"))
            self.query_one("#tune-head", Lines).show([*head(view)[:1], *([] if view.layers else [missing])])
        elif view is not None:
            self.query_one("#tune-head", Lines).show(head(view))

    def take_focus(self) -> None:
        """Focus the table that is shown."""
        name = "#tune-layers" if self.has_class("-layers") else "#tune-candidates"
        self.query_one(name, Table).focus()

    @on(Table.Moved, "#tune-candidates")
    def _moved(self, event: Table.Moved) -> None:
        event.stop()
        if isinstance(event.row, CandidateView):
            self.query_one("#tune-why", Lines).show(told(event.row))


def head(view: TuneView) -> list[Line]:
    """When, by which policy, what was kept, and all candidates' change together."""
    real = [c for c in view.candidates if c.how != "none"]
    kept = sum(c.decision == "kept" for c in real)
    untried = sum(c.decision == "untried" for c in real)
    counts = f"{kept} kept" + (f", {untried} untried" if untried else "") + f" of {len(real)}"
    lines = [line((" tuned ", "muted"), (counts, "strong"), (f"  {view.policy} policy  {view.plan}", "muted"))]
    if view.unavailable:
        lines.append(line(" ", (f"{view.unavailable}: predictions only, nothing was measured", "warn")))
    if view.together is not None:
        low, high = (v if v is not None else view.together for v in (view.together_low, view.together_high))
        span = f"[{low * 100:+.1f}, {high * 100:+.1f}]"
        lines.append(line(" all candidates together ", (f"{view.together * 100:+.1f} % {span}", "strong")))
    return lines


def told(row: CandidateView) -> list[Line]:
    """A candidate in full."""
    found = [line((row.name, "strong"), ("  ", ""), row.why)]
    if row.predicted_how:
        found.append(line(("predicted ", "accent"), row.predicted_how))
    if row.seed_why:
        found.append(line(("seed rule ", "accent"), row.seed_why + (f"; {row.miss_how}" if row.miss_how else "")))
    if row.check:
        found.append(line(("numerics  ", "accent"), row.check))
    return found

"""One finding in full: evidence, what to do, what it saves, what would prove it."""

from __future__ import annotations

from textual.app import App

from costlab.app.analysis.views import Finding, RunReport
from costlab.app.tui.cells import EMPTY, Line, line, text_of
from costlab.app.tui.dialogs.base import Message


def finding_lines(finding: Finding, report: RunReport) -> list[Line]:
    """The finding as lines."""
    from costlab.app.report.findings import saving

    rows = [line((finding.title, "strong"))]
    rows += [line(("· ", "muted"), text) for text in finding.evidence]
    rows.append(line(("do     ", "muted"), finding.action))
    if finding.saves_ms is not None:
        rows.append(line(("saves  ", "muted"), saving(finding, report), (f"  {finding.source}", "muted")))
    if finding.proves:
        rows.append(line(("prove  ", "muted"), (finding.proves, "accent")))
    place = "  ".join(p for p in (finding.layer, finding.where) if p)
    if place:
        rows.append(line(("where  ", "muted"), place))
    return rows


def open_finding(app: App[object], finding: Finding, report: RunReport) -> None:
    """Show the finding in a dialog that can copy it."""
    lines = finding_lines(finding, report)
    if finding.how:
        lines += [EMPTY, line(("how    ", "muted"), (finding.how, "muted"))]
    app.push_screen(Message("finding", lines, copy="\n".join(text_of(row) for row in lines)))

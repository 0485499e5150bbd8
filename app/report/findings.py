"""Findings as a section: the table first, then each with its evidence, what to do and how to prove it."""

from __future__ import annotations

from costlab.app.analysis.views import Finding, RunReport
from costlab.app.figures import MISSING, money, ms, share
from costlab.app.report.document import Cell, Code, Document, sentence

SEVERITY = {"high": "● high", "medium": "◐ medium", "low": "○ low", "info": "· info"}


def write_findings(doc: Document, report: RunReport) -> None:
    """The section; says so when nothing was found."""
    doc.heading("What to change")
    if not report.findings:
        doc.say("No rule found anything worth changing in what was measured.")
        return
    currency = report.cost.currency if report.cost else "USD"
    priced = any(f.saves_run_money is not None for f in report.findings)
    run_steps = report.cost.run_steps if report.cost else 0
    headers = ["", "finding", "weight", "saves a step", "of the step"]
    rows: list[list[Cell]] = []
    for n, f in enumerate(report.findings, 1):
        row: list[Cell] = [str(n), f.title, SEVERITY[f.severity], ms(f.saves_ms), share(f.saves_share)]
        rows.append([*row, money(f.saves_run_money, currency)] if priced else row)
    doc.table([*headers, f"in {run_steps:,} steps"] if priced else headers, rows, right=(0, 3, 4, 5), wide=1, drop=(2,))
    doc.say(
        "Savings are modelled unless said otherwise. They overlap: do not add them up; a re-run with the change "
        "measures it."
    )
    for n, f in enumerate(report.findings, 1):
        _write(doc, n, f, report)


def _write(doc: Document, n: int, finding: Finding, report: RunReport) -> None:
    doc.heading(f"{n}. {finding.title}", 3)
    doc.items([[e] for e in finding.evidence])
    doc.say(f"What to do: {finding.action}")
    if finding.where:
        doc.say("Where: ", Code(finding.where))
    if finding.proves:
        doc.say("Prove it: run the same again with ", Code(finding.proves))
    if finding.saves_ms is not None:
        doc.say(f"Saving ({finding.source}): {saving(finding, report)}. {_how(finding)}".strip())
    elif finding.how:
        doc.say(f"Saving: {finding.how}.")


def saving(finding: Finding, report: RunReport) -> str:
    """ "9.80 ms a step (8.6 %), $0.13 per 1 M tokens, $153 in 100,000 steps" """
    cost = report.cost
    currency = cost.currency if cost else "USD"
    parts = [f"{ms(finding.saves_ms)} a step ({share(finding.saves_share)})"]
    if finding.saves_money is not None:
        parts.append(f"{money(finding.saves_money, currency)} per 1 M {report.run.unit}")
    if finding.saves_run_money is not None and cost:
        parts.append(f"{money(finding.saves_run_money, currency)} in {cost.run_steps:,} steps")
    return ", ".join(p for p in parts if p != MISSING)


def _how(finding: Finding) -> str:
    return sentence(finding.how)

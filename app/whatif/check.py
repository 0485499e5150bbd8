"""`costlab check`: a gate for continuous integration on two stored runs.

A limit is broken when a figure grew by more than allowed and, for the step time, when the noise within the runs does
not explain it (the interval of the change excludes zero). Two single runs do not show the noise between runs: a limit
below that noise will fail by chance, and a what-if is the way to tell.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Literal

import msgspec

from costlab.app.analysis.compare import Change, Comparison, compare_reports
from costlab.app.analysis.views import RunReport, View
from costlab.app.figures import value
from costlab.app.text import plain
from costlab.probes.spec import SpecError

REGRESSION = 1  # exit code: a limit is broken
Outcome = Literal["passed", "failed", "error", "skipped"]


class Limits(View, frozen=True, kw_only=True):
    """How much each figure may grow, relative; None is not looked at."""

    step: float | None = 0.05
    memory: float | None = None
    traffic: float | None = None


class Checked(View, frozen=True, kw_only=True):
    """One figure against its limit."""

    name: str
    outcome: Outcome
    message: str
    limit: float | None = None
    change: Change | None = None


class CheckResult(View, frozen=True, kw_only=True):
    """The gate's answer. `outcome` is "error" when the runs cannot be compared."""

    schema_version: int = 1
    base: str
    run: str
    outcome: Outcome
    checks: list[Checked]


def parse_share(text: str) -> float:
    """`5%` or `0.05` as a fraction; SpecError for anything else or below zero."""
    bare = text.strip()
    try:
        amount = float(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)
    except ValueError as error:
        raise SpecError(f"'{plain(text, 40)}' is no share; write 5% or 0.05") from error
    if not 0 <= amount < float("inf"):
        raise SpecError(f"a limit must be zero or more, got {plain(text, 40)}")
    return amount


def check(base: RunReport, run: RunReport, limits: Limits) -> CheckResult:
    """Compare `run` with `base`. Runs that are not comparable, or lack a step time, are an error, not a pass."""
    comparison = compare_reports(base, run)
    checks = [_comparable(comparison)]
    checks += [_step(comparison.step, limits.step)] if limits.step is not None else []
    named = {c.name: c for c in (*comparison.memory, *comparison.headline)}
    for name, limit in (("peak memory", limits.memory), ("communicated bytes", limits.traffic)):
        if limit is not None:
            checks.append(_grown(name, named.get(name), limit))
    outcomes = [c.outcome for c in checks]
    worst: Outcome = "error" if "error" in outcomes else "failed" if "failed" in outcomes else "passed"
    return CheckResult(base=base.run.id, run=run.run.id, outcome=worst, checks=checks)


def _comparable(comparison: Comparison) -> Checked:
    if comparison.comparable:
        return Checked(name="comparable", outcome="passed", message="same workload, hardware and software")
    parts = [f"{m.what}: {m.a or '–'} / {m.b or '–'} ({m.effect})" for m in comparison.mismatches]
    return Checked(name="comparable", outcome="error", message="; ".join(parts))


def _step(change: Change | None, limit: float) -> Checked:
    if change is None or change.ratio is None:
        return Checked(name="step time", outcome="error", message="one of the runs has no step time", limit=limit)
    grown = _grown("step time", change, limit)
    noise = change.low is not None and change.low <= 0
    if grown.outcome == "failed" and noise:
        message = f"{grown.message}, but the noise within the runs explains it"
        return Checked(name="step time", outcome="passed", message=message, limit=limit, change=change)
    return grown


def _grown(name: str, change: Change | None, limit: float) -> Checked:
    if change is None or change.ratio is None:
        return Checked(name=name, outcome="skipped", message="not measured in both runs", limit=limit)
    text = (
        f"{value(change.a, change.unit)} to {value(change.b, change.unit)}, {change.ratio * 100:+.2f} %"
        f" (allowed {limit * 100:+.3g} %)"
    )
    outcome: Outcome = "failed" if change.ratio > limit else "passed"
    return Checked(name=name, outcome=outcome, message=text, limit=limit, change=change)


def to_json(result: CheckResult) -> str:
    """The machine form; ends with a line feed."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def to_junit(result: CheckResult) -> str:
    """JUnit XML as CI servers read it: a test case for each figure."""
    outcomes = [c.outcome for c in result.checks]
    suite = ET.Element(
        "testsuite",
        name="costlab check",
        tests=str(len(outcomes)),
        failures=str(outcomes.count("failed")),
        errors=str(outcomes.count("error")),
        skipped=str(outcomes.count("skipped")),
    )
    for one in result.checks:
        case = ET.SubElement(suite, "testcase", classname=f"costlab.{plain(result.run)}", name=one.name)
        tag = {"failed": "failure", "error": "error", "skipped": "skipped"}.get(one.outcome)
        if tag is None:
            ET.SubElement(case, "system-out").text = plain(one.message)
        else:
            ET.SubElement(case, tag, message=plain(one.message))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def to_text(result: CheckResult) -> str:
    """One line a figure and the verdict."""
    mark = {"passed": "● passed", "failed": "○ failed", "error": "! error", "skipped": "– skipped"}
    lines = [f"{mark[c.outcome]:<10} {c.name}: {plain(c.message)}" for c in result.checks]
    return "\n".join([*lines, f"{mark[result.outcome]:<10} {plain(result.run)} against {plain(result.base)}"]) + "\n"

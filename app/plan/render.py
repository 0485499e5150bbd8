"""The plan as text, Markdown or JSON. Eighty columns wide."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from costlab.app.plan.machine import Machine, Rate
from costlab.app.plan.report import Check, PlanReport, Point
from costlab.app.text import md, plain
from costlab.kernels.schedule.planner import size_text, time_text

LETTERS = {"backend": "n", "ring": "r", "chain": "c", "two-level": "t", "hybrid": "h"}
_WIDTH, _HEIGHT = 60, 12
Grid = list[list[str]]


def render(report: PlanReport, form: str) -> str:
    """The report in `form`: text, md or json."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    return _markdown(report) if form == "md" else _text(report)


def _names(report: PlanReport) -> list[str]:
    present = {s.schedule for p in report.curve for s in p.schedules}
    return [name for name in LETTERS if name in present]


def _title(report: PlanReport) -> str:
    ranks, hosts = report.shape.ranks, report.hosts
    wired = "daisy-chained" if report.shape.wiring == "line" else "switched"
    where = "one host" if hosts == 1 else f"{hosts:,} {wired} hosts of {report.machine.ranks}"
    return f"All-reduce of {size_text(report.chosen.nbytes)} over {ranks:,} ranks on {where}"


def _rate(rate: Rate) -> str:
    return f"{rate.gbps:.4g} GB/s, {rate.alpha_us:.3g} us ({rate.source})"


def _facts(host: Machine, hosts: int) -> list[str]:
    rows = [f"inside a host: {_rate(host.inside)}"]
    if hosts > 1:
        rows.append(f"between hosts: {host.nics} NIC{'s' if host.nics > 1 else ''} of {_rate(host.network)}")
    return [*rows, f"a step of a schedule of ours: {host.step_us:g} us of host time; {host.library}'s own needs none"]


def _grid(report: PlanReport, points: Sequence[Point]) -> Grid:
    """Head and one line a size: every schedule's time, the choice and how far it is from the bound."""
    names = _names(report)
    shown = {n: report.machine.library if n == "backend" else n for n in LETTERS}
    rows = [["size", *(shown[n] for n in names), "choice", "bound"]]
    for p in points:
        times = {s.schedule: time_text(s.seconds) for s in p.schedules}
        rows.append(
            [
                size_text(p.nbytes),
                *(times.get(n, "-") for n in names),
                shown[p.schedules[0].schedule],
                time_text(p.bound),
            ]
        )
    return rows


def _check_grid(checks: Sequence[Check]) -> Grid:
    rows = [["schedule", "chunks", "ranks", "simulated", "formula", "apart"]]
    for c in checks:
        apart = f"{abs(c.simulated / c.modelled - 1):.1%}" if c.modelled else "-"
        shown = [time_text(c.simulated), time_text(c.modelled)]
        rows.append([c.schedule, str(c.chunks), f"{c.ranks:,}", *shown, apart])
    return rows


def _columns(grid: Grid) -> list[str]:
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in grid]


def plot(report: PlanReport) -> list[str]:
    """Message bytes a second (not bus bandwidth) over the size, both logarithmic; the best schedule in capitals."""
    points = [p for p in report.curve if p.schedules]
    rates = [p.nbytes / s.seconds for p in points for s in p.schedules if s.seconds > 0]
    if not rates:
        return []
    low, high = math.log10(min(rates)), math.log10(max(rates))
    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for i, p in enumerate(points):
        x = round(i * (_WIDTH - 1) / max(1, len(points) - 1))
        for place, s in reversed(list(enumerate(p.schedules))):
            if s.seconds > 0:
                share = (math.log10(p.nbytes / s.seconds) - low) / ((high - low) or 1.0)
                letter = LETTERS.get(s.schedule, "?")
                canvas[_HEIGHT - 1 - round(share * (_HEIGHT - 1))][x] = letter if place else letter.upper()
    ends = {0: 10**high / 1e9, _HEIGHT - 1: 10**low / 1e9}
    lines = [f"{f'{ends[y]:.3g}' if y in ends else '':>9} |{''.join(row).rstrip()}" for y, row in enumerate(canvas)]
    left, right = size_text(points[0].nbytes), size_text(points[-1].nbytes)
    axis = f"{'GB/s':>9} +{'-' * _WIDTH}"
    legend = "  ".join(f"{LETTERS[n]} {report.machine.library if n == 'backend' else n}" for n in _names(report))
    return [*lines, axis, f"{'':11}{left}{right:>{_WIDTH - len(left)}}", f"{'':11}{legend}  (capital: chosen)"]


def _wrapped(text: str, width: int = 80) -> str:
    import textwrap

    return textwrap.fill(text, width)


def _text(report: PlanReport) -> str:
    title = _title(report)
    lines = [title, "═" * min(80, len(title)), "", _wrapped(_sentence(report)), ""]
    lines += [f"  {plain(fact)}" for fact in (plain(report.machine.source), *_facts(report.machine, report.hosts))]
    if report.machine.notes:
        lines += ["", *(_wrapped(f"- {plain(note)}") for note in report.machine.notes)]
    lines += ["", "ALL SCHEDULES", "─" * 80, *_columns(_grid(report, report.curve)), "", *plot(report)]
    if report.checks:
        lines += ["", "SIMULATOR", "─" * 80, *_columns(_check_grid(report.checks))]
    lines += ["", "THE ARTICLE'S TABLE", "─" * 80, _wrapped(report.seed_verdict)]
    return "\n".join(lines) + "\n"


def _sentence(report: PlanReport) -> str:
    text = report.sentence
    return text[:1].upper() + text[1:]


def _markdown(report: PlanReport) -> str:
    lines = [f"# {_title(report)}", "", md(_sentence(report)), ""]
    facts = (report.machine.source, *_facts(report.machine, report.hosts), *report.machine.notes)
    lines += [f"- {md(fact)}" for fact in facts]
    lines += ["", "## All schedules", "", *_table(_grid(report, report.curve)), "", "```text", *plot(report), "```"]
    if report.checks:
        lines += ["", "## Simulator", "", *_table(_check_grid(report.checks))]
    lines += ["", "## The article's table", "", md(report.seed_verdict)]
    return "\n".join(lines) + "\n"


def _table(grid: Grid) -> list[str]:
    head, *rows = grid
    return [_row(head), _row(["---:"] * len(head)), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""The Fusion section says what the pane shows: both places and the reason of a miss, gaps, anti-patterns, the code."""

from __future__ import annotations

import json

import msgspec
from markdown_it import MarkdownIt

from costlab.app.analysis.views import KernelCode, PatternView, RunReport
from costlab.app.report import render_json, render_markdown, render_text
from costlab.app.report.fusion import SOURCE_LINES, SOURCES
from tests.app.report.examples import example_report

HOSTILE = "\x1b[2J```\n</details>\n\u202e<b>x</b>"


def code(name: str, source: str, **fields: object) -> KernelCode:
    base = KernelCode(name=name, phase="forward", ms=1.5, language="triton", source=source)
    return msgspec.structs.replace(base, **fields)


def with_fusion(**fields: object) -> RunReport:
    report = example_report()
    assert report.fusion is not None
    return msgspec.structs.replace(report, fusion=msgspec.structs.replace(report.fusion, **fields))


def test_the_longest_kernels_are_in_the_report_with_their_code() -> None:
    found = [code(f"triton_{n}", "\n".join(f"x{n} = {i}" for i in range(SOURCE_LINES + 3))) for n in range(SOURCES + 2)]
    report = with_fusion(sources=found)
    fences = [t for t in MarkdownIt().parse(render_markdown(report)) if t.type == "fence" and t.info == "python"]
    assert [t.content.splitlines()[0] for t in fences] == [f"x{n} = 0" for n in range(SOURCES)]
    assert all(len(t.content.splitlines()) == SOURCE_LINES for t in fences)
    assert "3 more lines are in the JSON report" in render_markdown(report)
    assert "2 more are in the JSON report" in render_markdown(report)
    kept = json.loads(render_json(report))["fusion"]["sources"]
    assert [one["source"] for one in kept] == [one.source for one in found]
    assert "Generated code" in render_text(report), "the text report says where it is"


def test_a_source_cannot_leave_its_block_nor_reach_the_terminal() -> None:
    report = with_fusion(sources=[code("`k`", HOSTILE, language="\x1b[31m<b>", cut=True, variants=3)])
    markdown = render_markdown(report)
    fence = next(t for t in MarkdownIt().parse(markdown) if t.type == "fence" and "</details>" in t.content)
    assert fence.info == "text"
    assert fence.content.splitlines() == ["```", "</details>", "<b>x</b>"]
    assert not {"\x1b", "\u202e"} & set(markdown)
    assert "the newest of 3 kernels of that name" in markdown
    assert "the end was not kept" in markdown


def test_a_miss_gives_both_places_and_the_compilers_reason() -> None:
    report = example_report()
    assert report.fusion is not None
    miss = next(m for m in report.fusion.misses if m.addressable)
    moved = msgspec.structs.replace(miss, producer_source="a.py:1", consumer_source="b.py:2", reason="no `shared` data")
    markdown = render_markdown(with_fusion(misses=[moved]))
    assert "`a.py:1 → b.py:2`" in markdown
    assert "``no `shared` data``" in markdown
    same = msgspec.structs.replace(moved, consumer_source="a.py:1")
    assert "a.py:1 → " not in render_markdown(with_fusion(misses=[same]))


def test_anti_patterns_and_gaps_stand_in_every_form() -> None:
    pattern = PatternView(
        kind="hidden_copy", text="a copy", mend="drop it", layer="layers.*.x", phase="forward", source="m.py:3",
        bytes=8, saves_ms=None, cost_ms=1.25, cost_kind="modelled",
    )  # fmt: skip
    report = with_fusion(patterns=[pattern])
    for text in (render_markdown(report), render_text(report, 160)):
        for part in ("1.25 ms modelled", "m.py:3", "drop it", "gap, run"):
            assert part in text, part
    data = json.loads(render_json(report))["fusion"]
    assert (data["patterns"][0]["cost_ms"], data["patterns"][0]["cost_kind"]) == (1.25, "modelled")
    assert any(c["gap_run_money"] for c in data["classes"])

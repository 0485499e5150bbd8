"""Markdown, text and JSON of the same report: whole, readable, and deaf to what names try."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from costlab.app.analysis.views import RunReport
from costlab.app.report import render_json, render_markdown, render_text
from costlab.app.report.document import Bar, Bars, Code, Document, Log
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.probes.records import ROWS
from tests.app.make_model import NASTY
from tests.app.report.examples import example_report

SECTIONS = [
    "In short", "Where a step goes", "What to change", "Fusion", "Communication", "Checkpoint", "Compile", "Memory",
    "Energy", "Cost", "What was run", "On what", "What is missing", "How the figures were obtained",
]  # fmt: skip
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
EVERYTHING = frozenset(row.table for row in ROWS)


def variant_id(options: dict[str, Any]) -> str:
    """A name that is the same in every process: a set's order is not."""
    return " ".join(f"{k}={sorted(v) if isinstance(v, frozenset) else v}" for k, v in options.items()) or "plain"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"device": "cpu"},
    {"compile": "none"},
    {"status": "failed", "omit": EVERYTHING},
    {"status": "cancelled", "omit": frozenset({"parts", "spans", "kernels"})},
    {"hostile": True},
    {"layers": 40, "ranks": 8},
]


@pytest.mark.parametrize("options", VARIANTS, ids=variant_id)
def test_every_form_has_every_section(options: dict[str, Any]) -> None:
    view = example_report(**options)
    markdown, text = render_markdown(view), render_text(view)
    assert re.findall(r"(?m)^## (.*)$", markdown) == SECTIONS
    assert [h for h in SECTIONS if f"\n{h.upper()}\n───" not in text] == []
    assert markdown.endswith("\n") and text.endswith("\n")
    assert len(re.findall(r"(?m)^# ", markdown)) == 1


@pytest.mark.parametrize("options", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("width", [80, 120, 60])
def test_text_fits_its_width_and_carries_nothing_invisible(options: dict[str, Any], width: int) -> None:
    text = render_text(example_report(**options), width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert {unicodedata.category(c) for c in text.replace("\n", "")} & {"Cc", "Cf", "Cs", "Zl", "Zp"} == set()
    assert "\n\n\n" not in text


def test_hostile_names_act_in_neither_form() -> None:
    view = example_report(hostile=True)
    assert any(NASTY in k.name for k in view.fusion.kernels)  # type: ignore[union-attr]
    markdown = render_markdown(view)
    tokens = MARKDOWN.parse(markdown)
    blocks = "".join(t.content for t in tokens if t.type == "html_block")
    assert set(re.findall(r"</?\w+", blocks)) <= {"<details", "</details", "<summary", "</summary"}
    inline = [c for t in tokens for c in t.children or []]
    assert {c.type for c in inline} <= {"text", "code_inline", "softbreak", "html_inline"}
    assert {c.content for c in inline if c.type == "html_inline"} <= {"<!-- -->"}
    assert [t.content for t in tokens if t.type == "code_block"] == []
    assert not set(markdown) & {"\x1b", "\u202e"}
    # every row of every table has as many cells as its head
    for match in re.finditer(r"(?m)(^\|.*\n)+", markdown):
        rows = match[0].splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_json_is_the_report_itself() -> None:
    view = example_report()
    data = json.loads(render_json(view))
    assert list(data) == [
        "schema_version", "run", "environment", "steps", "waterfall", "fusion", "collectives", "checkpoint", "compile",
        "memory", "energy", "cost", "findings",
    ]  # fmt: skip
    assert msgspec.json.decode(render_json(view), type=RunReport) == view
    assert sum(p["ms"] for p in data["waterfall"]["parts"]) == pytest.approx(data["waterfall"]["step_ms"], rel=1e-9)


def test_what_was_not_measured_is_null_in_json_and_said_in_words() -> None:
    view = example_report(device="cpu", omit=frozenset({"checkpoint", "parts"}))
    data = json.loads(render_json(view))
    assert (data["checkpoint"], data["waterfall"], data["energy"]["per_step"]) == (None, None, None)
    text = " ".join(render_text(view).split())
    for said in (
        "Not measured: no checkpoint was taken.",
        "Not measured: it needs timed and profiled steps.",
        "Not measured: no energy counter was read.",
        "No GPU, and no price was given: pass --price for money figures.",
        "no NVIDIA GPU: no energy counter",
        "no checkpoint section: nothing was recorded for it",
    ):
        assert said in text


def test_headline_figures_say_their_origin_and_sample() -> None:
    markdown = render_markdown(example_report())
    assert "| step time | 37.2 ms | \\[37.1 ms, 37.3 ms\\] | measured, n=20 |" in markdown
    assert "| fusion rate | 0.82 |  | derived, n=79 |" in markdown
    assert "- step time: measured, n=20: median of the unprofiled steps, slowest rank of each;" in markdown
    assert "price: quoted: list price, on-demand" in markdown


def test_a_failed_run_says_why_and_what_to_try_first() -> None:
    text = render_text(example_report(status="failed", omit=EVERYTHING))
    top = text.partition("IN SHORT")[0]
    assert "rank 1 ran out of GPU memory" in top
    assert "halve --batch" in top
    assert "No step was measured." in text
    markdown = render_markdown(example_report(status="failed"))
    assert "<summary>Last log lines</summary>" in markdown
    assert "OutOfMemoryError" in markdown


def test_findings_carry_evidence_action_money_and_proof() -> None:
    view = example_report(idle=3.0)
    text = " ".join(render_text(view).split())
    finding = next(f for f in view.findings if f.id == "launch-bound")
    assert finding.title in text
    assert all(e in text for e in finding.evidence)
    assert "Prove it: run the same again with --cudagraphs" in text
    assert re.search(
        r"Saving \(modelled\): [\d.]+ ms a step \(\d+ %\), \$[\d.]+ per 1 M tokens, \$[\d.]+ in 100,000 steps", text
    )
    assert "do not add them up" in text


def test_bars_are_as_long_as_their_share() -> None:
    markdown = render_markdown(example_report())
    fence = re.search(r"(?s)```text\n(matrix math.*?)```", markdown)
    assert fence is not None
    lengths = {line[:20].strip(): line.count("█") for line in fence[1].splitlines()}
    assert lengths["matrix math"] == 36
    assert lengths["memory-bound kernels"] == pytest.approx(36 * 5.01 / 22.7, abs=1)
    assert "step                    37.2 ms  100 %" in fence[1]


def test_long_lists_are_folded_in_markdown_and_left_out_of_text() -> None:
    view = example_report()
    markdown, text = render_markdown(view), render_text(view)
    assert "<summary>The 20 longest kernels, alike layers together</summary>" in markdown
    assert "nvjet_up" in markdown
    assert "nvjet_up" not in text
    assert markdown.count("<details>") == markdown.count("</details>") >= 3


def test_a_fence_is_longer_than_any_in_it() -> None:
    doc = Document([Log(["```", "````` x", "plain"])])
    markdown = to_markdown(doc)
    (token,) = [t for t in MARKDOWN.parse(markdown) if t.type == "fence"]
    assert token.content == "```\n````` x\nplain\n"


def test_tables_drop_columns_in_order_and_wrap_the_wide_one() -> None:
    doc = Document()
    doc.table(
        ["name", "story", "kept", "first to go"],
        [["a" * 12, "once upon a time there was a kernel that nobody fused", "1.00 ms", "x" * 12]],
        right=(2,),
        wide=1,
        drop=(3,),
    )
    lines = to_text(doc, 50).splitlines()
    assert "first to go" not in lines[0]
    assert "kept" in lines[0]
    assert len(lines) > 3
    assert " ".join(" ".join(lines[2:]).replace("a" * 12, "").replace("1.00 ms", "").split()) == (
        "once upon a time there was a kernel that nobody fused"
    )


CELLS = st.text(max_size=40)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), st.integers(40, 100))
def test_any_table_fits_and_any_document_renders(rows: list[tuple[str, str, str]], width: int) -> None:
    doc = Document()
    doc.table(["a", "b", "c"], [[a, Code(b), c] for a, b, c in rows], right=(2,), wide=1)
    doc.blocks.append(Bars([Bar(a, b, 0.5, c) for a, b, c in rows], "total"))
    doc.items([[a, Code(b)] for a, b, _ in rows])
    doc.say(*rows[0])
    assert all(len(line) <= width for line in to_text(doc, width).splitlines())
    assert [t.type for t in MARKDOWN.parse(to_markdown(doc))].count("table_open") == 1

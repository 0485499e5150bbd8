"""Hostile text: nothing a stranger writes may act in a terminal, in Markdown or in markup."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from textual.content import Content

from costlab.app.text import markup, md, md_code, operators, plain
from tests.app.make_model import NASTY

TERMINAL = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\u202e", "\u200b", "\n\n", "\r", "\t"]
BLOCKS = ["# ", "- ", "+", "1. ", "1) ", "> ", "---", "===", "|", "`", "``", "\\", "    "]
INLINE = ["*", "__", "[a](http://x)", "<b>", "&lt;", "&#42;", "~~", "$x$", "![", "<!--", "-->"]
LINKS = ["https://x.y", "www.x.y", "mailto:a@b.c", "@user", "#12"]
TAGS = ["[bold]", "[/]", "[@click=app.quit]", "::", "{", "}"]
SPICE = st.sampled_from(TERMINAL + BLOCKS + INLINE + LINKS + TAGS)
HOSTILE = st.lists(st.one_of(SPICE, st.text(max_size=4)), max_size=8).map("".join)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def shown(markdown: str) -> tuple[list[str], str]:
    """Block token types and the visible text; fails on any inline markup."""
    tokens = MARKDOWN.parse(markdown)
    text = []
    for child in (c for t in tokens for c in t.children or []):
        if child.type == "html_inline":
            assert child.content == "<!-- -->"
        else:
            assert child.type in ("text", "text_special", "code_inline"), child
            text.append(child.content)
    return [t.type for t in tokens], "".join(text)


@given(HOSTILE)
def test_plain_is_one_harmless_line(text: str) -> None:
    out = plain(text)
    assert not [c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert plain(out) == out


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a\x1b[31;1mred\x1b[0m", "ared"),
        ("t\x1b]0;evil\x07itle", "title"),
        ("t\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "tlink"),
        ("\x9b31mx", "x"),
        ("a\nb\tc", "a b c"),
        ("\u202egnp.exe", "gnp.exe"),
        ("über µs – 3", "über µs – 3"),
    ],
)
def test_plain_examples(text: str, clean: str) -> None:
    assert plain(text) == clean


def test_plain_cuts_to_a_limit() -> None:
    assert plain("abcdef", 4) == "abc…"
    assert plain("abcd", 4) == "abcd"


@settings(max_examples=150)
@given(HOSTILE)
def test_markdown_text_is_literal(text: str) -> None:
    blocks, visible = shown(md(text))
    assert blocks in ([], ["paragraph_open", "inline", "paragraph_close"]) or not plain(text).strip()
    assert visible == plain(text).strip()


@settings(max_examples=150)
@given(HOSTILE)
@example(text="\xa0")
@example(text="\u3000#")
def test_markdown_heading_and_list_item_are_literal(text: str) -> None:
    blocks, visible = shown(f"# x{md(text, inside=True)}")
    assert blocks == ["heading_open", "inline", "heading_close"]
    # a heading's closing hashes and the white space at its end are dropped by CommonMark, which is all that may go
    assert re.sub(r"[#\s]+$", "", visible) == re.sub(r"[#\s]+$", "", f"x{plain(text)}")
    blocks, visible = shown(f"- {md(text) or 'x'}")
    assert blocks.count("list_item_open") == 1
    assert "heading_open" not in blocks


@settings(max_examples=150)
@given(HOSTILE, HOSTILE)
def test_table_cells_stay_in_their_cells(text: str, code: str) -> None:
    row = f"| {md(text, inside=True)} | {md_code(code, inside=True)} | end |"
    tokens = MARKDOWN.parse(f"| a | b | c |\n| --- | --- | --- |\n{row}")
    cells = [t.content for t in tokens if t.type == "inline"]
    assert len(cells) == 6
    assert cells[-1] == "end"


@given(HOSTILE)
def test_code_spans_hold_any_text(text: str) -> None:
    code = md_code(text)
    if not plain(text).strip():
        assert code == ""
        return
    _, visible = shown(code)
    assert visible == plain(text).strip()


@pytest.mark.parametrize("text", ["https://evil.example", "www.evil.example", "@maintainer", "fixes #1", "a@b.example"])
def test_nothing_becomes_a_link_or_a_mention(text: str) -> None:
    out = md(text)
    assert not any(pattern in out for pattern in ("https://", "www.evil", "@m", "#1", "@b"))


@settings(max_examples=150)
@given(HOSTILE)
def test_markup_is_literal_for_textual(text: str) -> None:
    want = plain(text)
    want = f"{want[:-1]}\u29f5" if want.endswith("\\") else want
    assert Content.from_markup(markup(text)).plain == want
    framed = Content.from_markup(f"[bold]{markup(text)}[/bold]!")
    assert framed.plain == f"{want}!"
    assert {str(span.style) for span in framed.spans} <= {"bold"}


def test_the_nasty_name_of_the_examples() -> None:
    assert plain(NASTY) == "[bold red]|`<script>*x* "
    assert Content.from_markup(markup(NASTY)).spans == []


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("aten.mul.Tensor", "mul"),
        ("aten.cat.default,prims.iota.default,aten.cat.default", "cat, iota"),
        ("getitem", "getitem"),
        ("mylib.op.default", "mylib.op.default"),
        ("aten.sum.dim_IntList", "sum"),
        ("aten::mm", "mm"),
        ("", ""),
    ],
)
def test_operator_names_are_shortened(text: str, short: str) -> None:
    assert operators(text) == short

"""Makes text from traces, models and files safe for a terminal, Markdown or Textual markup.

Kernel, layer and file names come from strangers. Every renderer passes them through one of these, once.
"""

from __future__ import annotations

import re
import unicodedata

# CSI, OSC/DCS/APC/PM/SOS strings and two-character escapes, with 7-bit and 8-bit introducers.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_LINE_START = re.compile(r"\A(\s*)(\d*)(?=[-+#=]|(?<=\d)[.)])")  # lists, headings, rules
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_LINK = re.compile(r"(?i)\b(https?|ftp|www|mailto|xmpp)([:.])")
_MENTION = re.compile(r"([@#])(?=\w)")
_MARKUP = re.compile(r"(\\*)(\[)")


def plain(text: object, limit: int | None = None) -> str:
    """One line without control characters, escape sequences, bidirectional overrides or invisible characters.

    Line breaks and tabs become spaces. `limit` cuts to that many characters, the last of them an ellipsis.
    """
    bare = _ESCAPES.sub("", str(text))
    out = "".join(_visible(c) for c in bare)
    if limit is not None and len(out) > limit:
        out = out[: max(limit - 1, 0)] + "…"
    return out


def _visible(char: str) -> str:
    if char in "\t\n\r\v\f\x85\u2028\u2029":
        return " "
    return "" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn") else char


def md(text: object, limit: int | None = None, *, inside: bool = False) -> str:
    """Literal text for Markdown; `inside` says that it does not begin a line (a heading's text, a table cell).

    No markup, HTML, entity, table pipe, link, mention or issue reference survives, also where GitHub makes one of
    plain text.
    """
    body = _MARKDOWN.sub(r"\\\1", plain(text, limit)).translate(_ENTITIES)
    body = body if inside else _LINE_START.sub(r"\1\2\\", body)
    body = _LINK.sub(lambda m: f"{m[1]}&#{ord(m[2])};", body)
    return _MENTION.sub(r"\1<!-- -->", body)


def md_code(text: object, limit: int | None = None, *, inside: bool = False) -> str:
    """Text as an inline code span that no backtick can leave and, `inside` a table, no pipe; "" stays empty."""
    body = plain(text, limit).strip()
    if not body:
        return ""
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if body.startswith("`") or body.endswith("`") else ""
    span = f"{fence}{pad}{body}{pad}{fence}"
    # GitHub splits a row at every unescaped pipe, in code too, and drops the backslash there and only there.
    return span.replace("|", "\\|") if inside else span


def markup(text: object, limit: int | None = None) -> str:
    """Literal text for Textual or rich console markup: no tag is read from it."""
    body = _MARKUP.sub(lambda m: m[1] * 2 + "\\[", plain(text, limit))
    tail = len(body) - len(body.rstrip("\\"))
    return body + "\\" * tail  # a trailing backslash would escape whatever markup follows

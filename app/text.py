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
_LINE_START = re.compile(r"\A(\d*)(?=(?<!\d)[-+#=]|(?<=\d)[.)])")  # lists, headings, rules
_OPERATOR = re.compile(r"\A(?:aten|prims|torch|_c10d_functional)[.:]+(\w+)(?:\.\w+)?\Z")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_LINK = re.compile(r"(?i)\b(https?|ftp|www|mailto|xmpp)([:.])")
_MENTION = re.compile(r"([@#])(?=\w)")


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


def operators(text: object, limit: int | None = None) -> str:
    """Operator names without namespace and overload: "aten.mul.Tensor,prims.iota.default" -> "mul, iota"."""
    names = (_OPERATOR.sub(r"\1", n.strip()) for n in plain(text).split(","))
    return plain(", ".join(dict.fromkeys(n for n in names if n)), limit)


def md(text: object, limit: int | None = None, *, inside: bool = False) -> str:
    """Literal text for Markdown; `inside` says that it does not begin a line (a heading's text, a table cell).

    No markup, HTML, entity, table pipe, link, mention or issue reference survives, also where GitHub makes one of
    plain text.
    """
    body = _MARKDOWN.sub(r"\\\1", plain(text, limit)).translate(_ENTITIES)
    body = body if inside else _LINE_START.sub(r"\1\\", body.lstrip())
    body = _MENTION.sub(r"\1<!-- -->", body)
    return _LINK.sub(lambda m: f"{m[1]}&#{ord(m[2])};", body)


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
    """Literal text for Textual markup: no tag is read from it, nor does it spoil one that follows.

    A backslash at the end is drawn as a look-alike, since Textual has no way to write one before a tag.
    """
    body = plain(text, limit).replace("[", "\\[")
    return f"{body[:-1]}\u29f5" if body.endswith("\\") else body

"""Mends the ways in which trace writers are known to break JSON, without touching what is valid."""

from __future__ import annotations

import re

_CONTROL = bytes(0x20 if i < 0x20 else i for i in range(256))
_NAME = re.compile(rb'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|s)"\s*:|"\s*\})', re.DOTALL)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt])|(u[0-9a-fA-F]{4})|)')
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf(?:inity)?)\b(?=\s*[,}\]])", re.IGNORECASE)
_HUGE = re.compile(rb"([:\[,]\s*)-?\d+(?:\.\d+)?[eE]\+?\d{3,}(?=\s*[,}\]])")
_TRAILING_COMMA = re.compile(rb",(\s*[\]}])")


def _escape(match: re.Match[bytes]) -> bytes:
    return match.group(0) if match.group(1) or match.group(2) else b"\\\\"


def _quote(match: re.Match[bytes]) -> bytes:
    head, text, tail = match.groups()
    if text.endswith(b"\\") and (len(text) - len(text.rstrip(b"\\"))) % 2:
        text += b"\\"
    bare = re.sub(rb'(?<!\\)((?:\\\\)*)"', rb'\1\\"', text)
    return bytes(head + bare + tail)


def repair(data: bytes) -> bytes:
    """Return `data` with control characters, bad escapes, bare quotes in names, NaN and trailing commas mended.

    Invalid UTF-8 becomes U+FFFD, a number that is none or has no finite value becomes null. The result may
    still be invalid JSON.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        data = data.decode("utf-8", "replace").encode()
    data = _NAME.sub(_quote, data.translate(_CONTROL))
    data = _BAD_ESCAPE.sub(_escape, data)
    data = _LONE_SURROGATE.sub(rb"\\ufffd", data)
    data = _NOT_A_NUMBER.sub(rb"\1null", data)
    return _TRAILING_COMMA.sub(rb"\1", _HUGE.sub(rb"\1null", data))

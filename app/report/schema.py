"""Writes docs/report-schema.md from the view models: `python -m costlab.app.report.schema > docs/report-schema.md`.

Types and keys come from the structs, meanings from the comments behind their fields or from meanings.toml, units from
the fields' names by one table.
"""

from __future__ import annotations

import inspect
import io
import sys
import tokenize
import tomllib
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from costlab.app.analysis.views import RunReport

INTRO = """\
# The JSON report

`costlab report RUN --format json` writes one object with the keys of `RunReport` below. Written by
`python -m costlab.app.report.schema`; a test holds it to the code.

- A key that has no value is `null`, never 0 and never left out. A whole section is `null` when its tables were not
  recorded.
- A `Figure` carries its own `unit` (ms, s, B, J, W, GB/s, TFLOP/s, tokens/s, samples/s; `fraction` and `rate` are 0 to
  1; money is its ISO code, with what it is for), its `source` (`measured`, `derived`, `modelled` or `quoted`), `how` it
  was obtained, the sample size `n` and an interval. Plain numbers have the unit given here.
- `waterfall.parts` sum to `waterfall.step_ms`.
- Bytes are bytes, GB/s are 1e9 bytes a second, times are ms unless the name ends in `_s` or `_us`.
- `schema_version` rises when a key is removed or changes its meaning; new keys may come at any time.
"""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}
_EXACT = {
    "bytes": "B", "lost": "B", "structural": "B", "bytes_in": "B", "bytes_out": "B", "bytes_step": "B",
    "device_total": "B", "allocated_peak": "B", "reserved_peak": "B", "host_peak": "B", "memory_bytes": "B",
    "share": "fraction", "rate": "fraction", "strict_rate": "fraction", "target": "fraction", "of_copy": "fraction",
    "overlapped": "fraction", "saves_share": "fraction", "ms": "ms", "seconds": "s", "calls": "per step",
    "gbps": "GB/s", "flops": "FLOP per step", "saves_money": "currency of cost", "saves_run_money": "currency of cost",
    "gap_run_money": "currency of cost",
    "power_limit_w": "W", "units_per_step": "tokens or samples",
}  # fmt: skip
_ENDINGS = {"_ms": "ms", "_us": "us", "_gbps": "GB/s", "_s": "s", "_bytes": "B", "_w": "W"}


def schema_markdown() -> str:
    """The whole document; ends with a line feed."""
    return "\n".join([INTRO, *(_section(s) for s in _structs(RunReport))]).rstrip() + "\n"


def _structs(root: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """`root` and every struct reachable from it, in order of first appearance."""
    seen: list[type[msgspec.Struct]] = [root]
    for struct in seen:
        yield struct
        for hint in typing.get_type_hints(struct).values():
            seen += [s for s in _inside(hint) if s not in seen]


def _inside(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [s for a in typing.get_args(hint) for s in _inside(a)]


def _section(struct: type[msgspec.Struct]) -> str:
    comments, hints = field_comments(struct), typing.get_type_hints(struct)
    rows = [
        f"| `{name}` | {type_words(hints[name])} | {unit_of(name, hints[name])} "
        f"| {comments.get(name) or meaning_of(struct, name)} |"
        for name in struct.__struct_fields__
    ]
    head = f"## {struct.__name__}\n\n{inspect.cleandoc(struct.__doc__ or '')}\n"
    return "\n".join([head, "| key | type | unit | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def type_words(hint: Any) -> str:
    """A type as a reader of JSON knows it: "number or null", "list of [Part](#part)"."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_words(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(a) for a in args)
    if origin is list:
        return f"list of {type_words(args[0])}"
    return f"object of {type_words(args[1])}"


def unit_of(name: str, hint: Any) -> str:
    """The unit of a numeric field from its name; "" for what has none, "in it" for a Figure."""
    words = type_words(hint)
    if "Figure" in words:
        return "in it"
    if "number" not in words and "integer" not in words:
        return ""
    return _EXACT.get(name) or next((u for ending, u in _ENDINGS.items() if name.endswith(ending)), "")


@cache
def _meanings() -> dict[str, str]:
    text = resources.files("costlab.app.report").joinpath("meanings.toml").read_text(encoding="utf-8")
    return {str(k): str(v) for k, v in tomllib.loads(text)["meanings"].items()}


def meaning_of(struct: type[msgspec.Struct], name: str) -> str:
    """The meaning of a field that has no comment; "" where meanings.toml lacks it."""
    return _meanings().get(f"{struct.__name__}.{name}") or _meanings().get(name, "")


def field_comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> the comment that stands behind it in the source."""
    source, out = inspect.getsource(struct), {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            name = token.line.partition(":")[0].strip()
            if name in struct.__struct_fields__:
                out[name] = token.string.lstrip("# ").replace("|", "\\|")
    return out


if __name__ == "__main__":
    sys.stdout.write(schema_markdown())

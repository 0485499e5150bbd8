"""The doctor's findings as text: one line a check, what is missing first said by letter, not by colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from costlab.app.text import plain

_MARK = {"ok": "ok     ", "warn": "look   ", "missing": "absent "}


def render_doctor(lines: Sequence[tuple[str, str, str]], width: int = 100) -> str:
    """`lines` are (check, ok | warn | missing, sentence); long sentences wrap under their own column."""
    label = max((len(check) for check, _, _ in lines), default=0)
    out = []
    for check, status, sentence in lines:
        head = f"{_MARK.get(status, status)}{check:<{label}}  "
        out.append(textwrap.fill(plain(sentence), width, initial_indent=head, subsequent_indent=" " * len(head)))
    return "\n".join(out)

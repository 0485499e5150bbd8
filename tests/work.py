"""How much work a piece of code does, counted in calls: the same on an idle machine and on a loaded one.

Seconds belong in tests/benchmarks; a test asks how the work grows with its input, which no clock has a say in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Work:
    """Calls made by this thread, of Python and of C functions."""

    calls: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Counts the calls that this thread makes inside the block."""
    work = Work()

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        if event in {"call", "c_call"}:
            work.calls += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield work
    finally:
        sys.setprofile(before)

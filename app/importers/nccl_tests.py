"""The text that nccl-tests and rccl-tests print, to lay beside measurements of one's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_LINES = 200_000
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+([a-z]\w*)\s+(-?\d+)\s+(.+)")
_OP = re.compile(r"(?:starting:|^#?\s*)\s*(?:\S*/)?(\w+?)_perf\b", re.MULTILINE)
_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


@dataclass(frozen=True)
class Timing:
    """One half of a row: time in us, bandwidths in GB/s, wrong elements.

    `wrong` is None for N/A and for versions that print the largest error instead of a count.
    """

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class PeerRow:
    """One size of the foreign benchmark."""

    size: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Timing | None
    in_place: Timing | None


@dataclass
class PeerResult:
    """`op` is "" where the text does not name it; `refused` are lines that look like rows and cannot be read."""

    op: str
    rows: list[PeerRow] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def parse_nccl_tests(text: str) -> PeerResult:
    """The rows of one nccl-tests run; none where the text is of something else."""
    named = _OP.search(text)
    name = named[1] if named else ""
    result = PeerResult(_OPS.get(name, name))
    for number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        match = _ROW.fullmatch(line.rstrip())
        if match is None:
            continue
        size, count, dtype, redop, root, rest = match.groups()
        halves = _halves(rest.split())
        if halves is None:
            result.refused.append(f"line {number}: {line.strip()[:80]}")
        else:
            result.rows.append(PeerRow(int(size), int(count), dtype, redop, int(root), *halves))
    return result


def _halves(cells: list[str]) -> tuple[Timing | None, Timing | None] | None:
    """Out of place and in place; versions without the column #wrong have three cells each."""
    width = {8: 4, 6: 3, 4: 4, 3: 3}.get(len(cells))
    if width is None:
        return None
    try:
        parts = [_timing(cells[i : i + width]) for i in range(0, len(cells), width)]
    except ValueError:
        return None
    return parts[0], parts[1] if len(parts) > 1 else None


def _timing(cells: list[str]) -> Timing | None:
    if cells[0].upper() == "N/A":
        return None
    wrong = cells[3] if len(cells) > 3 else "N/A"
    time_us, algbw, busbw = (float(c) for c in cells[:3])
    return Timing(time_us, algbw, busbw, int(wrong) if wrong.isdigit() else None)

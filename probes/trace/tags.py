"""The annotations of our own schedules: what a call was, and where it was made.

A profiler keeps no more of an annotation than its name, so the name says it all. One call may show as several ranges,
on the threads of its tracks; they carry the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from costlab.probes.trace import classify as c
from costlab.probes.trace.columns import NONE, Message
from costlab.probes.trace.host import COMM, Host, Indices, Mask

_CALL = re.compile(
    r"(?P<kind>[a-z_]{1,32}) schedule=(?P<schedule>[a-z0-9_-]{1,40}) bytes=(?P<bytes>[0-9]{1,18})"
    r" dtype=(?P<dtype>[a-z0-9_]{1,24}) ranks=(?P<ranks>[0-9]{1,9}(?:,[0-9]{1,9})*) call=(?P<call>[0-9.]{1,40})"
)
_ISSUED = re.compile(r"costlab::comm-issued::([0-9.]{1,40})")


@dataclass(frozen=True, slots=True)
class Tag:
    """What a call's annotation says: `nbytes` is the whole message, ranks are global ("0,1")."""

    kind: str
    schedule: str
    nbytes: int
    dtype: str
    ranks: str
    call: str

    def message(self) -> Message:
        """As the profiler's own metadata would say it; no sizes where the dtype is unknown."""
        count = self.ranks.count(",") + 1
        size = c.element_size(self.dtype)
        whole = self.nbytes // size if size else None
        part = whole // count if whole is not None else None
        return Message(
            collective=self.kind,
            elements_in=part if self.kind == "all_gather" else whole,
            elements_out=part if self.kind == "reduce_scatter" else whole,
            dtype=self.dtype,
            group_size=count,
            group_ranks=self.ranks,
        )


def parse(text: str) -> Tag | None:
    """The tag of an annotation's text behind `costlab::comm::`; None for anything else."""
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    return Tag(found["kind"], found["schedule"], int(found["bytes"]), found["dtype"], found["ranks"], found["call"])


@dataclass(slots=True)
class TaggedCall:
    """One call on the host: its ranges on all threads, and the event it was issued by."""

    tag: Tag
    ranges: Indices
    issue: int


def host_calls(host: Host) -> tuple[list[TaggedCall], int]:
    """The calls whose work ran on the host, and how many were issued whose work no thread recorded."""
    events, ranges = host.events, np.flatnonzero(host.matching(COMM.fullmatch))
    names = events.name[ranges]
    issued = _issued(host)
    found = []
    for name in dict.fromkeys(names.tolist()):
        tag = parse(host.text(ranges[names == name][:1], COMM)[0])
        if tag is not None:
            mine = ranges[names == name]
            found.append(TaggedCall(tag, mine, issued.pop(tag.call, int(mine[0]))))
    return found, len(issued)


def _issued(host: Host) -> dict[str, int]:
    marks = np.flatnonzero(host.matching(_ISSUED.fullmatch))
    return dict(zip(host.text(marks, _ISSUED), marks.tolist(), strict=True))


def under_a_tag(host: Host, index: Indices) -> Mask:
    """Which host events lie in a tagged range of their own thread."""
    events = host.events
    found: Mask = host.named("comm", COMM, events.thread[index].astype(np.int64), events.start[index]) != NONE
    return found

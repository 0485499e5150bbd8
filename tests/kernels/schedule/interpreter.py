"""Runs the programs of all ranks in one process, in a random order that their rules allow.

Thousands of cases take seconds. Values are counts of contributions, so a wrong sum shows which rank's part is missing
or counted twice.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

from costlab.kernels.schedule.plan import Layout, Plan
from costlab.kernels.schedule.program import Kind, Program, build

Element = Counter[int]  # how often each rank's contribution is in the value


class Deadlock(AssertionError):
    """No rank can go on."""


def run(plan: Plan, layout: Layout, numel: int, seed: int) -> list[list[Element]]:
    """The tensors of all ranks after the all-reduce."""
    size = sum(map(len, layout))
    return interpret([build(plan, layout, numel, rank) for rank in range(size)], numel, seed)


def interpret(programs: list[Program], numel: int, seed: int) -> list[list[Element]]:
    """Steps start when `after` allows; a message carries the value at the moment its step starts."""
    choose = random.Random(seed)
    values: list[list[Element]] = [[Counter([rank])] * numel for rank in range(len(programs))]
    started: dict[tuple[int, str], bool] = defaultdict(bool)
    ended: dict[tuple[int, str], int] = defaultdict(int)
    mail: dict[tuple[str, int, int], deque[list[Element]]] = defaultdict(deque)
    tracks = [(rank, track) for rank, program in enumerate(programs) for track in program]
    while tracks:
        choose.shuffle(tracks)
        moved = False
        for rank, track in tracks:
            step = programs[rank][track][ended[rank, track]]
            if not started[rank, track] and all(ended[rank, t] >= n for t, n in step.after):
                started[rank, track] = moved = True
                for op in step.ops:
                    if op.kind == Kind.SEND and op.stop > op.start:
                        mail[track, rank, op.peer].append(values[rank][op.start : op.stop])
            receives = [op for op in step.ops if op.kind != Kind.SEND and op.stop > op.start]
            if started[rank, track] and all(mail[track, op.peer, rank] for op in receives):
                for op in receives:
                    got = mail[track, op.peer, rank].popleft()
                    assert len(got) == op.stop - op.start, "sender and receiver disagree on the size"
                    here = values[rank][op.start : op.stop]
                    new = got if op.kind == Kind.RECV else [a + b for a, b in zip(here, got, strict=True)]
                    values[rank][op.start : op.stop] = new
                ended[rank, track] += 1
                started[rank, track] = False
                moved = True
        if not moved:
            raise Deadlock(f"{len(tracks)} tracks wait")
        tracks = [(r, t) for r, t in tracks if ended[r, t] < len(programs[r][t])]
    assert not any(mail.values()), "messages that nobody received"
    return values

"""Which rank a foreign trace belongs to: what its parts say, what is chosen, and where they disagree."""

from __future__ import annotations

import re
from dataclasses import dataclass

_IN_NAME = (
    re.compile(r"(?:^|[^a-z])rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])(?:worker|gpu)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z0-9])r(\d{1,6})(?![a-z0-9])", re.IGNORECASE),
)


@dataclass(slots=True, frozen=True)
class Claims:
    """What is known of one trace's rank."""

    name: str  # base name of the file
    stated: int | None  # distributedInfo.rank
    events: frozenset[int]  # from the metadata of its collectives

    @property
    def in_name(self) -> int | None:
        """Rank in the file's name, None where it has none."""
        found = (pattern.search(self.name) for pattern in _IN_NAME)
        return next((int(m.group(1)) for m in found if m), None)

    @property
    def in_events(self) -> int | None:
        """Rank in the events, None where they say none or several."""
        return next(iter(self.events)) if len(self.events) == 1 else None


def assign(claims: list[Claims]) -> tuple[list[int], list[str]]:
    """A rank for every trace, all different, and notes on everything that was not plain.

    The file's own metadata counts first, then its events, then its name. A rank that is claimed twice goes by the other
    claims; a trace left without gets the lowest free number, which the notes say.
    """
    notes = [note for claim in claims for note in _conflicts(claim)]
    chosen: list[int | None] = [None] * len(claims)
    taken: set[int] = set()
    for source in ("stated", "in_events", "in_name"):
        asked = [getattr(c, source) for c in claims]
        for i, rank in enumerate(asked):
            if chosen[i] is None and rank is not None and rank not in taken and _alone(i, rank, asked, chosen):
                chosen[i] = rank
                taken.add(rank)
    return _fill(claims, chosen, taken, notes), notes


def _alone(i: int, rank: int, asked: list[int | None], chosen: list[int | None]) -> bool:
    """No other trace still without a rank claims the same in the same way."""
    return not any(other == rank for j, other in enumerate(asked) if j != i and chosen[j] is None)


def _fill(claims: list[Claims], chosen: list[int | None], taken: set[int], notes: list[str]) -> list[int]:
    free = (n for n in range(len(claims) + len(taken) + 1) if n not in taken)
    out = []
    for claim, rank in zip(claims, chosen, strict=True):
        out.append(next(free) if rank is None else rank)
        if rank is None:
            why = "its rank is claimed by another file" if _any(claim) else "it does not say its rank"
            notes.append(f"{claim.name}: {why}; stored as rank {out[-1]}")
    return out


def _any(claim: Claims) -> bool:
    return any(r is not None for r in (claim.stated, claim.in_events, claim.in_name))


def _conflicts(claim: Claims) -> list[str]:
    """A sentence where the parts of a trace disagree about its rank."""
    said = {
        "its metadata": claim.stated,
        "its events": claim.in_events,
        "its name": claim.in_name,
    }
    known = {source: rank for source, rank in said.items() if rank is not None}
    notes = []
    if len(set(known.values())) > 1:
        notes.append(f"{claim.name}: " + ", ".join(f"{source} says rank {rank}" for source, rank in known.items()))
    if len(claim.events) > 1:
        ranks = ", ".join(map(str, sorted(claim.events)))
        notes.append(f"{claim.name}: its collectives come from several ranks ({ranks})")
    return notes

"""Which all-reduce schedule a run chose for which message, as its manifest keeps it. Torch-free."""

from __future__ import annotations

import msgspec

EXTRA = "schedules"  # key of the manifest's `extra`


class ScheduleChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message size and what reduces it. `seconds` by plan, `backend` being the library's own all-reduce.

    `used` tells a message of the training step, whose times are read off the curves, from a size that was measured.
    """

    asked: str  # the option's value
    nbytes: int
    ranks: int
    hosts: int
    schedule: str  # with its chunks
    seconds: dict[str, float]  # the best plan of each schedule, the chosen one among them
    library: str = ""  # what `backend` is
    used: bool = False

"""How `costlab` ends. Documented in the README; scripts rely on it."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    REGRESSION = 1  # `costlab check`: the step got slower than allowed
    USAGE = 2  # an option, or a combination of options, that cannot work
    RUN_FAILED = 3  # the workload was started and failed; the run is kept
    CANCELLED = 4  # stopped by the user; the run is kept
    BAD_INPUT = 5  # a run, trace or file that cannot be read

"""Work that may fail in any way torch knows, as a result or one line of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from costlab.probes.sources import scrub

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or None and what went wrong in one line; torch's errors come in every class."""
    from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

    try:
        return work(), ""
    except (Exception, CheckpointException) as error:
        return None, words(error)


def words(error: BaseException) -> str:
    """Class and first line of an error; of a CheckpointException, of the first rank that failed."""
    failures = getattr(error, "failures", None)  # CheckpointException: rank -> (exception, traceback)
    if isinstance(failures, dict) and failures:
        rank, wrapped = next(iter(failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {words(cause)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return scrub(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")[:300]

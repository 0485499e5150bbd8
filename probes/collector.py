"""Python's garbage collector during the steps: how long it held them, and steps without the burden of what is there.

A full collection visits every container object of the process, a million and more once torch has compiled, and Python
runs nothing else meanwhile. Times come from `gc.callbacks`, which the collector calls around each collection in
whatever thread it runs.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any


class Watch:
    """Adds up the time of collections; `take` hands it over and starts again from zero."""

    def __init__(self) -> None:
        self._began: int | None = None
        self._ns = 0

    def __call__(self, phase: str, _info: dict[str, Any]) -> None:
        """What the collector calls; "start" and "stop" never nest."""
        now = time.perf_counter_ns()
        if phase == "start":
            self._began = now
        elif self._began is not None:
            self._ns += now - self._began
            self._began = None

    def take(self) -> float:
        """ms since the last call."""
        taken, self._ns = self._ns, 0
        return taken / 1e6


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Time the collections inside."""
    watch = Watch()
    gc.callbacks.append(watch)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch)


def settle() -> None:
    """Collect what compiling and the first steps left, so that this does not fall due in the timed steps.

    CPython collects all when what is alive has grown by a quarter: as the first steps end, and then hardly again in a
    training. Within twenty timed steps it would weigh as if it came in each twenty.
    """
    gc.collect()


def freeze() -> int:
    """Collect once, and leave all that survives out of every later collection; the number of objects left out."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()

"""Progress of a run on stderr: one updating line on a terminal, one line a phase elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from costlab.app.text import plain
from costlab.probes.records import AnyEvent, Failure, Log, Manifest, PhaseEvent, Progress, StepEvent


class Narrator:
    """Follows the event stream of rank 0 and every rank's warnings."""

    def __init__(self, sink: TextIO, *, ranks: int, quiet: bool = False) -> None:
        """`sink` is a text stream; nothing is written when `quiet`."""
        self.sink, self.ranks, self.quiet = sink, ranks, quiet
        self.live = sink.isatty()
        self.started = time.monotonic()
        self.phase = ""
        self._drawn = False

    def tell(self, event: AnyEvent) -> None:
        """Show one event."""
        if self.quiet:
            return
        if isinstance(event, Failure):
            self._line(f"rank {event.rank}: {plain(event.message)}")
        elif isinstance(event, Log) and event.level != "info":
            self._line(f"rank {event.rank}: {plain(event.text)}")
        elif event.rank == 0:
            self._tell_rank0(event)

    def _tell_rank0(self, event: AnyEvent) -> None:
        if isinstance(event, PhaseEvent) and event.phase != "done":
            self.phase = event.phase
            self._line(f"{event.phase:<10} {plain(event.detail)}".rstrip())
        elif isinstance(event, Progress) and self.live:
            eta = f"  about {event.eta_s:.0f} s left" if event.eta_s else ""
            self._status(f"{event.phase:<10} {event.done}/{event.total}  {plain(event.detail)}{eta}")
        elif isinstance(event, StepEvent) and self.live:
            self._status(f"{self.phase:<10} step {event.step + 1}  {event.ms:.1f} ms")

    def _stamp(self) -> str:
        return f"{time.monotonic() - self.started:6.1f} s  "

    def _line(self, text: str) -> None:
        self.close()
        self.sink.write(f"{self._stamp()}{text}\n")
        self.sink.flush()

    def _status(self, text: str) -> None:
        self.sink.write(f"\r\x1b[2K{self._stamp()}{text[:100]}")
        self.sink.flush()
        self._drawn = True

    def close(self) -> None:
        """Clear the status line."""
        if self._drawn:
            self.sink.write("\r\x1b[2K")
            self.sink.flush()
            self._drawn = False

    def conclude(self, manifest: Manifest) -> None:
        """How the run ended, in one or two lines."""
        failure = manifest.failure
        if failure is not None:
            self.sink.write(f"costlab: {plain(failure.message)}\n")
            for line in failure.log_tail[-5:]:
                self.sink.write(f"  | {plain(line)}\n")
            if failure.advice:
                self.sink.write(f"  try: {plain(failure.advice)}\n")
        elif not self.quiet:
            self.sink.write(f"{self._stamp()}{manifest.status}\n")
        self.sink.flush()

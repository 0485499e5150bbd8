"""Progress of a what-if on stderr: a line a leg, and on a terminal one line that is rewritten while the leg runs."""

from __future__ import annotations

from typing import TextIO

from costlab.app.text import plain
from costlab.app.whatif import events
from costlab.app.whatif.results import LegRecord, Prediction
from costlab.probes.records import Progress


def clock(seconds: float) -> str:
    """1:05 for 65 seconds."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes}:{rest:02d}"


class WhatIfNarrator:
    """Follows the events of a what-if."""

    def __init__(self, sink: TextIO, *, quiet: bool = False) -> None:
        """Nothing is written when `quiet`."""
        self.sink, self.quiet = sink, quiet
        self.live = sink.isatty()
        self._leg: events.LegStarted | None = None

    def tell(self, event: events.WhatIfEvent) -> None:
        """Show one event."""
        if self.quiet:
            return
        match event:
            case events.LegStarted():
                self._leg = event
                self._status("starting")
            case events.LegEvent(inner) if isinstance(inner, Progress) and inner.rank == 0:
                self._status(f"{inner.phase} {inner.done}/{inner.total}")
            case events.LegEnded(record):
                self._ended(record)
            case events.Predicted(predictions):
                self._predicted(predictions)
            case _:
                pass

    def line(self, text: str) -> None:
        """A line of its own."""
        if not self.quiet:
            self.close()
            self.sink.write(f"{plain(text)}\n")
            self.sink.flush()

    def close(self) -> None:
        """Clear the line that is rewritten."""
        if self.live:
            self.sink.write("\r\x1b[2K")

    def _status(self, doing: str) -> None:
        leg = self._leg
        if not self.live or leg is None:
            return
        eta = f"  about {clock(leg.eta_s)} left" if leg.eta_s is not None else ""
        self.sink.write(f"\r\x1b[2Kleg {leg.number}/{leg.total}  {plain(leg.arm, 30)}  {plain(doing, 30)}{eta}")
        self.sink.flush()

    def _ended(self, record: LegRecord) -> None:
        leg = self._leg
        place = f"leg {leg.number}/{leg.total}" if leg else "leg"
        what = f"{record.step_ms:.4g} ms a step" if record.step_ms is not None else record.status
        failure = f": {record.failure}" if record.failure else ""
        eta = f"  about {clock(leg.eta_s)} left" if leg and leg.eta_s is not None else ""
        self.line(f"{place}  round {record.round + 1}  {record.arm:<20}  {what}{failure}{eta}")

    def _predicted(self, predictions: dict[str, Prediction | None]) -> None:
        for name, found in predictions.items():
            said = f"{found.change * 100:+.1f} %: {found.how}" if found else "no model says what this does"
            self.line(f"predicted  {name}  {said}")

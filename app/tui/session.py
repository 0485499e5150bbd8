"""What the panes share: the open run, the stored runs, marks, and a clock that tests can hold still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costlab.app.analysis.views import RunReport
from costlab.app.store import RunSummary
from costlab.app.tui.live import LiveRun
from costlab.app.tui.messages import Loaded
from costlab.probes.records import AnyEvent


@dataclass(frozen=True)
class Proof:
    """What a what-if showed of the option that a finding names."""

    verdict: str  # faster | slower | no difference | invalid
    words: str = ""  # the measured change


def proof_key(run_id: str, item: str) -> str:
    """Key of a proof: the run that was the baseline, and the option as an item of a what-if."""
    return f"{run_id} {item}"


@dataclass
class Session:
    """The state of one sitting; only the app changes it."""

    clock: Callable[[], float] = time.time
    loaded: Loaded | None = None
    live: LiveRun | None = None
    runs: list[RunSummary] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    listed: bool = False
    problem: str = ""
    given: list[Path] = field(default_factory=list)
    marked: list[Path] = field(default_factory=list)
    measuring: bool = False  # a what-if runs: another run would disturb it
    proofs: dict[str, Proof] = field(default_factory=dict)  # what what-ifs of this sitting showed, by proof_key

    @property
    def report(self) -> RunReport | None:
        """The open run's report."""
        return self.loaded.report if self.loaded else None

    @property
    def recording(self) -> bool:
        """Whether a run is being recorded."""
        return self.live is not None and self.live.active

    @property
    def events(self) -> Sequence[AnyEvent]:
        """Events of the run being recorded, else of the open one."""
        if self.live is not None and (self.live.active or self.loaded is None):
            return tuple(self.live.events)
        return self.loaded.events if self.loaded else ()

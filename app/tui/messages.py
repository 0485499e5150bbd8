"""Results of slow work, posted by workers. Workers touch nothing else of the user interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from costlab.app.analysis.views import RunReport
from costlab.app.store import RunSummary
from costlab.app.tui.live import State
from costlab.probes.records import AnyEvent, FailureInfo

if TYPE_CHECKING:
    from costlab.app.analysis.compare import Comparison


@dataclass(frozen=True)
class Loaded:
    """An opened run: its report and the last events of its stream."""

    path: Path
    report: RunReport
    events: Sequence[AnyEvent] = ()
    sample: str = ""


@dataclass
class RunLoaded(Message):
    """A run was read and analysed."""

    loaded: Loaded


@dataclass
class RunsListed(Message):
    """The stored runs and the samples at hand."""

    runs: list[RunSummary]
    samples: list[str]
    problem: str = ""


@dataclass
class PairLoaded(Message):
    """Two runs were read and compared."""

    comparison: Comparison


@dataclass
class WorkFailed(Message):
    """A worker could not do what it was asked; `sentence` is safe to show, `details` may be long."""

    title: str
    sentence: str
    details: Sequence[str] = ()
    advice: str = ""


@dataclass
class EventsWaiting(Message):
    """The launcher's thread has put events into the queue."""


@dataclass
class RunEnded(Message):
    """The launcher returned or raised."""

    state: State
    run_dir: Path
    failure: FailureInfo | None = None
    sentence: str = ""


@dataclass
class ExportDone(Message):
    """A report was written."""

    path: Path


@dataclass
class ExportExists(Message):
    """A report was not written because the file is there."""

    path: Path
    form: str
    text: str = ""  # what was to be written, where it is not the whole report


@dataclass
class RunsDeleted(Message):
    """Run directories were removed."""

    paths: list[Path] = field(default_factory=list)


def unexpected(what: str, error: BaseException) -> WorkFailed:
    """The message for an exception nobody foresaw, with the end of its traceback."""
    import traceback

    tail = [text for part in traceback.format_exception(error) for text in part.splitlines()][-12:]
    sentence = f"could not {what}: {type(error).__name__}: {error}"
    advice = "this is a defect in costlab: please report it with these lines"
    return WorkFailed("unexpected error", sentence, tail, advice)

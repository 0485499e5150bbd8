"""What a what-if tells while it runs, for the command line and the pane."""

from __future__ import annotations

from dataclasses import dataclass, field

from costlab.app.whatif.results import LegRecord, Prediction, WhatIfResult
from costlab.probes.records import AnyEvent


@dataclass(frozen=True)
class LegStarted:
    """A leg begins: the `number`-th of at most `total`; `eta_s` until the end where it can be told."""

    arm: str
    round: int
    number: int
    total: int
    eta_s: float | None


@dataclass(frozen=True)
class LegEvent:
    """An event of the leg that runs."""

    event: AnyEvent


@dataclass(frozen=True)
class LegEnded:
    """A leg is over."""

    record: LegRecord


@dataclass(frozen=True)
class Predicted:
    """What the models foretell, before any variant has run; None for a variant without a model."""

    predictions: dict[str, Prediction | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Interim:
    """The state after a complete round."""

    result: WhatIfResult


@dataclass(frozen=True)
class Ended:
    """The final result."""

    result: WhatIfResult


WhatIfEvent = LegStarted | LegEvent | LegEnded | Predicted | Interim | Ended

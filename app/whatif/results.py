"""What a what-if found: plain values that the store keeps and every renderer shows."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from costlab.app.analysis.compare import Change
from costlab.app.analysis.views import Figure, View
from costlab.app.whatif.spec import BASELINE, CONTROL, WhatIfSpec
from costlab.app.whatif.stats import Verdict
from costlab.probes.records import Environment

LegStatus = Literal["complete", "failed", "cancelled"]
WhatIfStatus = Literal["running", "complete", "stopped early", "out of time", "cancelled", "failed"]
ParityVerdict = Literal["same", "different", "unknown", "not comparable"]


class LegRecord(View, frozen=True, kw_only=True):
    """One leg: a run of its own. `losses` map a step to its loss, the mean over ranks; "nan" and "inf" are None."""

    arm: str
    round: int
    position: int  # within the round, from 0
    directory: str  # below the what-if's own
    seed: int
    status: LegStatus
    seconds: float
    step_ms: float | None = None  # median of the timed steps, each of its slowest rank
    steps: int = 0
    units_per_step: int = 0
    losses: dict[int, float | None] = msgspec.field(default_factory=dict)
    peak_bytes: float | None = None
    step_joules: float | None = None
    gc_ms: float | None = None  # garbage collection per step, mean over the timed steps
    failure: str = ""
    failure_kind: str = ""
    gradients: dict[str, float] = msgspec.field(default_factory=dict)  # L2 norm by tensor, of one step
    advice: str = ""


class Prediction(View, frozen=True, kw_only=True):
    """A change of the step time foretold from the baseline's report; `error` is measured less predicted."""

    change: float
    how: str
    error: float | None = None
    inside: bool | None = None  # whether the measured interval holds it


class Parity(View, frozen=True, kw_only=True):
    """Whether the losses are the baseline's. All differences are of the mean loss over the timed steps, by seed."""

    verdict: ParityVerdict
    why: str
    difference: float | None = None  # variant less baseline at the same seed, mean over seeds
    low: float | None = None  # 95 % interval of it
    high: float | None = None
    largest: float | None = None  # of any step and seed
    rerun: float | None = None  # the same of the baseline run again with the same seed
    spread: float | None = None  # standard deviation of the baseline over seeds
    seeds: int = 0
    steps: int = 0
    gradient: float | None = None  # relative difference of the gradient's norm at equal seed, one step
    worst_tensor: str = ""
    worst: float | None = None  # the same of the tensor that differs most, relative to its norm
    worst_again: float | None = None  # the same of the baseline run again


class SaveEffect(View, frozen=True, kw_only=True):
    """Saving another way: the stall of one save and its bytes, each foretold from the baseline's leg and measured."""

    before: str  # way of saving, as in the run's checkpoint section
    after: str
    stall: Change  # ms
    stall_before: Figure | None = None
    stall_after: Figure | None = None
    bytes: Change  # all ranks
    predicted_stall: Figure | None = None
    stall_how: str = ""
    predicted_bytes: float | None = None
    bytes_how: str = ""
    restored: bool | None = None  # bit by bit, or for a lossy save within its bound
    lossy: bool = False
    update_error: float | None = None  # first resumed Adam update, relative
    note: str = ""  # why it was not measured


class Arm(View, frozen=True, kw_only=True):
    """One arm of the what-if with everything measured of it."""

    name: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    factors: list[str] = msgspec.field(default_factory=list)
    verdict: Verdict
    measure: str = "step time"  # or "time per token" where a step does other work
    step_ms: Figure | None = None
    change: Figure | None = None  # relative, against the baseline; negative is faster
    predicted: Prediction | None = None
    parity: Parity | None = None
    deltas: list[Change] = msgspec.field(default_factory=list)
    money: Change | None = None  # per 1 M units
    saves: SaveEffect | None = None  # where it saves in another way
    fits: bool = True
    needs_bytes: float | None = None  # at least so much more memory
    failure: str = ""
    advice: str = ""
    notes: list[str] = msgspec.field(default_factory=list)  # what its runs say that the baseline's do not
    legs: int = 0
    run: str = ""  # directory of the leg that was profiled, below the what-if's own


class FactorEffect(View, frozen=True, kw_only=True):
    """A main effect (one factor) or an interaction (several)."""

    factors: list[str]
    change: Figure


class WhatIfResult(View, frozen=True, kw_only=True):
    """A finished, or ended, what-if."""

    schema_version: int = 1
    id: str
    created: str
    title: str
    status: WhatIfStatus
    spec: WhatIfSpec
    spec_key: str
    environment_key: str
    environment: Environment
    unit: str  # tokens | samples
    baseline: Arm
    control: Arm
    variants: list[Arm]
    effects: list[FactorEffect] = msgspec.field(default_factory=list)
    rounds: int = 0
    level: float = 0.98
    noise: float | None = None  # relative spread of one leg
    price: Figure | None = None
    currency: str = "USD"
    legs: list[LegRecord] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)

    def arm(self, name: str) -> Arm:
        """An arm by its name; KeyError for one that there is not."""
        return {a.name: a for a in (self.baseline, self.control, *self.variants)}[name]


def is_variant(name: str) -> bool:
    """Whether an arm is neither the baseline nor its control."""
    return name not in (BASELINE, CONTROL)

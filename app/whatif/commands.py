"""The work behind the commands: answer from the cache or run, and render. The command line itself is in cli.py."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from costlab.app.command import cancelling
from costlab.app.exit_codes import Exit
from costlab.app.whatif.engine import WhatIf
from costlab.app.whatif.legs import LauncherFactory
from costlab.app.whatif.narrate import WhatIfNarrator
from costlab.app.whatif.results import WhatIfResult
from costlab.app.whatif.spec import WhatIfSpec, environment_key, make_whatif, spec_key
from costlab.app.whatif.stats import LOOKS
from costlab.app.whatif.store import find_cached, list_whatifs, new_whatif_directory
from costlab.probes.launch import Launcher
from costlab.probes.spec import RunSpec

DEFAULT_LEGS = 4


@dataclass(frozen=True)
class Answer:
    """A result and where it is kept; `cached` when it was measured before."""

    result: WhatIfResult
    directory: Path
    cached: bool = False

    @property
    def exit(self) -> Exit:
        """The exit code: a variant that failed is a result, a baseline that failed is not."""
        return {"cancelled": Exit.CANCELLED, "failed": Exit.RUN_FAILED}.get(self.result.status, Exit.OK)


def ask(
    spec: RunSpec,
    items: Sequence[str],
    settings: Sequence[str] = (),
    *,
    factorial: bool = False,
    legs: int | None = None,
    budget_s: float | None = None,
    checkpoint: bool = False,
) -> WhatIfSpec:
    """The what-if of a command's options. Without --legs there are 4, or with --budget up to 12. Raises SpecError."""
    most = legs if legs is not None else DEFAULT_LEGS if budget_s is None else LOOKS[-1]
    return make_whatif(spec, items, settings, factorial=factorial, legs=most, budget_s=budget_s, checkpoint=checkpoint)


def expectation(whatif: WhatIfSpec, parent: Path | None = None) -> str:
    """How many legs there will be, and how long they take if those of an earlier what-if of this workload say it."""
    arms, legs = len(whatif.arms()), whatif.legs
    words = f"{arms} arms x {'at most ' if whatif.budget_s else ''}{legs} legs"
    keys = ("workload", "size", "ranks", "device", "compile", "dtype")
    alike = [
        leg
        for _, known in list_whatifs(parent)
        if all(getattr(known.spec.baseline, k) == getattr(whatif.baseline, k) for k in keys)
        for leg in known.legs
        if leg.status == "complete"
    ]
    first = [leg.seconds for leg in alike if leg.round == 0]
    later = [leg.seconds for leg in alike if leg.round > 0]
    if not first or not later:
        return f"{words}; the first round compiles, profiles and saves, later ones are short"
    total = arms * (statistics.fmean(first) + (legs - 1) * statistics.fmean(later))
    return f"{words}; about {total:.0f} s by {len(alike)} legs measured before"


def answer(
    whatif: WhatIfSpec, *, fresh: bool = False, quiet: bool = False, launcher: LauncherFactory = Launcher
) -> Answer:
    """The stored answer if this machine gave one, else run; progress goes to stderr. Raises StoreError."""
    narrator = WhatIfNarrator(sys.stderr, quiet=quiet)
    known = None if fresh else find_cached(spec_key(whatif), environment_key())
    if known is not None:
        path, result, stale = known
        if not stale:
            narrator.line(f"measured before, {result.created}: {result.id}; --fresh measures it again")
            return Answer(result, path, cached=True)
        narrator.line(f"{result.id} answers this, but is stale: hardware or software have changed; measuring again")
    narrator.line(expectation(whatif))
    directory = new_whatif_directory()
    engine = WhatIf(whatif, directory, launcher=launcher)
    try:
        with cancelling(engine.cancel):
            result = engine.run(narrator.tell)
    finally:
        narrator.close()
    narrator.line(f"kept in {directory}")
    return Answer(result, directory)

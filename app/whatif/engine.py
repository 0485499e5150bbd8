"""Runs a what-if: rounds of legs, each a fresh process group, until it is done, decided, out of time or cancelled.

A variant that fails is a result: it takes no part in later rounds, the others go on. A baseline that fails ends the
what-if, since nothing can be compared with it.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from costlab.app.store import StoreError
from costlab.app.text import plain
from costlab.app.whatif import events, stats
from costlab.app.whatif.legs import LauncherFactory, Launching, leg_directory, leg_spec, read_leg
from costlab.app.whatif.outcome import Evidence, conclude
from costlab.app.whatif.predict import predict
from costlab.app.whatif.results import LegRecord, WhatIfResult, WhatIfStatus, is_variant
from costlab.app.whatif.spec import BASELINE, WhatIfSpec, environment_key, spec_key
from costlab.app.whatif.store import record_predictions, save
from costlab.probes.launch import Launcher, LaunchError
from costlab.probes.warm import Template, TemplateError, WarmLauncher

Told = Callable[[events.WhatIfEvent], None]
NO_FORK = "COSTLAB_NO_FORK"
MOST_REPEATED = 2  # disturbed rounds that are measured again
LATER_LEG = 0.45  # of a first leg's time, until one has ended: seen on H200s, with and without saves in the first round


@contextmanager
def warm(
    launcher: LauncherFactory, spec: WhatIfSpec, note: Callable[[str], None] = lambda _: None
) -> Iterator[LauncherFactory]:
    """The launcher for all legs: of forks where that is possible on this host, unless COSTLAB_NO_FORK is set.

    `note` is told, in a sentence, if legs cannot be forked, now or later.
    """
    if launcher is not Launcher or spec.baseline.nnodes > 1 or os.environ.get(NO_FORK, "0") not in ("", "0"):
        yield launcher
        return
    try:
        template = Template()
    except TemplateError as error:
        note(f"no leg could be forked ({plain(error, 160)}): all were started by torchrun")
        yield launcher
        return
    with template:
        yield partial(WarmLauncher, template, note=note)


class WhatIf:
    """One what-if: `run` blocks until it ends; `cancel` may be called from another thread."""

    def __init__(self, spec: WhatIfSpec, directory: Path, *, launcher: LauncherFactory = Launcher) -> None:
        """`directory` exists and is empty."""
        self.spec = spec
        self.directory = directory
        self.launcher = launcher
        self.dropped: set[str] = set()
        self._cancel = threading.Event()
        self._current: Launching | None = None
        self._lock = threading.Lock()
        self._began = 0.0
        self._evidence = Evidence(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            spec=spec,
            spec_key=spec_key(spec),
            environment_key=environment_key(),
        )

    def cancel(self) -> None:
        """End the running leg and the what-if; complete rounds are kept and concluded from. Thread-safe."""
        self._cancel.set()
        with self._lock:
            if self._current is not None:
                self._current.cancel()

    def run(self, told: Told) -> WhatIfResult:
        """All rounds; the result is stored in the directory after each, and the predictions are recorded at the end."""
        self._began = time.monotonic()
        with warm(self.launcher, self.spec, self._evidence.notes.append) as self.launcher:
            status = self._rounds(told)
        result = self._conclude(status, self._complete())
        record_predictions(result)
        told(events.Ended(result))
        return result

    def _rounds(self, told: Told) -> WhatIfStatus:
        status: WhatIfStatus = "complete"
        number = -1
        while (number := number + 1) < self.planned:
            ended = self._round(number, told)
            if ended is not None:
                status = ended
                break
            early = self._early(number + 1)
            last = number + 1 == self.planned
            if not last:
                told(events.Interim(self._conclude(early or "running", number + 1)))
            if early is not None and not last:
                status = early
                break
        return status

    @property
    def level(self) -> float:
        """Level of the reported intervals: 98 % where the number of legs is fixed, more where it may stop early."""
        return 1 - stats.ALPHA if self.spec.budget_s is None else stats.look_level(self.spec.legs)

    def order(self, number: int) -> list[str]:
        """The arms of a round in running order, reversed in every other one; failed ones are left out."""
        arms = [a for a in self.spec.arms() if a not in self.dropped]
        return arms[::-1] if number % 2 else arms

    @property
    def planned(self) -> int:
        """Rounds there are to be: as asked, and one more for each that was disturbed, two at most."""
        disturbed = len(self._evidence.rounds()) - len(self._evidence.quiet_rounds())
        return self.spec.legs + min(disturbed, MOST_REPEATED)

    def _complete(self) -> int:
        return len(stats.complete_rounds(self._evidence.quiet_rounds(), []))

    def _conclude(self, status: WhatIfStatus, rounds: int) -> WhatIfResult:
        self._evidence.seconds = time.monotonic() - self._began
        result = conclude(self._evidence, status, self.level)
        if rounds:
            save(result, self.directory)
        return result

    def _round(self, number: int, told: Told) -> WhatIfStatus | None:
        """Run a round; why the what-if ends here, None if it goes on."""
        if number and self._over(number):
            return "out of time"
        for position, arm in enumerate(self.order(number)):
            if self._cancel.is_set():
                return "cancelled"
            record = self._leg(arm, number, position, told)
            if record.status == "cancelled":
                return "cancelled"
            if record.status == "failed" and not is_variant(arm):
                return "failed"
            if record.status == "failed":
                self.dropped.add(arm)
            if len(self.dropped) == len(self.spec.variants):
                return "complete"
            if arm == BASELINE and number == 0:
                self._predict(told)
        return None

    def _over(self, number: int) -> bool:
        """Whether the next round would most likely end after the budget; two rounds are always run."""
        budget = self.spec.budget_s
        if budget is None or self._complete() < 2:
            return False
        return time.monotonic() - self._began + self._leg_seconds(number) * len(self.order(number)) > budget

    def _leg_seconds(self, number: int) -> float:
        """What a leg of that round takes by those that were run; by the first round's while there are no later ones."""
        first = [leg.seconds for leg in self._evidence.legs if leg.round == 0]
        later = [leg.seconds for leg in self._evidence.legs if leg.round > 0]
        if number and later:
            return statistics.fmean(later)
        each = statistics.fmean(first) if first else 0.0
        return each * LATER_LEG if number else each

    def _early(self, rounds: int) -> WhatIfStatus | None:
        """Whether all variants are decided at a planned look."""
        if self.spec.budget_s is None or rounds not in stats.looks_until(self.spec.legs):
            return None
        done = self._evidence.quiet_rounds()
        left = [v.name for v in self.spec.variants if v.name not in self.dropped]
        return "stopped early" if all(stats.settled(stats.effect(done, n, self.level)) for n in left) else None

    def _predict(self, told: Told) -> None:
        report = self._evidence.reports.get(BASELINE)
        found = {v.name: predict(report, self.spec.baseline, v.options) for v in self.spec.variants}
        self._evidence.predictions = found
        told(events.Predicted(found))

    def _leg(self, arm: str, number: int, position: int, told: Told) -> LegRecord:
        told(self._announcement(arm, number))
        spec = leg_spec(self.spec, arm, number, self.directory.name)
        directory = leg_directory(arm, number)
        path, began = self._free(directory), time.monotonic()
        known = {"arm": arm, "round": number, "position": position, "directory": str(path.relative_to(self.directory))}
        try:
            launcher = self.launcher(spec, path)
            with self._lock:
                self._current = launcher
            if self._cancel.is_set():
                launcher.cancel()
            launcher.run(lambda event: told(events.LegEvent(event)))
            record = self._read(path, arm, number, position, spec.seed, time.monotonic() - began)
        except (LaunchError, StoreError, ValueError) as error:
            record = LegRecord(
                **known,  # type: ignore[arg-type]
                seed=spec.seed,
                status="failed",
                seconds=time.monotonic() - began,
                failure=str(error),
                failure_kind="spec" if isinstance(error, ValueError) else "launcher",
            )
        finally:
            with self._lock:
                self._current = None
        self._evidence.legs.append(record)
        told(events.LegEnded(record))
        return record

    def _free(self, directory: str) -> Path:
        """The leg's path; variants whose names look alike get a number."""
        path, tries = self.directory / directory, 2
        while path.exists():
            path = self.directory / f"{directory}-{tries}"
            tries += 1
        return path

    def _read(self, path: Path, arm: str, number: int, position: int, seed: int, seconds: float) -> LegRecord:
        record, report = read_leg(
            path,
            arm=arm,
            round_=number,
            position=position,
            seed=seed,
            seconds=seconds,
            directory=str(path.relative_to(self.directory)),
        )
        if record.status == "complete" and record.step_ms is None:
            self._evidence.notes.append(f"{arm}: a leg completed without a timed step")
        if record.status == "complete":
            self._evidence.reports.setdefault(arm, report)
        return record

    def _announcement(self, arm: str, number: int) -> events.LegStarted:
        done, each_round = len(self._evidence.legs), len(self.order(0))
        here = each_round - sum(leg.round == number for leg in self._evidence.legs)
        later = each_round * (self.planned - number - 1)
        remaining = here + later
        eta = self._leg_seconds(number) * here + self._leg_seconds(number + 1) * later if done else None
        if eta is not None and self.spec.budget_s is not None:
            eta = min(eta, max(self.spec.budget_s - (time.monotonic() - self._began), 0.0))
        return events.LegStarted(arm=arm, round=number, number=done + 1, total=done + remaining, eta_s=eta)

"""Where what-ifs live, the one that answers a question already asked, and the running record of predictions."""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from costlab.app.store import StoreError, home
from costlab.app.store.home import new_directory
from costlab.app.text import plain
from costlab.app.whatif.results import WhatIfResult
from costlab.probes.tables import write_bytes

RESULT = "whatif.json"
PREDICTIONS = "predictions.jsonl"


class PredictionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction and what was measured, relative changes."""

    created: str
    whatif: str
    title: str
    toggle: str
    predicted: float
    measured: float
    low: float
    high: float
    how: str = ""

    @property
    def error(self) -> float:
        """Measured less predicted."""
        return self.measured - self.predicted


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How good the predictions of one toggle have been."""

    toggle: str
    count: int
    median_error: float  # of the absolute errors
    inside: int  # how often the measured interval held the prediction


def whatif_directory() -> Path:
    """Where what-ifs are kept."""
    return home() / "whatif"


def new_whatif_directory(parent: Path | None = None) -> Path:
    """Create an empty directory under a new id; StoreError where the store cannot be written."""

    def name() -> str:
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-whatif-{secrets.token_hex(2)}"

    return new_directory(parent or whatif_directory(), name, "set COSTLAB_HOME elsewhere")


def save(result: WhatIfResult, directory: Path) -> Path:
    """Write `whatif.json`, whole or not at all."""
    path = directory / RESULT
    write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return path


def load(path: Path) -> WhatIfResult:
    """Read a what-if's directory or its `whatif.json`; StoreError where it cannot be read."""
    file = path / RESULT if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=WhatIfResult)
    except OSError as error:
        raise StoreError(f"no readable {RESULT} in {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} is damaged: {plain(error, 160)}") from error


def list_whatifs(parent: Path | None = None) -> list[tuple[Path, WhatIfResult]]:
    """The stored what-ifs, newest first; those that cannot be read are left out, they hold nothing to reuse."""
    base = parent or whatif_directory()
    found = []
    for file in base.glob(f"*/{RESULT}"):
        try:
            found.append((file.parent, load(file)))
        except StoreError:
            continue
    return sorted(found, key=lambda f: f[1].created, reverse=True)


Cached = tuple[Path, WhatIfResult, bool]


def find_cached(spec_key: str, environment_key: str, parent: Path | None = None) -> Cached | None:
    """The newest finished answer to this question, and whether it is stale: of other hardware or software.

    One of this environment goes before any stale one.
    """
    ended = ("complete", "stopped early", "out of time")
    same = [(p, r) for p, r in list_whatifs(parent) if r.spec_key == spec_key and r.status in ended]
    fresh = next(((p, r, False) for p, r in same if r.environment_key == environment_key), None)
    return fresh or next(((p, r, True) for p, r in same), None)


def record_predictions(result: WhatIfResult) -> int:
    """Append this what-if's predictions to the record; returns how many there were."""
    records = [
        PredictionRecord(
            created=result.created,
            whatif=result.id,
            title=result.title,
            toggle=arm.name,
            predicted=arm.predicted.change,
            measured=arm.change.value,
            low=arm.change.low if arm.change.low is not None else arm.change.value,
            high=arm.change.high if arm.change.high is not None else arm.change.value,
            how=arm.predicted.how,
        )
        for arm in result.variants
        if arm.predicted and arm.change and arm.change.value is not None and not arm.failure
    ]
    if records:
        path = home() / PREDICTIONS
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(msgspec.json.encode(r) + b"\n" for r in records)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, data)  # one write: lines of two what-ifs do not mix
        finally:
            os.close(descriptor)
    return len(records)


def prediction_records() -> Iterator[PredictionRecord]:
    """All recorded predictions, oldest first; a damaged line is skipped."""
    try:
        lines = (home() / PREDICTIONS).read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=PredictionRecord)
        except msgspec.MsgspecError:
            continue


def accuracy() -> list[Accuracy]:
    """How good the predictions have been, by toggle; those predicted most often first."""
    groups: dict[str, list[PredictionRecord]] = {}
    for record in prediction_records():
        groups.setdefault(record.toggle, []).append(record)
    out = [
        Accuracy(
            toggle=toggle,
            count=len(rows),
            median_error=statistics.median(abs(r.error) for r in rows),
            inside=sum(r.low <= r.predicted <= r.high for r in rows),
        )
        for toggle, rows in groups.items()
    ]
    return sorted(out, key=lambda a: (-a.count, a.toggle))

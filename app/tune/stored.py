"""The tuning of a run, kept in its directory beside what it was made from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from costlab.app.analysis.views import TuneView
from costlab.probes.tables import write_bytes

TUNE_FILE = "tune.json"
MOST_BYTES = 8 << 20


def read_tuning(run_dir: Path) -> TuneView | None:
    """The run's tuning, None where it was not tuned. Raises ValueError for a file that is damaged."""
    path = run_dir / TUNE_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{TUNE_FILE} is larger than {MOST_BYTES} bytes")
    return msgspec.json.decode(path.read_bytes(), type=TuneView)


def write_tuning(view: TuneView, run_dir: Path) -> None:
    """Keep the tuning, whole or not at all."""
    write_bytes(run_dir / TUNE_FILE, msgspec.json.format(msgspec.json.encode(view), indent=1))

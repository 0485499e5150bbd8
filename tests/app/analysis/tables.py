"""Tables for tests from a few rows, with the columns and types that the store gives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from costlab.app.store import Run
from costlab.probes.records import Manifest, Row
from costlab.probes.tables import write_bytes, write_rows


def frame(row: type[Row], rows: Iterable[Any]) -> pd.DataFrame:
    """The rows as the store reads them back."""
    import msgspec

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_rows(path / "rank-00000", row, rows)
        manifest = Manifest(run_id="x", created="2026-11-29T14:02:00Z", status="complete", ranks=1)
        write_bytes(path / "manifest.json", msgspec.json.encode(manifest))
        return Run(path).table(row.table, row)

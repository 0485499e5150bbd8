"""Reports of example runs, each built once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import RunReport
from costlab.app.store import Run
from tests.app.make_run import write_example_run

_built: dict[str, RunReport] = {}


def example_report(**options: Any) -> RunReport:
    """The report of an example run with these variations."""
    key = repr(sorted(options.items()))
    if key not in _built:
        with tempfile.TemporaryDirectory() as folder:
            _built[key] = build_report(Run(write_example_run(Path(folder) / "run", **options)))
    return _built[key]

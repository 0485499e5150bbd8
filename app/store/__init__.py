"""The run store: where runs live, how they are listed, opened and named. Damage is noted, never fatal."""

from costlab.app.store.errors import StoreError
from costlab.app.store.home import home, new_run_directory, new_run_id, runs_directory
from costlab.app.store.listing import RunSummary, list_runs, open_run
from costlab.app.store.manifest import title_of
from costlab.app.store.run import Run
from costlab.app.store.samples import open_sample, sample_names

__all__ = [
    "Run",
    "RunSummary",
    "StoreError",
    "home",
    "list_runs",
    "new_run_directory",
    "new_run_id",
    "open_run",
    "open_sample",
    "runs_directory",
    "sample_names",
    "title_of",
]

"""Make the ranks' files one checkpoint: every rank reports its file in the directory, rank 0 writes the manifest.

No collective runs in the background, where it could tangle with training's: the ranks meet in the shared
directory that a sharded checkpoint needs anyway. A rank that fails says so there, so that the others don't wait
for it; a rank that vanishes is waited for until a time limit.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import sync_directory, write_atomically
from costlab.kernels.codec.manifest import NAME, RankFile, directory_name, new_manifest, rank_name, write_manifest

_POLL = 0.02
_MAX_REPORT = 4096


@dataclass(frozen=True, slots=True)
class Site:
    """Where and by whom a save is written."""

    root: Path
    step: int
    run: str
    rank: int
    world_size: int
    preset: str
    base: str | None
    update_error: float | None
    commit_timeout: float

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return self.root / directory_name(self.step, self.run)

    @property
    def file(self) -> Path:
        """This rank's file."""
        return self.directory / rank_name(self.rank)


def make_directory(site: Site) -> None:
    """Make the step's directory below a root that exists. Raises `OSError`; alone, also where it exists already.

    The root isn't made anew: where it vanished, a disk was unmounted, and its place would fill the disk beneath.
    """
    site.directory.mkdir(exist_ok=site.world_size > 1)
    sync_directory(site.root)


def commit(site: Site, file: RankFile) -> None:
    """Return when the checkpoint is committed by all ranks. Raises `CheckpointError` or `OSError`."""
    if site.world_size == 1:
        write_manifest(site.directory, new_manifest(site.step, site.preset, [file], site.base, site.update_error))
        return
    report = json.dumps({**asdict(file), "update_error": site.update_error})
    write_atomically(_report(site, site.rank), report.encode())
    deadline = time.monotonic() + site.commit_timeout
    if site.rank == 0:
        _commit_first(site, deadline)
    else:
        _wait(site, [site.directory / NAME], deadline)


def _report(site: Site, rank: int) -> Path:
    return site.directory / f"rank-{rank:05d}.done"


def _commit_first(site: Site, deadline: float) -> None:
    reports = [_report(site, rank) for rank in range(site.world_size)]
    _wait(site, reports, deadline)
    files, errors = [], []
    for path in reports:
        body = json.loads(path.read_bytes()[:_MAX_REPORT])
        errors.append(body.pop("update_error"))
        files.append(RankFile(**body))
    worst = max((error for error in errors if error is not None), default=None)
    write_manifest(site.directory, new_manifest(site.step, site.preset, files, site.base, worst))
    for path in reports:
        path.unlink(missing_ok=True)


def _wait(site: Site, paths: list[Path], deadline: float) -> None:
    """Until all paths exist; raises when a rank reports failure, the directory is gone or time is up."""
    pending = list(paths)
    while pending:
        pending = [path for path in pending if not path.exists()]
        failed = sorted(site.directory.glob("rank-*.failed"))
        if failed and pending:
            text = failed[0].read_text(errors="replace")[:_MAX_REPORT]
            raise CheckpointError(f"{failed[0].stem} could not save: {text}")
        if pending and not site.directory.is_dir():
            raise CheckpointError(f"{site.directory} vanished")
        if pending and time.monotonic() > deadline:
            raise CheckpointError(f"{pending[0]} did not appear within {site.commit_timeout:.0f} s")
        if pending:
            time.sleep(_POLL)


def report_failure(site: Site, error: BaseException) -> None:
    """Tell the other ranks, if the directory can still be written to; what can't be told times out there."""
    if site.world_size > 1:
        with contextlib.suppress(OSError):
            site.directory.mkdir(exist_ok=True)
            write_atomically(site.directory / f"rank-{site.rank:05d}.failed", str(error).encode()[:_MAX_REPORT])

"""Lists the stored runs from their manifests alone, and finds one by what a person types."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from costlab.app.store.errors import StoreError
from costlab.app.store.home import runs_directory
from costlab.app.store.liveness import effective_status
from costlab.app.store.manifest import NAME, hardware_of, read_manifest, title_of
from costlab.app.store.run import Run
from costlab.app.text import plain


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. `status` is a run status or "damaged", then `problem` says why. Text is not escaped."""

    id: str
    path: Path
    status: str
    created: str = ""  # ISO 8601, UTC
    title: str = ""
    workload: str = ""
    size: str = ""
    ranks: int = 0
    hardware: str = ""
    duration_s: float | None = None
    problem: str = ""


def list_runs(directory: Path | None = None) -> list[RunSummary]:
    """All runs in `directory` (default: the store), newest first. Reads manifests only; never raises for a run."""
    base = directory or runs_directory()
    try:
        found = [p for p in base.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {base}: {error.strerror}") from error
    return sorted(map(_summary, found), key=lambda s: (s.created or s.id, s.id), reverse=True)


def _summary(path: Path) -> RunSummary:
    try:
        manifest, notes = read_manifest(path)
    except StoreError as error:
        return RunSummary(id=path.name, path=path, status="damaged", problem=str(error))
    return RunSummary(
        id=manifest.run_id,
        path=path,
        status=effective_status(manifest),
        created=manifest.created,
        title=title_of(manifest),
        workload=str(manifest.spec.get("workload", "")),
        size=str(manifest.spec.get("size", "")),
        ranks=manifest.ranks,
        hardware=hardware_of(manifest),
        duration_s=manifest.duration_s,
        problem=manifest.failure.message if manifest.failure else "; ".join(notes),
    )


def open_run(which: Path | str) -> Run:
    """Open a run by path, id, unique start of an id, or "last"; raise StoreError, one line, where that is none."""
    text = str(which)
    if text == "last":
        usable = [s for s in list_runs() if s.status != "damaged"]
        if not usable:
            raise StoreError(f"no stored run in {runs_directory()}; 'costlab run' records one")
        return Run(usable[0].path)
    path = Path(text).expanduser()
    if path.name == NAME:
        path = path.parent
    if isinstance(which, Path) or _is_run(path):
        return Run(path)
    return Run(_by_prefix(text))


def _is_run(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a name too long for a path is no path
        return (path / NAME).is_file()
    return False


def _by_prefix(text: str) -> Path:
    runs = list_runs() if text else []
    exact = [s for s in runs if text in (s.id, s.path.name)]
    matches = exact or [s for s in runs if s.id.startswith(text) or s.path.name.startswith(text)]
    if len(matches) == 1:
        return matches[0].path
    if not matches:
        shown = plain(text, 80)
        raise StoreError(f"no run '{shown}': not in {runs_directory()} and no run directory; 'costlab runs' lists them")
    names = ", ".join(s.id for s in matches[:3]) + (" …" if len(matches) > 3 else "")
    raise StoreError(f"'{plain(text, 80)}' begins {len(matches)} runs: {plain(names)}; type more of the id")

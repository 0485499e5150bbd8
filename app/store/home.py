"""Where runs live and what they are called."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from costlab.app.store.errors import StoreError


def home() -> Path:
    """The store's root: $COSTLAB_HOME, else $XDG_DATA_HOME/costlab, else ~/.local/share/costlab. Not created here."""
    own = os.environ.get("COSTLAB_HOME")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME", "")
    # The XDG rules ask to ignore a relative path.
    base = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    return base / "costlab"


def runs_directory() -> Path:
    """Where new runs are written and `list_runs` looks."""
    return home() / "runs"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:24].strip("-")


def new_run_id(workload: str, size: str = "", now: datetime | None = None) -> str:
    """A new id that sorts by time (UTC): 20261129-1402-llama-1b-a1b2. A user's own workload gives its file's stem."""
    file, _, _ = workload.partition(":")
    stem = Path(file).stem if ":" in workload or file.endswith(".py") else workload
    parts = [f"{now or datetime.now(UTC):%Y%m%d-%H%M}", _slug(stem) or "run", _slug(size), secrets.token_hex(2)]
    return "-".join(p for p in parts if p)


def new_run_directory(workload: str, size: str = "", parent: Path | None = None) -> Path:
    """Create an empty run directory under a new id; raise StoreError where the store cannot be written."""
    base = parent or runs_directory()
    return new_directory(base, lambda: new_run_id(workload, size), "set COSTLAB_HOME or pass --out DIR")


def new_directory(base: Path, name: Callable[[], str], advice: str) -> Path:
    """Create an empty directory under a free name; raise StoreError, with the advice, where none can be made."""
    for _ in range(20):
        path = base / name()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}; {advice}") from error
        return path
    raise StoreError(f"no free id under {base}; {advice}")

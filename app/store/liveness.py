"""Whether a run that says it is running still is."""

from __future__ import annotations

from costlab.probes.records import Manifest, RunStatus

_TOLERANCE_S = 2.0  # process start times have a resolution of 10 ms, clocks are set


def effective_status(manifest: Manifest) -> RunStatus:
    """The manifest's status; "incomplete" for one left at "running" by a process that is gone."""
    if manifest.status != "running" or _alive(manifest.pid, manifest.pid_started):
        return manifest.status
    return "incomplete"


def _alive(pid: int | None, started: float | None) -> bool:
    """Whether this very process lives: pids are reused, so the start time must agree where it is known."""
    if pid is None or pid <= 0:
        return False
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) <= _TOLERANCE_S
    except (psutil.NoSuchProcess, OverflowError):
        return False
    except psutil.AccessDenied:
        return True

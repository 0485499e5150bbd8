"""What can go wrong when a schedule is planned or run."""

from __future__ import annotations


class ScheduleError(RuntimeError):
    """A schedule cannot run as asked, or a transfer of it failed; the text names schedule, track, step and peers."""


class ScheduleRefused(ScheduleError):
    """The call does not fit the tensor, ranks or device; nothing was transferred and the communicator stays usable."""


class ScheduleTimeout(ScheduleError):
    """A transfer did not finish in time. The communicator is unusable afterwards, as a NCCL communicator is."""


class ScheduleAborted(ScheduleError):
    """The communicator was aborted, or an earlier call on it failed."""


class FabricError(ValueError):
    """A topology description that contradicts itself; the text names the field."""

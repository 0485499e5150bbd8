"""Agreement among ranks over a gloo group of its own, so that no rank enters a collective that another one left out."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Peers:
    """Small reductions of host values over all ranks; with one process and no process group they are the identity."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def all(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        return self._reduce(1.0 if mine else 0.0, "MIN") > 0.5

    def any(self, mine: bool) -> bool:
        """Whether some rank says yes."""
        return self._reduce(1.0 if mine else 0.0, "MAX") > 0.5

    def max(self, mine: float) -> float:
        """The largest value."""
        return self._reduce(mine, "MAX")

    def min(self, mine: float) -> float:
        """The smallest value."""
        return self._reduce(mine, "MIN")

    def sum(self, mine: float) -> float:
        """The sum over ranks."""
        return self._reduce(mine, "SUM")

    def gather(self, mine: T) -> list[T]:
        """Every rank's value, in rank order; for small picklable values."""
        if self.group is None:
            return [mine]
        import torch.distributed as dist

        found: list[T | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return [value for value in found if value is not None]

    def _reduce(self, mine: float, operation: str) -> float:
        if self.group is None:
            return mine
        import torch
        import torch.distributed as dist

        value = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation), group=self.group)
        return float(value.item())


def new_cpu_group(timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, None without torch.distributed. Called by all ranks alike."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def end_group(group: dist.ProcessGroup | None) -> None:
    """Close a group of `new_cpu_group`; not while another thread still uses it."""
    import torch.distributed as dist

    if group is not None:
        dist.destroy_process_group(group)

"""What the ranks do in the test of issued calls: host tensors and gloo, with fakes in place of CUDA's streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from rank_pool import worlds

from costlab.kernels.schedule.communicator import Communicator, Handle
from costlab.kernels.schedule.plan import Plan


class OnAStream(Communicator):
    """Takes host tensors for a GPU's, and counts the calls that go the long way."""

    checked = 0

    def issues(self, device: torch.device) -> bool:  # noqa: ARG002
        return True

    def call_stream(self, device: torch.device) -> Any:  # noqa: ARG002
        return self.stream

    def _check(self, *call: Any) -> None:
        self.checked += 1
        super()._check(*call)


def issued(rank: int, plan: Plan) -> tuple[list[list[float]], int, int, int]:
    """Averages of three calls with one size and of one with another; long ways, waits of the stream, late handles."""
    comm = OnAStream(worlds[2])
    comm.stream = MagicMock(name="call stream")
    fakes = {"current_stream": MagicMock(), "stream": lambda _: nullcontext(), "Event": MagicMock}
    handles: list[Handle | None] = []
    with patch.multiple(torch.cuda, **fakes):
        tensors = [torch.full((size,), 2.0 + rank) for size in (4, 4, 4, 6)]
        handles += [comm.all_reduce(t, plan, "avg", async_op=True) for t in tensors]
        late = sum(h is None for h in handles)
    waits = comm.stream.wait_event.call_count
    return [t.tolist() for t in tensors], comm.checked, waits, late

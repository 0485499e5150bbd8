"""What a call through symmetric memory asks of the device, in which order: fakes stand for streams and torch's kernels.

The results on GPUs are tests/benchmarks' matter.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import issue_cases as cases
import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from costlab.kernels.schedule import symmetric
from costlab.kernels.schedule.chunked import Chunked, pieces
from costlab.kernels.schedule.plan import Plan
from costlab.kernels.schedule.symmetric import SymmetricMemory

Log = list[str]


class Stream:
    """Logs what it waits for."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.at}")


class Event:
    """Knows the stream it was recorded on last."""

    def record(self, stream: Stream) -> None:
        self.at = stream.name


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Filled by the streams that stand for CUDA's."""
    said: Log = []
    here = Stream(said, "here")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: said.append(f"on {stream.name}"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return said


def three_chunks(log: Log, barrier: Any) -> Chunked:
    rows, used = pieces(256, 3, 2, 4)
    streams: Any = [Stream(log, "a"), Stream(log, "b")]
    barriers = [partial(barrier, "a"), partial(barrier, "b")]
    return Chunked(rows, 0, [torch.zeros(used) for _ in range(2)], barriers, streams, 1.0)


BEGIN, END = ["a waits for here", "b waits for here"], ["on here", "here waits for a", "here waits for b", "barrier a"]


def test_chunks_run_between_the_callers_work_on_streams_of_their_own(log: Log) -> None:
    three_chunks(log, lambda name: log.append(f"barrier {name}"))(torch.ones(256))
    both = ["on a", "barrier a", "on b", "barrier b"]
    assert log == [*BEGIN, *both, *both, "on a", "on b", *("on a", "barrier a") * 2, "on a", *END]


@pytest.mark.parametrize("queues", ["", "8"])
def test_a_graphs_branches_depend_on_nothing_but_their_chunks(
    log: Log, monkeypatch: pytest.MonkeyPatch, queues: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    three_chunks(log, lambda name: log.append(f"barrier {name}"))(torch.ones(256))
    assert not {"a waits for b", "b waits for a"} & set(log)


def test_a_graphs_barriers_follow_each_other_where_there_is_one_queue(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they are issued outside a graph, whatever branches the GPU runs one after the other."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    three_chunks(log, lambda name: log.append(f"barrier {name}"))(torch.ones(256))
    after_a, after_b = ["a waits for b", "barrier a"], ["b waits for a", "barrier b"]
    first, again = ["barrier a", *after_b, *after_a, *after_b], [*after_a, "a waits for a", "barrier a"]
    assert [said for said in log if not said.startswith("on ")] == [*BEGIN, *first, *again, *END[1:]]


def test_a_failure_leaves_the_callers_stream_in_place(log: Log) -> None:
    def broken(_name: str) -> None:
        raise RuntimeError("no peer")

    with pytest.raises(RuntimeError, match="no peer"):
        three_chunks(log, broken)(torch.ones(256))
    assert log[-1] == "on here"


def memory(monkeypatch: pytest.MonkeyPatch, said: Log) -> SymmetricMemory:
    """Of two ranks, on host memory; a sum doubles. torch's kernels not named here must not be called."""

    def outward(name: str, buffer: Tensor, _op: str, _group: str, out: Tensor) -> None:
        said.append(name)
        out.copy_(buffer * 2)

    names = ("one_shot_all_reduce_out", "two_shot_all_reduce_out")
    kernels = {name: SimpleNamespace(default=partial(outward, name)) for name in names}
    kernels |= {name: SimpleNamespace(default=None) for name in ("one_shot_all_reduce", "two_shot_all_reduce_")}
    monkeypatch.setattr(symmetric, "_ops", SimpleNamespace(symm_mem=SimpleNamespace(**kernels)))
    monkeypatch.setattr(symmetric, "refusal", lambda *_: "")
    monkeypatch.setattr(SymmetricMemory, "_map", lambda _self, n, _d: (torch.empty(n, dtype=torch.uint8), None))
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="two")
    return SymmetricMemory(group)


@pytest.mark.parametrize("schedule", ["one-shot", "two-shot"])
def test_the_kernel_reads_what_an_earlier_launch_copied_in(
    monkeypatch: pytest.MonkeyPatch, log: Log, schedule: Any
) -> None:
    """torch's kernel that copies in by itself signals too early; an average is scaled on the way in."""
    said: Log = []
    own = memory(monkeypatch, said)
    flat = torch.ones(1024)
    own.all_reduce(flat, Plan(schedule))
    assert flat.tolist() == [2.0] * 1024
    own.all_reduce(flat, Plan(schedule), 0.5)
    assert flat.tolist() == [2.0] * 1024
    assert said == [f"{schedule.replace('-', '_')}_all_reduce_out"] * 2


@pytest.mark.parametrize(("plan", "checked"), [(Plan("backend"), 2), (Plan("ring"), 4)], ids=["library", "ring"])
def test_a_call_that_comes_again_goes_the_short_way(ranks: RankPool, plan: Plan, checked: int) -> None:
    """As DDP's buckets do, asynchronously: only a new size of the library's call is checked and prepared."""
    for results, long_ways, waits, late in ranks.run(cases.issued, 2, plan):
        assert results == [[2.5] * size for size in (4, 4, 4, 6)]
        assert (long_ways, waits, late) == (checked, 4, 0)

"""Python's garbage collector: its time in the step it ran in, and what freezing takes from it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from costlab.probes.collector import freeze, watched
from costlab.probes.launch import Launcher
from costlab.probes.parallel import Wrapped
from costlab.probes.spec import Collector, RunSpec
from costlab.probes.steps import Trainer, measure
from costlab.probes.workloads.base import Workload


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def heap() -> list[list[int]]:
    """A hundred thousand containers: a full collection of them takes milliseconds."""
    return [[n] for n in range(100_000)]


def full_ms() -> float:
    with watched() as watch:
        gc.collect()
        return watch.take()


def trainer(collects_in: int) -> Trainer:
    """Collects once, within the loss of that step."""
    model, calls = nn.Linear(4, 4), []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == collects_in + 1:
            gc.collect()
        value: Tensor = model(x).square().mean()
        return value

    workload = Workload(model=model, batch=lambda _: torch.ones(2, 4), loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(workload, Wrapped(model=model, base=model, blocks=[]), optimizer, torch.device("cpu"))


def test_a_collection_is_told_of_the_step_it_ran_in(heap: list[list[int]]) -> None:
    before = list(gc.callbacks)
    gc.disable()
    try:
        rows = measure(trainer(3), 6, 0, lambda *_: None)
    finally:
        gc.enable()
    paused = [row.gc_ms for row in rows]
    assert [p for i, p in enumerate(paused) if i != 3] == [0.0] * 5
    assert paused[3] is not None
    assert 0 < paused[3] <= rows[3].ms
    assert gc.callbacks == before
    assert heap


def test_collections_of_other_threads_count(heap: list[list[int]]) -> None:
    with watched() as watch:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        assert watch.take() > 0
        assert watch.take() == 0
    assert heap


def test_nothing_is_watched_after_an_error() -> None:
    before = list(gc.callbacks)
    with pytest.raises(ZeroDivisionError), watched():
        1 / 0  # noqa: B018
    assert gc.callbacks == before


@pytest.mark.usefixtures("thawed")
def test_what_is_frozen_costs_no_collection_any_more(heap: list[list[int]]) -> None:
    before = min(full_ms() for _ in range(3))
    assert freeze() > len(heap)
    assert min(full_ms() for _ in range(3)) < before / 2


@pytest.mark.parametrize("gc_option", ["default", "freeze"])
def test_the_warm_ups_garbage_is_collected_before_the_timed_steps(tmp_path: Path, gc_option: Collector) -> None:
    spec = RunSpec(
        workload=f"{Path(__file__).parent / 'workload_files' / 'leavings.py'}:make", size="", ranks=1, device="cpu",
        compile="none", dtype="fp32", steps=2, warmup=1, profile_steps=0, checkpoint=False, gc=gc_option,
    )  # fmt: skip
    manifest = Launcher(spec, tmp_path / "run").run(lambda _: None)
    assert manifest.status == "complete", manifest.failure

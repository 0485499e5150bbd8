"""The gradient layout sweep: its plan, its buckets, and real ranks."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.sweeps.buckets import busbw, run_buckets
from costlab.app.topology.calibration import JobFailed
from costlab.probes.bucket_spec import DDP_BUCKET, LAYOUTS, MIB, BucketResult, BucketSpec, assign, plan, shapes
from costlab.probes.job import JobLauncher
from costlab.probes.records import AnyEvent, Progress
from costlab.probes.spec import RunSpec


@given(st.integers(1, 10**8))
def test_tensors_sum_to_the_gradients(elements: int) -> None:
    assert sum(map(prod, shapes(elements))) == elements
    assert all(min(shape) > 0 for shape in shapes(elements))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(0, 10**7))
def test_buckets_keep_order_and_close_at_their_cap(sizes: list[int], cap: int) -> None:
    buckets = assign(sizes, cap)
    assert [i for b in buckets for i in b] == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in b) for b in buckets]
    assert all(f >= cap for f in filled[:-1])
    assert all(f - sizes[b[-1]] < cap or len(b) == 1 for f, b in zip(filled, buckets, strict=True))
    if cap == 0:
        assert len(buckets) == len(sizes)


def test_plan_varies_one_thing_at_a_time_and_drops_equal_layouts() -> None:
    large = plan(BucketSpec(elements=16 * MIB))
    assert {c.bucket for c in large if c.dtype == "float32" and c.layout == "view" and c.every == 1} == {
        0, MIB, 4 * MIB, 16 * MIB, DDP_BUCKET, 64 * MIB,
    }  # fmt: skip
    assert {c.layout for c in large if c.bucket == DDP_BUCKET and c.every == 1} == set(LAYOUTS)
    assert {c.every for c in large if c.layout == "view"} == {1, 2, 4, 8}
    assert len(large) == len(set(large))
    small = plan(BucketSpec(elements=1000, buckets=(4 * MIB, 8 * MIB), dtypes=("float16",), every=(1,)))
    assert {c.bucket for c in small} == {4 * MIB}, "both hold all gradients"


@pytest.fixture(scope="module")
def job() -> tuple[BucketResult, list[AnyEvent]]:
    events: list[AnyEvent] = []
    spec = BucketSpec(
        elements=300_000, buckets=(0, MIB // 4, 4 * MIB), dtypes=("float32", "bfloat16"), every=(1, 3), seconds=0.05,
        rounds=2,
    )  # fmt: skip
    return run_buckets(spec, events.append, ranks=3, device="cpu"), events


def test_three_ranks_reduce_in_every_layout(job: tuple[BucketResult, list[AnyEvent]]) -> None:
    """Each rank checks that every gradient is the mean in every layout; a wrong one fails the job."""
    result, _ = job
    assert (result.ranks, result.backend, result.elements, result.complete) == (3, "gloo", 300_000, True)
    skipped = {text.split(":")[0] for text in result.skipped}
    assert skipped <= {"bfloat16"}, "a backend may lack bfloat16, and then says so"
    cases = plan(BucketSpec(elements=300_000, buckets=(0, MIB // 4, 4 * MIB), every=(1, 3)))
    assert {r.case for r in result.rows} == {c for c in cases if c.dtype not in skipped}
    for row in result.rows:
        assert row.bytes == 300_000 * (4 if row.case.dtype == "float32" else 2)
        assert 0 < row.low <= row.seconds <= row.high or row.repeats > 2
        assert row.reduce_seconds <= row.seconds
        assert row.per_batch == pytest.approx(row.seconds / row.case.every)
        assert busbw(row, 3) == pytest.approx(row.bytes / row.reduce_seconds / 1e9 * 4 / 3)
    calls = {r.case.bucket: r.collectives for r in result.rows if r.case.dtype == "float32"}
    assert calls[0] == result.tensors
    assert calls[4 * MIB] == 1
    assert 1 < calls[MIB // 4] <= calls[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_device_that_is_not_there_is_no_reason_to_measure_another() -> None:
    with pytest.raises(JobFailed, match="--device cuda was asked for, but torch sees 0 CUDA devices"):
        run_buckets(BucketSpec(elements=1000, seconds=0.05), lambda _: None, ranks=2, device="cuda")


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_ranks_of_a_cpu_job_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    launcher = JobLauncher("m", BucketSpec(), RunSpec(ranks=2, device=device), tmp_path / "run")
    assert launcher._environment()["CUDA_VISIBLE_DEVICES"] == ("" if device == "cpu" else "0,1")


def test_progress_is_told(job: tuple[BucketResult, list[AnyEvent]]) -> None:
    told = [e for e in job[1] if isinstance(e, Progress)]
    assert told[0].detail == "tensor by tensor float32 view, every 1"
    assert told[-1].done == told[-1].total

"""Parts of a step: they sum to it whatever runs, and idle time has the cause it was given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.probes.trace import kineto
from costlab.probes.trace import waterfall as w
from costlab.probes.trace.analyse import analyse
from tests.probes.trace.synthetic import Recording

KERNELS = (
    "gemm",
    "elementwise",
    "ncclDevKernel_AllReduce",
    "Memcpy HtoD (Pinned -> Device)",
    "Memcpy DtoD (Device -> Device)",
)
CALLS = ("cudaDeviceSynchronize", "cudaEventQuery")

kernels = st.tuples(
    st.sampled_from(KERNELS), st.floats(0, 900), st.floats(0, 900), st.floats(0, 300), st.integers(7, 9), st.booleans()
)
host = st.tuples(st.sampled_from((*CALLS, "costlab::phase::data", "aten::item")), st.floats(0, 900), st.floats(0, 200))
steps = st.lists(st.tuples(st.floats(0, 900), st.floats(0.5, 400)), max_size=3)


def record(launches: list[tuple[str, float, float, float, int, bool]]) -> Recording:
    recording = Recording()
    for name, launched, start, length, stream, linked in launches:
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        if linked:
            recording.kernel(name, launched, start, length, stream=stream, cat=cat)
        else:
            recording.again(name, start, length, stream=stream, cat=cat)
    return recording


@settings(max_examples=150, deadline=None)
@given(st.lists(kernels, min_size=1, max_size=12), st.lists(host, max_size=6), steps)
def test_parts_sum_to_the_window(
    launches: list[tuple[str, float, float, float, int, bool]],
    on_host: list[tuple[str, float, float]],
    windows: list[tuple[float, float]],
) -> None:
    recording = record(launches)
    for name, start, length in on_host:
        if name in CALLS:
            recording.call(name, start, length)
        else:
            recording.note(name, start, length)
    for i, (start, length) in enumerate(windows):
        recording.note(f"costlab::step::{i}", start, length)
    trace = analyse(kineto.read(recording.json()), device="cuda", blocks=[])
    assert trace.steps
    for window in trace.steps:
        parts = {name: us for step, name, us in trace.parts if step == window.step}
        assert sum(parts.values()) == pytest.approx(window.end - window.start, abs=1e-6)
        assert min(parts.values()) >= 0
        assert set(parts) == set(w.PARTS) - {w.OVERHEAD}


@settings(max_examples=100, deadline=None)
@given(st.lists(kernels, min_size=1, max_size=10))
def test_exposed_communication_is_the_sum_over_collectives(
    launches: list[tuple[str, float, float, float, int, bool]],
) -> None:
    trace = analyse(kineto.read(record(launches).json()), device="cuda", blocks=[])
    parts = {name: us for _, name, us in trace.parts}
    assert sum(x.exposed for x in trace.collectives) == pytest.approx(parts[w.COMMUNICATION], abs=1e-6)


def parts_of(recording: Recording) -> dict[str, float]:
    trace = analyse(kineto.read(recording.json()), device="cuda", blocks=[])
    return {name: us for _, name, us in trace.parts if us > 1e-9}


def test_overlap_counts_once_by_priority() -> None:
    recording = Recording()
    recording.note("costlab::step::0", 0, 100)
    recording.kernel("gemm", 0, 10, 40)  # 10..50
    recording.kernel("elementwise", 3, 30, 30, stream=8)  # 30..60
    recording.kernel("ncclDevKernel_AllGather", 6, 40, 50, stream=9)  # 40..90
    recording.kernel("Memcpy DtoH (Device -> Pinned)", 9, 85, 10, stream=10, cat="gpu_memcpy")  # 85..95
    found = parts_of(recording)
    assert found[w.MATMUL] == pytest.approx(40)
    assert found[w.MEMORY] == pytest.approx(10)
    assert found[w.COMMUNICATION] == pytest.approx(30)
    assert found[w.COPIES] == pytest.approx(5)


def gap(between: str) -> dict[str, float]:
    """A step of 200 us with a gap of 80 us, and what the host did in it."""
    recording = Recording()
    recording.note("costlab::step::0", 0, 200)
    recording.kernel("gemm", 0, 0, 50)
    if between == "sync":
        recording.call("cudaStreamSynchronize", 20, 35)  # wakes 5 us after the device ran dry
    if between == "item":
        recording.op("aten::item", 20, 40)
    if between == "data":
        recording.note("costlab::phase::data", 50, 70)
    launched = {"early": 10.0}.get(between, 125.0)
    recording.kernel("gemm", launched, 130, 70)
    return parts_of(recording)


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        ("python", w.IDLE_LAUNCH),
        ("sync", w.IDLE_SYNC),
        ("item", w.IDLE_SYNC),
        ("data", w.IDLE_DATA),
        ("early", w.IDLE_OTHER),
    ],
)
def test_idle_has_its_cause(between: str, cause: str) -> None:
    assert gap(between) == {w.MATMUL: pytest.approx(120), cause: pytest.approx(80)}


def test_gap_that_a_sync_before_the_step_caused() -> None:
    recording = Recording()
    recording.kernel("gemm", 0, 10, 30)
    recording.call("cudaDeviceSynchronize", 15, 30)
    recording.note("costlab::step::0", 50, 100)
    recording.kernel("gemm", 75, 80, 70)
    assert parts_of(recording) == {w.MATMUL: pytest.approx(70), w.IDLE_SYNC: pytest.approx(30)}


def test_idle_before_a_kernel_of_unknown_launch_is_other() -> None:
    recording = Recording()
    recording.note("costlab::step::0", 0, 100)
    recording.kernel("gemm", 0, 0, 20)
    recording.correlation = -7
    recording.again("gemm", 60, 40)
    assert parts_of(recording) == {w.MATMUL: pytest.approx(60), w.IDLE_OTHER: pytest.approx(40)}

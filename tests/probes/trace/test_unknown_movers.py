"""Own schedules are told by their tag; what moves data between devices and says nothing of itself is listed as such."""

from __future__ import annotations

import pandas as pd
import pytest

from costlab.app.analysis.collectives import collectives_view
from costlab.kernels.schedule.communicator import TAG
from costlab.probes.records import CollectiveRow
from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse, rows
from costlab.probes.trace.classify import TAG_COMM
from tests.probes.trace.synthetic import Recording


@pytest.fixture
def calls() -> list[CollectiveRow]:
    recording = Recording()
    recording.note("costlab::step::0", 0, 1000)
    recording.note(f"{TAG}all_reduce ring", 10, 30)
    recording.kernel("ring_step_gemm_like_name", 12, 100, 50)
    recording.kernel("Memcpy PtoP (Device -> Device)", 20, 160, 20, cat="gpu_memcpy")
    recording.kernel("Memcpy PtoP (Device -> Device)", 300, 320, 40, cat="gpu_memcpy")
    recording.kernel("nvshmem_mystery_put_kernel(int*)", 400, 420, 30)
    recording.kernel("Memcpy DtoD (Device -> Device)", 500, 520, 10, cat="gpu_memcpy")
    trace = analyse(kineto.read(recording.json()), device="cuda", blocks=[])
    return rows(trace, 0)[0]


def test_the_tag_counts_and_not_the_kernels_names(calls: list[CollectiveRow]) -> None:
    assert TAG == TAG_COMM
    own = [c for c in calls if c.kind == "all_reduce"]
    assert [(c.start_us, c.ms) for c in own] == [(100.0, pytest.approx(0.080))], (
        "kernel and copy under one tag, one call"
    )


def test_movers_between_devices_without_a_name_are_unknown(calls: list[CollectiveRow]) -> None:
    unknown = [c for c in calls if c.kind == "unknown"]
    assert [c.start_us for c in unknown] == [320.0, 420.0], "a copy between devices, a foreign kernel; not a DtoD copy"
    assert len(calls) == 3
    frame = pd.DataFrame([{f: getattr(r, f) for f in r.__struct_fields__} for r in calls])
    view = collectives_view(frame, expected_bytes=None, formula="", steps=1)
    listed = [r for r in view.rows if r.kind == "unknown"]
    assert sum(r.ms for r in listed) == pytest.approx(0.070)
    assert all(r.busbw_gbps is None for r in listed), "no bandwidth is made up for it"

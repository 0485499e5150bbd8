"""Calibration: the fit, the disk, and real two-rank jobs on this machine."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.topology.calibration import JobFailed, calibrated, run_calibration
from costlab.app.topology.discovery import discover
from costlab.probes import calibrate_host
from costlab.probes.links import MESSAGE_SIZES, Calibration, CalibrationSpec, Point, fit
from costlab.probes.records import AnyEvent, PhaseEvent, Progress
from costlab.probes.timing import point, points
from tests.probes.plain_socket import read

PLAIN = Path(__file__).with_name("plain_socket.py")


def at(size: int, seconds: float) -> Point:
    return Point(bytes=size, seconds=seconds, best=seconds, repeats=5)


@given(
    st.floats(1e-7, 1e-3), st.floats(0.1, 5000), st.lists(st.integers(1, 1 << 31), min_size=2, max_size=12, unique=True)
)
def test_fit_finds_alpha_and_beta(alpha: float, gbps: float, sizes: list[int]) -> None:
    found = fit([at(b, alpha + b / gbps / 1e9) for b in sizes])
    assert found.residual < 1e-3
    spread = (max(sizes) - min(sizes)) / gbps / 1e9
    if spread > alpha and min(sizes) / gbps / 1e9 < 10 * alpha:  # the data tell both apart
        assert found.alpha_s == pytest.approx(alpha, rel=0.01)
        assert found.gbps == pytest.approx(gbps, rel=0.01)


def test_fit_says_when_there_is_no_fixed_cost_to_see() -> None:
    falling = fit([at(1000, 1e-6), at(100_000, 2e-4)])
    assert falling.alpha_s is None
    assert falling.residual > 0.1
    with pytest.raises(ValueError, match="two sizes"):
        fit([at(1000, 1e-6), at(1000, 2e-6)])


def test_points_repeat_within_the_budget_and_keep_the_median() -> None:
    calls: list[int] = []

    def once() -> float:
        calls.append(1)
        return 0.01 * (1 + len(calls) % 3)

    found = point(100, once, budget_s=1.0)
    assert len(calls) == found.repeats + 2
    assert 30 <= found.repeats <= 100
    assert (found.seconds, found.best) == (pytest.approx(0.02), pytest.approx(0.01))
    assert point(100, lambda: 10.0, budget_s=0.1).repeats == 5
    assert [p.bytes for p in points([1, 2], lambda _: lambda: 1e-3, 0.1)] == [1, 2]


def test_disk_is_written_and_read(tmp_path: Path) -> None:
    skipped: list[str] = []
    sweeps = calibrate_host.disk(tmp_path, 0.3, skipped.append)
    assert list(tmp_path.iterdir()) == [], "the test file is gone"
    if skipped:
        assert "cannot be measured past the page cache" in skipped[0]
    else:
        assert [(s.what, s.src, s.dst) for s in sweeps] == [
            ("direct write", "host", "disk"),
            ("direct read", "disk", "host"),
        ]
        assert all(s.fit.gbps > 0 for s in sweeps)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    skipped: list[str] = []
    assert calibrate_host.disk(tmp_path / "none", 0.1, skipped.append) == []
    assert "No such file" in skipped[0]


def test_the_tcp_sweep_is_a_plain_socket_test() -> None:
    """Both in turn over one connection between the same two processes, so that what else runs here meets both alike."""
    size, rounds = 1 << 20, 60
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        link = socket.create_connection(server.getsockname())
    else:
        link, _ = server.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, back = memoryview(bytearray(b"x" * size)), memoryview(bytearray(size))
    ours = calibrate_host.ping(link, first=bool(child))(size)
    plain_s, ours_s = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        if child:
            link.sendall(out)
            read(link, back)
        else:
            read(link, back)
            link.sendall(out)
        plain_s.append((time.perf_counter() - start) / 2)
        ours_s.append(ours())
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    link.close()
    server.close()
    ratios = sorted(a / b for a, b in zip(plain_s, ours_s, strict=True))
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)


@pytest.fixture(scope="module")
def job() -> tuple[Calibration, list[AnyEvent]]:
    """One calibration of loopback by two real ranks."""
    events: list[AnyEvent] = []
    return run_calibration(CalibrationSpec(seconds=0.8), events.append, ranks=2, device="cpu"), events


def test_two_ranks_calibrate_loopback(job: tuple[Calibration, list[AnyEvent]]) -> None:
    result, _ = job
    assert result.complete
    assert result.ranks == 2
    assert [(s.what, s.direction) for s in result.sweeps] == [
        ("TCP stream", "one"), ("gloo send/recv", "one"), ("gloo send/recv", "both"),
    ]  # fmt: skip
    for found in result.sweeps:
        assert [p.bytes for p in found.points] == list(MESSAGE_SIZES)
        assert all(p.repeats >= 5 and 0 < p.best <= p.seconds for p in found.points)
    topology = calibrated(discover(), result)
    link = next(x for x in topology.links if x.kind == "loopback")
    assert link.src == link.dst
    assert link.measured_gbps == result.sweeps[0].points[-1].gbps
    assert link.measured_by.startswith("TCP stream")


def test_the_jobs_loopback_agrees_with_a_plain_socket_test_in_other_processes(
    job: tuple[Calibration, list[AnyEvent]],
) -> None:
    """Minutes apart on a machine that others use: a factor, not a percentage; units and halves would show."""
    tcp = next(p for p in job[0].sweeps[0].points if p.bytes == 1 << 20)
    done = subprocess.run([sys.executable, str(PLAIN), str(1 << 20), "200"], capture_output=True, text=True, check=True)
    assert tcp.best == pytest.approx(min(json.loads(done.stdout)), rel=0.6)


def test_progress_is_told(job: tuple[Calibration, list[AnyEvent]]) -> None:
    events = job[1]
    assert any(isinstance(e, PhaseEvent) and e.phase == "calibrate" for e in events)
    told = [e for e in events if isinstance(e, Progress)]
    assert [e.done for e in told] == [0, 1, 2, 3]
    assert told[0].detail == "loopback, TCP"
    assert told[-1].total == 3


def test_cancelling_ends_the_ranks_and_keeps_what_was_measured() -> None:
    cancel: list[object] = []

    def on_event(event: AnyEvent) -> None:
        if isinstance(event, Progress) and event.done == 1:
            threading.Thread(target=cancel[0]).start()  # type: ignore[arg-type]

    with pytest.raises(JobFailed) as caught:
        run_calibration(CalibrationSpec(seconds=3.0), on_event, ranks=2, device="cpu", started=cancel.append)
    assert caught.value.cancelled
    partial = caught.value.partial
    assert isinstance(partial, Calibration)
    assert not partial.complete
    assert [s.what for s in partial.sweeps][:1] == ["TCP stream"]

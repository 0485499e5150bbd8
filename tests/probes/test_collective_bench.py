"""The collective benchmark with real gloo ranks, and nccl-tests' text beside it."""

from __future__ import annotations

import json

import pytest

from costlab.app.importers.nccl_tests import parse_nccl_tests
from costlab.app.report.collective_bench import bandwidths, render_bench
from costlab.app.topology.calibration import run_job
from costlab.probes.collective_spec import OPS, RESULT_FILE, BenchResult, BenchSpec, sizes

NCCL_TESTS = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    12.51    0.00    0.00      0    12.40    0.00    0.00      0
       65536         16384     float     sum      -1    15.22    4.31    4.31      0    14.96    4.38    4.38    N/A
   134217728      33554432     float     sum      -1    518.3  258.96  258.96      0      N/A     N/A     N/A    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 88.5
"""


@pytest.fixture(scope="module")
def result() -> BenchResult:
    spec = BenchSpec(ops=OPS, least=64, most=1 << 16, iterations=4, dtype="float32")
    return run_job(
        "costlab.probes.collective_bench", spec, RESULT_FILE, BenchResult, lambda _: None, ranks=3, device="cpu"
    )


def test_every_operation_gives_right_results_at_every_size(result: BenchResult) -> None:
    assert result.complete
    assert (result.ranks, result.backend) == (3, "gloo")
    told = {text.partition(":")[0] for text in result.skipped}
    assert {r.op for r in result.rows} | told == set(OPS)
    assert {"all_reduce", "all_gather", "broadcast", "send_recv"} <= {r.op for r in result.rows}
    for row in result.rows:
        assert row.wrong == 0, row
        assert 0 < row.time_us <= row.slowest_us * (1 + 1e-9)


def test_sizes_are_those_really_moved(result: BenchResult) -> None:
    """Three ranks cut 64 bytes into parts of five elements: 60 bytes."""
    reduced = [r for r in result.rows if r.op == "all_reduce"]
    assert [r.size for r in reduced] == sizes(BenchSpec(least=64, most=1 << 16))
    assert next((r.size, r.count) for r in result.rows if r.op == "all_gather") == (60, 5)
    root = {r.op: r.root for r in result.rows}
    assert (root["all_reduce"], root["broadcast"]) == (-1, 0)


def test_bandwidths_are_nccl_tests(result: BenchResult) -> None:
    row = next(r for r in result.rows if r.op == "all_reduce" and r.size == 65536)
    algbw, busbw = bandwidths(row, 3)
    assert algbw == pytest.approx(65536 / row.time_us / 1e3)
    assert busbw == pytest.approx(algbw * 4 / 3)


def test_nccl_tests_text_is_read() -> None:
    peer = parse_nccl_tests(NCCL_TESTS)
    assert peer.op == "all_reduce"
    assert [r.size for r in peer.rows] == [8, 65536, 134217728]
    first = peer.rows[0].out_of_place
    assert first is not None
    assert (first.time_us, first.wrong) == (12.51, 0)
    assert peer.rows[1].in_place is not None
    assert peer.rows[1].in_place.wrong is None
    assert peer.rows[2].in_place is None
    assert peer.refused == []
    assert parse_nccl_tests("nothing of the kind").rows == []
    short = parse_nccl_tests("8 2 float sum -1 1.0 2.0")
    assert (short.rows, len(short.refused)) == ([], 1)
    older = parse_nccl_tests("8 2 float sum -1 12.5 0.00 0.00 2e-07 12.4 0.00 0.00 2e-07")
    assert older.rows[0].out_of_place is not None
    assert older.rows[0].out_of_place.wrong is None, "versions before #wrong print the largest error there"


def test_beside_each_other(result: BenchResult) -> None:
    peer = parse_nccl_tests(NCCL_TESTS)
    data = json.loads(render_bench(result, "json", [peer]))
    beside = {r["size"]: r["peer_busbw_gbps"] for r in data["rows"] if r["op"] == "all_reduce"}
    assert beside[65536] == 4.38, "torch reduces in place: beside nccl-tests' in-place column"
    assert beside[64] is None
    assert {r["peer_busbw_gbps"] for r in data["rows"] if r["op"] == "broadcast"} == {None}
    text = render_bench(result, "text", [peer])
    assert "nccl-tests busbw" in text
    assert "algbw = size / transfer time" in " ".join(text.split())
    assert render_bench(result, "md").startswith("# Collectives: 3 ranks")

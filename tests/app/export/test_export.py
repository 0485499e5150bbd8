"""Exports of a stored run: OTLP through a real collector, Perfetto JSON by its schema, and their command line."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from costlab.app.cli import app
from costlab.app.export import layout, otlp, perfetto
from costlab.app.store import Run, StoreError, open_sample
from costlab.probes.records import SpanRow

SAMPLE = "h200-llama-1b"


@pytest.fixture(scope="module")
def run() -> Run:
    return open_sample(SAMPLE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Backend:
    """What stands behind the collector: decodes its protobuf with the protocol's own classes."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.spans: list[Any] = []
        self.ranks: set[int] = set()
        backend = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                message = service.ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    pairs = {a.key: a.value for a in resource.resource.attributes}
                    backend.ranks.add(pairs["costlab.rank"].int_value)
                    for scoped in resource.scope_spans:
                        backend.spans += scoped.spans
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[tuple[str, Backend]]:
    """A real collector (Rotel, from PyPI) that forwards to a backend of ours."""
    rotel = pytest.importorskip("rotel")
    backend, http_port, grpc_port = Backend(), free_port(), free_port()
    command = [str(Path(rotel.__file__).with_name("rotel-agent")), "start"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{http_port}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}"]
    command += ["--exporter", "otlp", "--otlp-exporter-protocol", "http"]
    command += ["--otlp-exporter-endpoint", f"http://127.0.0.1:{backend.port}"]
    log = (tmp_path / "rotel.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, "RUST_LOG": "info"})
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", http_port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "rotel.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.1)
        yield f"http://127.0.0.1:{http_port}", backend
    finally:
        process.terminate()
        process.wait(10)
        backend.server.shutdown()


def test_a_real_collector_takes_the_spans_with_their_parents(run: Run, collector: tuple[str, Backend]) -> None:
    endpoint, backend = collector
    result = CliRunner().invoke(app, ["export", "otlp", str(run.path), "--endpoint", endpoint])
    assert result.exit_code == 0, result.output
    expected = {s.span_id: s for s in layout.spans_of(run)}
    until = time.monotonic() + 20
    while len(backend.spans) < len(expected) and time.monotonic() < until:
        time.sleep(0.1)
    got = {s.span_id.hex(): s for s in backend.spans}
    assert got.keys() == expected.keys()
    assert {k: s.parent_span_id.hex() or None for k, s in got.items()} == {
        k: s.parent_span_id for k, s in expected.items()
    }
    assert all(s.trace_id.hex() == expected[k].trace_id for k, s in got.items())
    for key, span in got.items():
        above = got.get(expected[key].parent_span_id or "")
        if above is not None:
            assert above.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano
    assert backend.ranks == {0}


def test_the_file_is_what_the_protocols_own_decoder_takes(run: Run) -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    body = json.loads(otlp.document(run))
    count = 0
    for resource in body["resourceSpans"]:
        for scoped in resource["scopeSpans"]:
            for span in scoped["spans"]:  # protobuf's own mapping has base64 where OTLP has hexadecimal
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = __import__("base64").b64encode(bytes.fromhex(span[name])).decode()
                count += 1
    message = json_format.ParseDict(body, service.ExportTraceServiceRequest(), ignore_unknown_fields=False)
    assert sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans) == count > 1000


def test_large_trees_are_sent_in_batches(run: Run) -> None:
    parts = list(otlp.requests(run, batch=500))
    sizes = [sum(len(s["spans"]) for r in p["resourceSpans"] for s in r["scopeSpans"]) for p in parts]
    assert sizes == [500, 500, 500, len(layout.spans_of(run)) - 1500]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give --endpoint"),
        (["--endpoint", "ftp://x"], 3, "no http endpoint"),
        (["--endpoint", "http://[::1"], 3, "no http endpoint"),
        (["--endpoint", "http://host:port"], 3, "no http endpoint"),
        (["--endpoint", "http://a\x1b[31m b"], 3, "is no http endpoint"),
        (["--endpoint", "http://a b:1"], 3, "no answer from http://a b:1"),
        (["--endpoint", "http://127.0.0.1:9"], 3, "no answer from http://127.0.0.1:9/v1/traces"),
    ],
)
def test_wrong_endpoints_get_one_line(run: Run, arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["export", "otlp", str(run.path), *arguments])
    assert result.exit_code == code
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_file_is_not_overwritten_without_being_asked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command = ["export", "perfetto", str(run.path), "--output", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 0
    first = file.read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 2
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
    assert file.read_bytes() == first


def test_a_file_is_written_whole_or_not_at_all(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "trace.json"
    file.write_text("old")
    monkeypatch.setattr("os.fsync", full)
    result = CliRunner().invoke(app, ["export", "perfetto", str(run.path), "--output", str(file), "--force"])
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert file.read_text() == "old"
    monkeypatch.undo()
    result = CliRunner().invoke(app, ["export", "perfetto", str(run.path), "--output", str(tmp_path), "--force"])
    assert result.exit_code == 2
    assert "is a folder" in result.output


def damaged(path: Path, **values: Any) -> Run:
    """A run with one span of these values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"rank": 0, "trace_id": "0" * 32, "span_id": "1" * 16, "parent_span_id": None, "kind": "layer", "name": "n"}
    (path / "rank-00000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{**row, **values}]), path / "rank-00000" / "spans.parquet")
    (path / "manifest.json").write_bytes(msgspec.json.encode({"run_id": "x", "created": "", "status": "complete"}))
    return Run(path)


@pytest.mark.parametrize("form", ["perfetto", "otlp"])
def test_a_span_of_an_unknown_kind_is_bad_input(tmp_path: Path, form: str) -> None:
    run = damaged(tmp_path / "run", kind="\x1b[31mnonsense")
    result = CliRunner().invoke(app, ["export", form, str(run.path), "--output", "-"])
    assert result.exit_code == 5
    assert "damaged" in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize("ms", [float("inf"), -5.0, 1e305, 1e18])
def test_a_figure_that_no_time_line_holds_does_not_spoil_the_file(tmp_path: Path, ms: float) -> None:
    run = damaged(tmp_path / "run", ms=ms)
    (span,) = json.loads(otlp.document(run))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["startTimeUnixNano"] == span["endTimeUnixNano"]
    assert all(a["value"].get("doubleValue", 0.0) is not None for a in span["attributes"])
    assert json.loads(perfetto.document(run))["traceEvents"]


def test_a_name_cannot_command_the_terminal(tmp_path: Path) -> None:
    name = "a\x9b31m\x1b]0;title\x07\x7f"
    run = damaged(tmp_path / "run", name=name)
    for form in ("perfetto", "otlp"):
        out = CliRunner().invoke(app, ["export", form, str(run.path), "--output", "-"]).stdout
        assert not any(c in out for c in "\x9b\x1b\x07\x7f")
        assert json.loads(out)
        assert json.dumps(name)[1:-1] in json.dumps(json.loads(out))


def test_what_was_sent_before_a_collector_gave_up_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []

    def post(_url: str, body: bytes) -> None:
        if taken:
            raise otlp.OtlpError("http://c/v1/traces refused the spans: 503")
        taken.append(body)

    monkeypatch.setattr(otlp, "_post", post)
    monkeypatch.setattr(otlp, "requests", lambda run: iter([*batches(run)]))
    with pytest.raises(otlp.OtlpError, match="503; 500 spans were sent before"):
        otlp.send(run, "http://c")


def batches(run: Run) -> list[dict[str, Any]]:
    placed = layout.place(layout.spans_of(run), layout.began(run))
    return [{"resourceSpans": otlp._resources(run, placed[i : i + 500])} for i in (0, 500)]


def test_a_run_without_spans_says_so(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode({"run_id": "x", "created": "", "status": "complete"}))
    for command in (["perfetto", str(tmp_path)], ["otlp", str(tmp_path), "--output", "-"]):
        result = CliRunner().invoke(app, ["export", *command])
        assert result.exit_code == 5, result.output
    with pytest.raises(StoreError, match="no span tree"):
        layout.spans_of(Run(tmp_path))


class Complete(msgspec.Struct, tag_field="ph", tag="X", forbid_unknown_fields=True):
    """The fields of a complete event by the Trace Event Format."""

    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Any]
    cname: str = ""


class Counter(msgspec.Struct, tag_field="ph", tag="C", forbid_unknown_fields=True):
    name: str
    pid: int
    ts: float
    args: dict[str, float]


class Metadata(msgspec.Struct, tag_field="ph", tag="M", forbid_unknown_fields=True):
    name: str
    pid: int
    tid: int
    args: dict[str, str]


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    traceEvents: list[Complete | Counter | Metadata]
    displayTimeUnit: str
    otherData: dict[str, str]


def test_the_perfetto_file_follows_the_trace_event_format(run: Run) -> None:
    trace = msgspec.json.decode(perfetto.document(run), type=Trace)
    slices = [e for e in trace.traceEvents if isinstance(e, Complete)]
    assert all(e.ts >= 0 and e.dur >= 0 for e in slices)
    for track in {(e.pid, e.tid) for e in slices}:
        nested([e for e in slices if (e.pid, e.tid) == track])
    named = {(m.pid, m.tid) for m in trace.traceEvents if isinstance(m, Metadata) and m.name == "thread_name"}
    assert {(e.pid, e.tid) for e in slices} <= named
    kernels = {s.span_id: s.fusion_status for s in layout.spans_of(run) if s.kind == "kernel"}
    shown = {e.args["span_id"]: e.args["costlab.fusion_status"] for e in slices if e.tid != perfetto.TREE}
    assert shown == kernels


def nested(slices: list[Complete]) -> None:
    """Slices of a track must lie within each other or apart: the trace processor drops the rest."""
    open_until: list[float] = []
    for e in sorted(slices, key=lambda e: (e.ts, -e.dur)):
        while open_until and open_until[-1] <= e.ts + 1e-3:
            open_until.pop()
        assert not open_until or e.ts + e.dur <= open_until[-1] + 1e-3
        open_until.append(e.ts + e.dur)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.none() | st.floats(0, 50) | st.just(float("nan"))),
        max_size=14,
    )
)
def test_any_tree_even_a_damaged_one_is_placed_within_its_parents(nodes: list[tuple[int, int, float | None]]) -> None:
    rows = [
        SpanRow(trace_id="0", span_id=f"{own}", parent_span_id=f"{up}", rank=0, kind="layer", name="n", ms=ms)
        for own, up, ms in {own: (own, up, ms) for own, up, ms in nodes}.values()
    ]
    placed = {p.row.span_id: p for p in layout.place(rows, {0: 1000})}
    assert all(1000 <= p.begin <= p.end for p in placed.values())
    for p in placed.values():
        above = placed.get(p.row.parent_span_id or "")
        if above is not None and above is not p:
            assert above.begin <= p.begin
            assert p.end <= above.end

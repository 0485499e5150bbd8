"""OTLP/JSON of a run's span trees, and its delivery to a collector over HTTP.

The encoding is that of the OpenTelemetry protocol's JSON mapping (opentelemetry-proto, docs/specification.md, "JSON
Protobuf Encoding"): ids in hexadecimal, 64-bit integers as strings, enumerations as numbers.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec

from costlab.app import __name__ as scope
from costlab.app.export.layout import HOW, Placed, attributes, began, place, spans_of
from costlab.app.store import Run
from costlab.app.text import plain

BATCH = 2000  # spans a request: some 2 MB, collectors take 4 to 20
INTERNAL = 1  # SpanKind
TIMEOUT_S = 20.0


class OtlpError(Exception):
    """The collector could not be reached or refused; the message says which."""


def requests(run: Run, batch: int = BATCH) -> Iterator[dict[str, Any]]:
    """ExportTraceServiceRequest messages of the run, a resource for each rank. StoreError without spans."""
    placed = place(spans_of(run), began(run))
    for first in range(0, len(placed), batch):
        yield {"resourceSpans": _resources(run, placed[first : first + batch])}


def document(run: Run) -> bytes:
    """The whole run as one request, for a file."""
    return msgspec.json.encode({"resourceSpans": _resources(run, place(spans_of(run), began(run)))})


def send(run: Run, endpoint: str) -> int:
    """Post the run to a collector; the number of spans that it took. OtlpError where it did not take all."""
    url, count = traces_url(endpoint), 0
    for request in requests(run):
        try:
            _post(url, msgspec.json.encode(request))
        except OtlpError as error:
            raise OtlpError(f"{error}; {count:,} spans were sent before") if count else error from error
        count += sum(len(s["spans"]) for r in request["resourceSpans"] for s in r["scopeSpans"])
    return count


def traces_url(endpoint: str) -> str:
    """`http://host:4318` with the path for traces, as OTEL_EXPORTER_OTLP_ENDPOINT is read; a path given is kept."""
    try:
        parts = urllib.parse.urlsplit(endpoint if "//" in endpoint else f"http://{endpoint}")
        _ = parts.port  # raises for one that is no number
    except ValueError as error:
        raise OtlpError(f"'{plain(endpoint, 80)}' is no http endpoint: {plain(error, 80)}") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OtlpError(f"'{plain(endpoint, 80)}' is no http endpoint; write http://HOST:4318")
    path = parts.path if parts.path not in ("", "/") else "/v1/traces"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            said = reply.read(1 << 16)
    except urllib.error.HTTPError as error:
        detail = plain(error.read(2000).decode(errors="replace"), 160)
        raise OtlpError(f"{plain(url, 80)} refused the spans: {error.code} {detail}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise OtlpError(f"no answer from {plain(url, 80)}: {plain(getattr(error, 'reason', error), 120)}") from error
    rejected = _rejected(said)
    if rejected:
        raise OtlpError(f"{plain(url, 80)} rejected {rejected} spans")


def _rejected(said: bytes) -> int:
    try:
        reply = msgspec.json.decode(said)
        return int(reply["partialSuccess"]["rejectedSpans"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0  # a full success is an empty message


def _resources(run: Run, placed: list[Placed]) -> list[dict[str, Any]]:
    ranks: dict[int, list[Placed]] = {}
    for one in placed:
        ranks.setdefault(one.row.rank, []).append(one)
    return [
        {
            "resource": {"attributes": _pairs(_resource(run, rank))},
            "scopeSpans": [{"scope": {"name": scope.partition(".")[0]}, "spans": [_span(p) for p in spans]}],
        }
        for rank, spans in sorted(ranks.items())
    ]


def _resource(run: Run, rank: int) -> dict[str, Any]:
    workload, env = run.manifest.workload, run.manifest.environment
    return {
        "service.name": "costlab",
        "service.instance.id": f"{run.manifest.run_id}/rank-{rank}",
        "costlab.run": run.manifest.run_id,
        "costlab.rank": rank,
        "costlab.ranks": run.manifest.ranks,
        "costlab.workload": workload.title if workload else "",
        "costlab.device": env.device if env else "",
        "costlab.times": HOW,
    }


def _span(placed: Placed) -> dict[str, Any]:
    row = placed.row
    span = {
        "traceId": row.trace_id,
        "spanId": row.span_id,
        "name": row.name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(placed.begin),
        "endTimeUnixNano": str(placed.end),
        "attributes": _pairs(attributes(row)),
    }
    return span | ({"parentSpanId": row.parent_span_id} if row.parent_span_id else {})


def _pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}

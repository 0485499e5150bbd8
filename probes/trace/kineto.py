"""Reads Chrome/Kineto JSON traces, plain or gzipped, in chunks; says in `problems` what was lost or mended."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from costlab.probes.trace.columns import Builder, Event, TraceEvents
from costlab.probes.trace.repair import repair

CHUNK = 8 << 20
MAX_BYTES = 32 << 30  # of decompressed text; a compressed file can claim any size
MAX_RANKS = 1 << 20
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_BOUNDARY_SEARCH = 1 << 16


class TraceError(ValueError):
    """A file that cannot be read as a trace: what is wrong, where, and what to do, in one line."""


class _Chunk(msgspec.Struct):
    """A document's events with the other keys that matter, wherever in the document they stand."""

    traceEvents: list[Event]
    distributedInfo: Any = None
    deviceProperties: Any = None
    baseTimeNanoseconds: Any = None


class _Head(msgspec.Struct):
    distributedInfo: Any = None
    deviceProperties: Any = None
    baseTimeNanoseconds: Any = None


class _Unsplit(Exception):
    """The text cannot be cut at event boundaries; the whole document must be parsed at once."""


_document = msgspec.json.Decoder(_Chunk)
_array = msgspec.json.Decoder(list[Event])
_head = msgspec.json.Decoder(_Head)
_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def read(source: Path | str | bytes, *, name: str = "") -> TraceEvents:
    """Read a trace from a path or from bytes; `name` is what messages call it (default: the file's name).

    Raises TraceError when it is missing, empty, cut off, no trace, or damaged beyond repair.
    """
    label = name or (Path(source).name if isinstance(source, Path | str) else "trace")
    try:
        events = _read(source, label)
    except OSError as error:
        raise TraceError(f"{label}: cannot be opened: {error.strerror or error}; check the path") from error
    _note_losses(events)
    return events


def _read(source: Path | str | bytes, label: str) -> TraceEvents:
    try:
        with _open(source) as stream:
            builder, heads = _by_chunks(stream, label)
        mended = ""
    except _Unsplit:
        with _open(source) as stream:
            builder, heads, mended = _whole(_all_text(stream, label), label)
    events = builder.finish(label)
    if mended:
        events.problems.append(mended)
    events.problems += _losses(builder.counts)
    for head in heads:
        _apply_head(events, head)
    return events


@contextlib.contextmanager
def _open(source: Path | str | bytes) -> Iterator[IO[bytes]]:
    """The decompressed byte stream; gzip is known by its first bytes, not by the file's name."""
    with contextlib.ExitStack() as stack:
        raw: IO[bytes] = (
            io.BytesIO(source) if isinstance(source, bytes) else stack.enter_context(Path(source).open("rb"))
        )
        magic = raw.read(2)
        raw.seek(0)
        if magic == b"\x1f\x8b":
            raw = stack.enter_context(_gunzip(raw))
        yield raw


def _gunzip(raw: IO[bytes]) -> IO[bytes]:
    """Through isal, two to three times as fast as zlib, where it is installed."""
    try:
        module = importlib.import_module("isal.igzip")
    except ImportError:
        module = gzip
    return cast(IO[bytes], module.GzipFile(fileobj=raw, mode="rb"))


def _piece(stream: IO[bytes], label: str) -> bytes:
    try:
        return stream.read(CHUNK)
    except Exception as error:  # each decompressor has error classes of its own
        raise TraceError(f"{label}: cannot be read: {error}; copy it or record it again") from error


def _limited(stream: IO[bytes], label: str) -> Iterator[bytes]:
    total = 0
    while piece := _piece(stream, label):
        total += len(piece)
        if total > MAX_BYTES:
            raise TraceError(f"{label}: more than {MAX_BYTES >> 30} GiB of text; record fewer steps")
        yield piece


def _all_text(stream: IO[bytes], label: str) -> bytes:
    return b"".join(_limited(stream, label))


def _by_chunks(stream: IO[bytes], label: str) -> tuple[Builder, list[_Head]]:
    """Decode events a chunk at a time. Raise _Unsplit where the simple cuts do not work."""
    pieces = _limited(stream, label)
    buffer = next(pieces, b"").removeprefix(b"\xef\xbb\xbf")
    bare = buffer.lstrip()[:1] == b"["
    start = re.compile(rb"\[").search(buffer) if bare else _START.search(buffer)
    if start is None:
        raise _Unsplit
    builder, heads = Builder(), []
    if not bare:
        heads.append(_decode_head(buffer[: start.end()] + b"]}"))
    buffer = buffer[start.end() :]
    for piece in pieces:
        buffer += piece
        cut = _last_boundary(buffer)
        builder.add(_decode_array(b"[" + buffer[: cut[0] + 1] + b"]"))
        buffer = buffer[cut[1] :]
    events, head = _decode_tail(buffer, bare)
    builder.add(events)
    heads.append(head)
    return builder, heads


def _last_boundary(buffer: bytes) -> tuple[int, int]:
    """Where the last complete event of the buffer ends (index of its brace) and the next begins."""
    found = None
    for match in _BOUNDARY.finditer(buffer, max(0, len(buffer) - _BOUNDARY_SEARCH)):
        found = match
    if found is None:
        raise _Unsplit
    return found.start(), found.end()


def _decode_head(text: bytes) -> _Head:
    try:
        return _head.decode(text)
    except _BROKEN as error:
        raise _Unsplit from error


def _decode_array(text: bytes) -> list[Event]:
    try:
        return _array.decode(text)
    except _BROKEN as error:
        raise _Unsplit from error


def _head_of(document: _Chunk) -> _Head:
    return _Head(document.distributedInfo, document.deviceProperties, document.baseTimeNanoseconds)


def _decode_tail(buffer: bytes, bare: bool) -> tuple[list[Event], _Head]:
    if bare:
        return _decode_array(b"[" + buffer), _Head()
    try:
        document = _document.decode(b'{"traceEvents":[' + buffer)
    except _BROKEN as error:
        raise _Unsplit from error
    return document.traceEvents, _head_of(document)


def _whole(text: bytes, label: str) -> tuple[Builder, list[_Head], str]:
    """Parse a document at once: as it is, mended, or event by event with the malformed ones left out."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if not text.strip():
        raise TraceError(f"{label}: the file is empty; record the trace again")
    try:
        return *_parse(text, label), ""
    except _BROKEN as error:
        problem = error
    mended = repair(text).rstrip()
    if mended.lstrip()[:1] == b"[" and not mended.endswith(b"]"):
        mended = mended.rstrip(b",") + b"]"  # the format lets a bare array end without its bracket
    try:
        return *_parse(
            mended, label
        ), f"the file was not valid JSON ({_where(problem, text)}); it was mended before reading"
    except _BROKEN:
        raise TraceError(_explain(problem, text, label)) from problem


def _parse(text: bytes, label: str) -> tuple[Builder, list[_Head]]:
    """Raise one of _BROKEN where `text` is no JSON, TraceError where it is JSON but no trace."""
    builder = Builder()
    try:
        document = _document.decode(text)
    except msgspec.ValidationError:
        return _lenient(text, label)
    builder.add(document.traceEvents)
    return builder, [_head_of(document)]


def _lenient(text: bytes, label: str) -> tuple[Builder, list[_Head]]:
    """Valid JSON that is a bare array, or of which some events have fields of the wrong type: keep the rest."""
    document = msgspec.json.decode(text)
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise TraceError(f"{label}: no traceEvents list, so it is no Kineto or Chrome trace; give a profiler's trace")
    builder = Builder()
    events = []
    for item in listed:
        try:
            events.append(msgspec.json.decode(msgspec.json.encode(item), type=Event))
        except msgspec.ValidationError:
            builder.counts["malformed"] += 1
    builder.add(events)
    return builder, [msgspec.convert(document, _Head)] if isinstance(document, dict) else []


def _where(error: Exception, text: bytes) -> str:
    found = re.search(r"\(byte (\d+)\)", str(error))
    reason = re.sub(r"^JSON is malformed: | \(byte \d+\)$", "", str(error))
    if not found:
        return reason
    byte = int(found.group(1))
    line = text.count(b"\n", 0, byte) + 1
    return f"{reason} at byte {byte}, line {line}"


def _explain(error: Exception, text: bytes, label: str) -> str:
    where = _where(error, text)
    begun = text.lstrip()[:1] in (b"{", b"[")
    if "truncated" in str(error) or (begun and not text.rstrip().endswith((b"}", b"]"))):
        return (
            f"{label}: the file ends in the middle, after {len(text)} bytes ({where}); copy it again or record it again"
        )
    return f"{label}: not valid JSON and it could not be mended: {where}; record the trace again"


_LOSSES = {
    "malformed": "{} left out: not of the form of a trace event",
    "bad_times": "{} left out: no usable time",
    "unnamed": "{} left out: no name",
    "begin_end": "{} left out: begin/end events (ph B, E); only complete events (ph X) are read",
    "no_cat": "{} left out of the analysis: no category and no stream",
    "no_cat_device": "{} without a category taken as device work, for its stream and correlation",
    "big_ints": "{} with a number beyond 64 bits; the number was left out",
}


def _losses(counts: Counter[str]) -> list[str]:
    return [text.format(f"{n} event{'s' * (n != 1)}") for key, text in _LOSSES.items() if (n := counts[key])]


def _apply_head(events: TraceEvents, head: _Head) -> None:
    if isinstance(head.baseTimeNanoseconds, int):
        events.base_ns = head.baseTimeNanoseconds
    devices = head.deviceProperties
    if isinstance(devices, list) and devices:
        events.device_names = [str(d.get("name", "")) if isinstance(d, dict) else "" for d in devices]
    info = head.distributedInfo
    if not isinstance(info, dict):
        return
    events.rank = _index(info.get("rank"), events.rank)
    events.world_size = _index(info.get("world_size"), events.world_size)
    configured = info.get("pg_config")
    for group in configured if isinstance(configured, list) else []:
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            ranks = ",".join(str(r) for r in group["ranks"])
            events.groups.append((str(group.get("pg_name", "")), ranks, len(group["ranks"])))


def _index(value: Any, default: int | None) -> int | None:
    """A rank or a size, also when written as text; anything else is no answer."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if 0 <= number < MAX_RANKS else default


def _note_losses(events: TraceEvents) -> None:
    if not len(events):
        events.problems.append("the trace has no complete events")
    if events.rank is None:
        events.problems.append("the trace does not say which rank recorded it (no distributedInfo.rank)")

"""Reading traces: forms of the file, damage, and what is said about it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse
from costlab.probes.trace.columns import CATEGORY, NONE
from tests.probes.trace.synthetic import Recording

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
REAL = gzip.decompress((DATA / "gloo_fsdp2_rank0.json.gz").read_bytes())


def _fewer(text: bytes, count: int) -> bytes:
    whole = json.loads(text)
    return json.dumps(whole | {"traceEvents": whole["traceEvents"][-count:]}).encode()


SMALL = _fewer(REAL, 150)


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    return path


def event(**fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 2} | fields


def document(*events: Any, **head: Any) -> bytes:
    return json.dumps({**head, "traceEvents": list(events)}).encode()


def test_real_trace_plain_and_gzipped_are_the_same(tmp_path: Path) -> None:
    plain = tmp_path / "a.json"
    plain.write_bytes(REAL)
    events, zipped = kineto.read(plain), kineto.read(DATA / "gloo_fsdp2_rank0.json.gz")
    assert len(events) == len(zipped) == 1333
    assert (events.rank, events.world_size, events.groups) == (0, 2, [("0", "0,1", 2)])
    assert events.problems == zipped.problems == []
    assert (events.start == zipped.start).all()
    assert events.names == zipped.names


def test_small_chunks_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kineto.read(REAL)
    monkeypatch.setattr(kineto, "CHUNK", 3000)
    monkeypatch.setattr(kineto, "_BOUNDARY_SEARCH", 1000)
    chunked = kineto.read(REAL)
    assert (chunked.start == whole.start).all()
    assert (chunked.sequence == whole.sequence).all()
    assert [chunked.names[i] for i in chunked.name] == [whole.names[i] for i in whole.name]
    assert chunked.messages == whole.messages
    assert chunked.rank == whole.rank


def test_chunks_survive_objects_inside_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = [event(ts=i, args={"shapes": [{"a": 1}, {"b": 2}], "text": "}, {"}) for i in range(50)]
    monkeypatch.setattr(kineto, "CHUNK", 100)
    monkeypatch.setattr(kineto, "_BOUNDARY_SEARCH", 100)
    assert len(kineto.read(document(*nested))) == 50


def test_head_may_stand_behind_the_events() -> None:
    text = (
        b'{"traceEvents": [' + json.dumps(event()).encode() + b'], "distributedInfo": {"rank": "3", "world_size": 4}}'
    )
    events = kineto.read(text)
    assert (events.rank, events.world_size) == (3, 4)


def test_bare_array_and_its_optional_bracket() -> None:
    closed = json.dumps([event(), event(ts=20)]).encode()
    assert len(kineto.read(closed)) == 2
    assert len(kineto.read(closed[:-1] + b",")) == 2


def test_ids_above_int64_are_left_out_and_said() -> None:
    events = kineto.read(
        document(event(args={"Comms Id": 10159970886766084423}), event(ts=20, args={"correlation": 2**64 + 5}))
    )
    assert len(events) == 2
    assert (events.correlation == NONE).all()
    assert any("1 event with a number beyond 64 bits" in p for p in events.problems)


def test_uint64_file() -> None:
    events = kineto.read(shared("hta_large_integer_uint64.json.gz"))
    assert events.names == ["ncclKernel_AllReduce", "record_param_comms"]
    assert events.rank is None


def test_missing_rank_is_said() -> None:
    events = kineto.read(shared("tracelens_torch_compile_triton_rocm.json.gz"))
    assert events.rank is None
    assert any("which rank" in p for p in events.problems)


def test_wrong_rank_is_no_rank() -> None:
    for wrong in ("x", -1, None, [1], 2**40):
        assert kineto.read(document(event(), distributedInfo={"rank": wrong})).rank is None


def test_events_without_category() -> None:
    bare = {k: v for k, v in event().items() if k != "cat"}
    on_device = bare | {"name": "some_kernel", "args": {"stream": 7, "correlation": 3, "device": 0}}
    events = kineto.read(document(bare, on_device))
    assert sorted(events.cat.tolist()) == [CATEGORY["other"], CATEGORY["kernel"]]
    assert any(p.startswith("1 event left out of the analysis: no category") for p in events.problems)
    assert any(p.startswith("1 event without a category taken as device work") for p in events.problems)


def test_old_category_names() -> None:
    events = kineto.read(document(event(cat="Kernel"), event(cat="Memcpy", ts=11), event(cat="Runtime", ts=12)))
    assert events.cat.tolist() == [CATEGORY["kernel"], CATEGORY["gpu_memcpy"], CATEGORY["cuda_runtime"]]


@pytest.mark.parametrize(
    "damage",
    [
        (b'"aten::mm"', b'"C:\\path\\q"'),
        (b'"aten::mm"', b'"ends with \\"'),
        (b'"aten::mm"', b'"a "quoted" name"'),
        (b'"aten::mm"', b'"two\nlines\tand\x01control"'),
        (b'"aten::mm"', b'"not utf8 \xff\xfe"'),
        (b'"aten::mm"', b'"lone \\ud800 surrogate"'),
        (b'"dur": 2', b'"dur": 2, "x": NaN'),
        (b'"dur": 2', b'"dur": 2, "x": -Infinity'),
        (b'"dur": 2}', b'"dur": 2,}'),
    ],
)
def test_damage_of_trace_writers_is_mended_and_said(damage: tuple[bytes, bytes]) -> None:
    good = document(event(), event(name="other", ts=30))
    events = kineto.read(good.replace(*damage, 1))
    assert len(events) == 2
    assert "other" in events.names
    assert any("was mended" in p and "not valid JSON" in p for p in events.problems)


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity"])
def test_time_that_is_no_number(number: bytes) -> None:
    text = document(event(), event(ts=20)).replace(b'"ts": 20', b'"ts": ' + number)
    events = kineto.read(text)
    assert len(events) == 1
    assert any(p == "1 event left out: no usable time" for p in events.problems)


def test_malformed_events_do_not_cost_the_others() -> None:
    events = kineto.read(document(event(), 3, "x", event(ts=20, args=[1]), event(ts=30, dur=-5), event(ts="40"), None))
    assert events.start.tolist() == [0.0, 30.0]
    assert "4 events left out: not of the form of a trace event" in events.problems
    assert "1 event left out: no usable time" in events.problems


def test_begin_end_events_are_counted() -> None:
    events = kineto.read(document(event(), event(ph="B"), event(ph="E")))
    assert len(events) == 1
    assert any(p.startswith("2 events left out: begin/end") for p in events.problems)


def test_strange_ids_of_threads() -> None:
    events = kineto.read(document(event(tid="PyTorch Profiler"), event(tid=[1], ts=11), event(tid=1.5, ts=12)))
    assert len(events.threads) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "empty"),
        (b"{}", "no traceEvents"),
        (b"null", "no traceEvents"),
        (b'{"traceEvents": {}}', "no traceEvents"),
        pytest.param(b"[" * 100_000, "recursion depth", id="deep nesting"),
        pytest.param(REAL[:70_000], "ends in the middle", id="cut"),
        pytest.param(gzip.compress(REAL)[:9000], "cannot be read", id="gzip cut"),
        pytest.param(b"\x1f\x8b\x08" + bytes(40), "cannot be read", id="gzip damaged"),
    ],
)
def test_unreadable_files_say_what_and_what_to_do(text: bytes, words: str) -> None:
    with pytest.raises(kineto.TraceError) as caught:
        kineto.read(text, name="rank0.json")
    message = str(caught.value)
    assert message.startswith("rank0.json: ")
    assert words in message
    assert "\n" not in message


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(kineto.TraceError, match=r"none.json: cannot be opened"):
        kineto.read(tmp_path / "none.json")


def test_text_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_BYTES", 1000)
    with pytest.raises(kineto.TraceError, match="more than"):
        kineto.read(gzip.compress(REAL))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SMALL)))
def test_truncation_is_a_trace_error_or_nothing(cut: int) -> None:
    try:
        events = kineto.read(SMALL[:cut])
    except kineto.TraceError:
        return
    assert cut == len(SMALL)
    analyse(events, device="cpu", blocks=[])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["Input Dims", "Input type"]), st.binary(min_size=1, max_size=5))
@example(key="Input type", noise=b"\x80")
@example(key="Input Dims", noise=b"\\q")
def test_any_bytes_within_what_is_decoded_late(key: str, noise: bytes) -> None:
    """Shapes and types of a collective's tensors are skipped at first, and skipping checks less than decoding."""
    args = b'"Collective name": "allreduce", "In msg nelems": 4, "' + key.encode() + b'": ["' + noise + b'"]'
    event = b'{"ph": "X", "name": "record_param_comms", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "args": {' + args + b"}}"
    try:
        events = kineto.read(b'{"traceEvents": [' + event + b"]}")
    except kineto.TraceError:
        return
    analyse(events, device="cpu", blocks=[""])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=4))
@example(at=13814, noise=b"\x80")
def test_overwritten_bytes_never_crash(at: int, noise: bytes) -> None:
    try:
        events = kineto.read(SMALL[:at] + noise + SMALL[at + len(noise) :])
    except kineto.TraceError:
        return
    for device in ("cpu", "cuda"):
        analyse(events, device=device, blocks=[""])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
argument_names = st.sampled_from(
    ["correlation", "stream", "device", "bytes", "Sequence number", "Fwd thread id", "Input Dims", "Input type",
     "dtype", "In msg nelems", "Out msg nelems", "Group size", "Process Group Ranks", "Collective name", "Rank"]
)  # fmt: skip
odd_events = st.fixed_dictionaries(
    {"ph": st.just("X") | json_values, "ts": st.floats(0, 1e7) | json_values},
    optional={
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation"]) | json_values,
        "name": st.sampled_from(
            [
                "ncclKernel_AllReduce",
                "gloo:all_reduce",
                "c10d::allreduce_",
                "costlab::step::1",
                "cudaLaunchKernel",
                "aten::mm",
            ]
        )
        | json_values,
        "dur": st.floats(0, 1e5) | json_values,
        "tid": json_values,
        "args": st.dictionaries(argument_names, json_values, max_size=5) | json_values,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(odd_events, max_size=8), json_values)
def test_any_values_in_any_field(events: list[dict[str, Any]], info: Any) -> None:
    text = json.dumps({"distributedInfo": info, "deviceProperties": info, "traceEvents": events}).encode()
    try:
        read = kineto.read(text)
    except kineto.TraceError:
        return
    for device in ("cpu", "cuda"):
        analyse(read, device=device, blocks=[])


def test_recording_reads_back() -> None:
    recording = Recording(rank=5)
    recording.kernel("k", 10, 20, 5)
    events = kineto.read(recording.json())
    assert (events.rank, len(events)) == (5, 2)
    assert events.stream.tolist() == [NONE, 7]

"""Our own schedules in a trace: one call by its name however many ranges it has, with bytes and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.kernels.schedule.communicator import ISSUED, TAG
from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse
from costlab.probes.trace.model import RankTrace
from costlab.probes.trace.tags import Tag, parse
from tests.probes.trace.synthetic import AUTOGRAD, Recording

CALL_THREAD, TRACK_THREAD = 300, 301


def name(
    call: str, schedule: str = "hybrid", nbytes: int = 4096, kind: str = "all_reduce", dtype: str = "bfloat16"
) -> str:
    return f"{TAG}{kind} schedule={schedule} bytes={nbytes} dtype={dtype} ranks=0,1 call={call}"


def read(recording: Recording, device: str) -> RankTrace:
    return analyse(kineto.read(recording.json()), device=device, blocks=[])


def test_on_a_gpu_all_kernels_of_a_call_are_one_collective() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    for call, at in (("7100.1", 10), ("7100.2", 400)):
        r.note(name(call), at, 40)
        r.kernel("ncclDevKernel_SendRecv(x)", at + 2, at + 100, 50, stream=20)
        r.note(name(call), at + 50, 20)
        r.kernel("add_kernel", at + 52, at + 160, 20, stream=21)
    trace = read(r, "cuda")
    found = [(x.kind, x.schedule, x.start, x.dur, x.bytes_in, x.bytes_out, x.group, x.dtype) for x in trace.collectives]
    each = (4096, 4096, "0,1", "bfloat16")
    assert found == [("all_reduce", "hybrid", 110, 80, *each), ("all_reduce", "hybrid", 500, 80, *each)]


@pytest.mark.parametrize(("kind", "sizes"), [("all_gather", (2048, 4096)), ("reduce_scatter", (4096, 2048))])
def test_a_gather_and_a_scatter_have_a_part_on_one_side(kind: str, sizes: tuple[int, int]) -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    r.note(name("7100.1", kind=kind), 10, 40)
    r.kernel("ncclDevKernel_SendRecv(x)", 12, 100, 50)
    (call,) = read(r, "cuda").collectives
    assert (call.kind, call.bytes_in, call.bytes_out) == (kind, *sizes)


def on_the_host(recorded: bool) -> RankTrace:
    """A hook's call: made on the autograd thread, worked on by two others that send and receive."""
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    r.note("costlab::phase::backward", 0, 900)
    r.op("aten::mm", 5, 20)
    r.backward_op("autograd::engine::evaluate_function: MmBackward0", 50, 100, 1)
    r.note(f"{ISSUED}7100.1", 100, 5, AUTOGRAD)
    if recorded:
        r.note(name("7100.1", "chain"), 110, 300, CALL_THREAD)
        r.note(name("7100.1", "chain"), 115, 350, TRACK_THREAD)
        r.op("c10d::send", 120, 5, CALL_THREAD)
        r.op("c10d::recv_", 130, 5, TRACK_THREAD)
        r.op("c10d::allreduce_", 140, 5, CALL_THREAD)
        r.note("gloo:all_reduce", 150, 200, 500)
        r.note("gloo:send", 121, 30, 501)
    return read(r, "cpu")


def test_on_the_host_a_call_spans_its_threads_and_its_parts_are_no_calls() -> None:
    trace = on_the_host(recorded=True)
    (call,) = trace.collectives
    assert (call.kind, call.schedule, call.start, call.dur, call.bytes_in) == ("all_reduce", "chain", 110, 355, 4096)
    assert call.phase == "backward", "where the hook made it"
    (launch,) = [x for x in trace.launches if x.category == "communication"]
    assert launch.name == "costlab::comm::all_reduce chain", "one name for all steps"


def test_a_call_that_no_thread_recorded_is_said() -> None:
    trace = on_the_host(recorded=False)
    assert trace.collectives == []
    assert any("1 planned collectives ran on threads that the profiler did not record" in p for p in trace.problems)


@given(st.text(max_size=80) | st.builds(name, st.text(max_size=8), st.text(max_size=8), st.integers()))
def test_any_text_is_a_tag_or_none(text: str) -> None:
    found = parse(text.removeprefix(TAG))
    assert found is None or (found.nbytes >= 0 and found.message().group_size == 2)


def test_an_unknown_dtype_has_no_sizes() -> None:
    message = Tag("all_reduce", "ring", 64, "posit16", "0,1", "1.1").message()
    assert (message.elements_in, message.elements_out, message.group_size) == (None, None, 2)

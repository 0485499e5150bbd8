"""One rank's trace to launches, collectives and rows: synthetic GPU steps of known shape."""

from __future__ import annotations

import pytest

from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse, rows
from costlab.probes.trace.model import Launch, RankTrace
from costlab.probes.trace.summary import device_totals, ranks_in_events
from tests.probes.trace.synthetic import AUTOGRAD, MAIN, Recording


def run(recording: Recording, blocks: list[str] | None = None) -> RankTrace:
    return analyse(kineto.read(recording.json()), device="cuda", blocks=blocks or [])


def one(trace: RankTrace, name: str) -> Launch:
    found = [x for x in trace.launches if x.name == name]
    assert len(found) == 1
    return found[0]


def compiled_step() -> Recording:
    """Forward of one compiled block and an eager head, their backward on the autograd thread, an optimizer."""
    r = Recording()
    r.note("costlab::step::3", 0, 1000)
    r.note("costlab::phase::forward", 10, 290)
    r.note("costlab::layer::", 15, 280)
    r.note("costlab::layer::layers.0", 20, 100)
    r.note("costlab::frame::layers.0", 21, 98)
    r.note("FSDP::pre_forward (layers.0)", 22, 30)
    r.kernel("split_copy", 25, 40, 5)
    r.forward_op("CompiledFunction", 55, 60, 11)
    r.kernel("triton_poi_fused_add_0", 60, 70, 10)
    r.note("costlab::layer::head", 130, 50)
    r.forward_op("aten::linear", 132, 40, 12)
    r.forward_op("aten::mm", 135, 30, 12)
    r.kernel("sm90_xmma_gemm_fwd", 140, 150, 50)
    r.note("costlab::phase::backward", 310, 390)
    r.backward_op("MmBackward0", 320, 40, 12)
    r.op("aten::mm", 325, 30, AUTOGRAD)
    r.kernel("sm90_xmma_gemm_bwd", 330, 340, 60, tid=AUTOGRAD)
    r.op("autograd::engine::evaluate_function: CompiledFunctionBackward", 365, 200, AUTOGRAD)
    r.note("FSDP::pre_backward (layers.0)", 367, 50, AUTOGRAD)
    r.note("FSDP::backward_prefetch for layers.9", 370, 20, AUTOGRAD)
    r.kernel("prefetch_copy", 375, 405, 5, tid=AUTOGRAD)
    r.backward_op("CompiledFunctionBackward", 420, 140, 11)
    r.kernel("triton_red_fused_sum_1", 430, 440, 20, tid=AUTOGRAD)
    r.note("costlab::phase::optimizer", 710, 100)
    r.op("aten::_fused_adamw_", 715, 50)
    r.kernel("multi_tensor_apply_kernel", 720, 730, 100)
    return r


def test_work_is_placed_where_it_was_issued() -> None:
    trace = run(compiled_step(), ["layers.0"])
    assert trace.problems == []
    assert {x.step for x in trace.launches} == {3}
    places = {x.name: (x.phase, x.layer, x.frame, x.compiled, x.op) for x in trace.launches}
    assert places == {
        "split_copy": ("forward", "layers.0", "", False, ""),
        "triton_poi_fused_add_0": ("forward", "layers.0", "layers.0", True, "CompiledFunction"),
        "sm90_xmma_gemm_fwd": ("forward", "head", "", False, "aten::mm"),
        "sm90_xmma_gemm_bwd": ("backward", "head", "", False, "aten::mm"),
        "prefetch_copy": (
            "backward", "layers.9", "", False, "autograd::engine::evaluate_function: CompiledFunctionBackward"
        ),
        "triton_red_fused_sum_1": ("backward", "layers.0", "layers.0", True, "CompiledFunctionBackward"),
        "multi_tensor_apply_kernel": ("optimizer", "", "", False, "aten::_fused_adamw_"),
    }  # fmt: skip
    gemm = one(trace, "sm90_xmma_gemm_bwd")
    assert (gemm.start, gemm.dur, gemm.end, gemm.launch_start, gemm.stream) == (340, 60, 400, 330, "7")


def test_frame_without_annotation_is_the_block_that_holds_the_layer() -> None:
    recording = compiled_step()
    recording.events = [e for e in recording.events if not e["name"].startswith("costlab::frame")]
    trace = run(recording, ["layers", "layers.0", "layers.00"])
    assert one(trace, "triton_poi_fused_add_0").frame == "layers.0"
    assert one(trace, "triton_red_fused_sum_1").frame == "layers.0"
    assert one(trace, "sm90_xmma_gemm_fwd").frame == ""


def test_recomputed_layer_inside_a_backward_node() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 500)
    r.note("costlab::layer::layers.0", 10, 50)
    r.forward_op("aten::mm", 12, 20, 5)
    r.kernel("gemm_a", 15, 20, 5)
    r.backward_op("MmBackward0", 100, 200, 5)
    r.note("costlab::layer::layers.0.mlp", 110, 50, AUTOGRAD)
    r.kernel("gemm_recomputed", 120, 130, 5, tid=AUTOGRAD)
    r.kernel("gemm_gradient", 200, 210, 5, tid=AUTOGRAD)
    trace = run(r)
    assert (one(trace, "gemm_recomputed").layer, one(trace, "gemm_recomputed").phase) == ("layers.0.mlp", "backward")
    assert one(trace, "gemm_gradient").layer == "layers.0"


def test_forward_operator_is_the_last_with_its_sequence_number() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 300)
    r.note("costlab::layer::a", 10, 20)
    r.forward_op("aten::detach", 12, 5, 7)  # creates no node, so the number is used again
    r.note("costlab::layer::b", 40, 20)
    r.forward_op("aten::mm", 42, 5, 7)
    r.backward_op("MmBackward0", 100, 50, 7)
    r.kernel("gemm_bwd", 110, 120, 5, tid=AUTOGRAD)
    assert one(run(r), "gemm_bwd").layer == "b"


def test_kernels_of_a_cuda_graph_share_their_launch() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 300)
    r.note("costlab::layer::layers.1", 5, 100)
    r.note("costlab::frame::layers.1", 5, 100)
    r.forward_op("CompiledFunction", 10, 60, 1)
    r.call("cudaGraphLaunch", 20, 10)
    for i in range(3):
        r.again(f"triton_poi_fused_{i}", 40 + 10 * i, 8)
    trace = run(r, ["layers.1"])
    assert [x.frame for x in trace.launches] == ["layers.1"] * 3
    assert [x.layer for x in trace.launches] == ["layers.1"] * 3
    assert all(x.compiled and x.launch_start == 20 for x in trace.launches)


def test_repeated_and_negative_correlation_ids() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 300)
    r.note("costlab::layer::early", 5, 20)
    r.note("costlab::layer::late", 100, 20)
    r.call("cudaLaunchKernel", 10, 2)
    r.again("gemm_first", 20, 5)
    r.correlation -= 1
    r.call("cudaLaunchKernel", 110, 2)
    r.again("gemm_second", 120, 5)
    r.correlation = -5
    r.again("gemm_unlinked", 150, 5)
    trace = run(r)
    assert {x.name: x.layer for x in trace.launches} == {
        "gemm_first": "early",
        "gemm_second": "late",
        "gemm_unlinked": "",
    }
    assert one(trace, "gemm_unlinked").launch_start is None
    assert any("1 of 3 device events have no launch call" in p for p in trace.problems)
    assert any("several launch calls of the same id" in p for p in trace.problems)


def test_lost_kernels_are_counted() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 300)
    for i in range(4):
        r.call("cudaLaunchKernel", 10 + i, 0.5)
    r.again("gemm", 20, 5)
    assert any("3 of 4 kernel launches in the steps have no kernel" in p for p in run(r).problems)


def test_no_device_events_is_said_and_not_zero() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 300)
    r.op("aten::mm", 10, 50)
    trace = run(r)
    assert (trace.parts, trace.launches, trace.collectives) == ([], [], [])
    assert any("no device events" in p for p in trace.problems)
    assert rows(trace, 0) == ([], [])


def test_steps_by_profiler_or_as_one() -> None:
    r = Recording()
    r.note("ProfilerStep#4", 0, 100)
    r.note("ProfilerStep#5", 100, 100)
    r.kernel("gemm", 10, 20, 5)
    assert [w.step for w in run(r).steps] == [4, 5]
    bare = Recording()
    bare.kernel("gemm", 10, 20, 5)
    bare.kernel("gemm", 30, 50, 10)
    trace = run(bare)
    assert [(w.start, w.end) for w in trace.steps] == [(10, 50)]  # device events; times count from the first event
    assert len(trace.launches) == 2
    assert any("whole trace counts as one step" in p for p in trace.problems)


def test_work_past_the_last_step_is_said() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 100)
    r.kernel("gemm", 50, 60, 2000)
    assert any("ran 1.96 ms past" in p for p in run(r).problems)


def test_collectives_from_metadata() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    r.note("costlab::phase::forward", 0, 500)
    r.note("FSDP::all_gather (layers.3)", 10, 50)
    r.nccl("_allgather_base", 20, 100, 50, (1000, 2000))
    r.kernel("gemm", 30, 120, 60)  # hides 30 us of it
    r.note("FSDP::post_backward_reduce (layers.3)", 200, 50)
    r.nccl("_reduce_scatter_base", 210, 300, 40, (4000, 2000))
    trace = run(r)
    gather, scatter = trace.collectives
    assert (gather.kind, gather.group, gather.group_size, gather.dtype) == ("all_gather", "0,1", 2, "bfloat16")
    assert (gather.bytes_in, gather.bytes_out, gather.seq, gather.layer) == (2000, 4000, 0, "layers.3")
    assert (gather.exposed, scatter.exposed) == (20, 40)
    assert (scatter.kind, scatter.seq, scatter.bytes_in, scatter.bytes_out) == ("reduce_scatter", 1, 8000, 4000)
    collectives, parts = rows(trace, 4)
    assert [(c.rank, c.start_us, c.ms, c.exposed_ms) for c in collectives] == [
        (4, 100, 0.05, 0.02),
        (4, 300, 0.04, 0.04),
    ]
    assert sum(p.ms for p in parts) == pytest.approx(1.0)


def test_numbers_follow_the_order_of_issue_within_a_group() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    r.nccl("allreduce", 10, 500, 10, (8, 8))
    r.nccl("_allgather_base", 20, 100, 10, (8, 16))
    assert [(x.kind, x.seq) for x in run(r).collectives] == [("all_reduce", 0), ("all_gather", 1)]


def test_own_schedules_are_known_by_their_tag() -> None:
    r = Recording()
    r.note("costlab::step::0", 0, 1000)
    r.note("costlab::comm::all_reduce", 10, 100)
    r.kernel("ring_add_kernel", 20, 100, 30)
    r.kernel("Memcpy PtoP (Device -> Device)", 40, 140, 30, cat="gpu_memcpy")
    r.kernel("ring_add_kernel", 200, 210, 30)  # outside the tag: compute
    trace = run(r)
    (call,) = trace.collectives
    assert (call.kind, call.start, call.dur, call.bytes_in, call.group_size) == ("all_reduce", 100, 70, None, 0)
    assert [x.category for x in trace.launches] == ["communication", "communication", "memory"]


def test_kernels_launched_by_a_collective_operator() -> None:
    r = Recording(world=8)
    r.note("costlab::step::0", 0, 1000)
    r.op("record_param_comms", 10, 50)
    r.note("nccl:all_reduce", 12, 40)
    r.kernel("vendor_specific_kernel", 20, 100, 30)
    r.op("record_param_comms", 210, 90)
    r.op("aten::copy_", 220, 50)
    r.kernel("copy_of_the_flattened_result", 230, 300, 30)
    trace = run(r)
    assert [(x.kind, x.bytes_in, x.group_size) for x in trace.collectives] == [("all_reduce", None, 0)]
    assert [x.category for x in trace.launches] == ["communication", "memory"]
    assert any("do not say their process group" in p for p in trace.problems)


def test_totals_and_rank_of_a_whole_trace() -> None:
    r = Recording()
    r.nccl("allreduce", 10, 100, 50, (8, 8), Rank=1)
    r.kernel("gemm", 20, 120, 60)
    r.kernel("Memcpy HtoD (Pinned -> Device)", 30, 220, 10, cat="gpu_memcpy")
    events = kineto.read(r.json())
    totals = device_totals(events)
    assert totals is not None
    assert (totals.span_ms, totals.busy_ms, totals.compute_ms) == pytest.approx((0.13, 0.09, 0.06))
    assert ranks_in_events(events) == {1}
    assert MAIN != AUTOGRAD

"""The span tree: whole, deterministic, its times and bytes adding up, honest where something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from costlab.probes.fusion.model import FusionTrace, GraphSpan, KernelSpan, LayerTraffic, Lost
from costlab.probes.fusion.spans import join, span_id
from costlab.probes.records import KernelRow, MissRow, SpanRow
from costlab.probes.trace.model import Launch, RankTrace, StepWindow
from tests.work import counted

BLOCKS = ["layers.0", "layers.1"]
Joined = tuple[list[SpanRow], list[MissRow], list[KernelRow]]


def graph(phase: str = "forward") -> GraphSpan:
    lost = Lost(
        "mlp", "layout_mismatch", True, 40, "memory deps did not match", "aten.sin", "aten.cos", "m.py:3", "m.py:4"
    )
    return GraphSpan(
        "0/0",
        phase,
        "layers.0",
        "Block",
        kernels=[
            KernelSpan("triton_a", "reduction", "norm", ["norm"], ["aten.mean"], "m.py:1", 60, 40, actual=100),
            KernelSpan("extern_kernels.mm", "extern", "mlp.up", ops=["aten.mm.default"], flops=1000),
            KernelSpan("triton_b", "pointwise", "mlp", actual=100, addressable_lost=40, main_cause="layout_mismatch"),
        ],
        layers={
            "norm": LayerTraffic("norm", 100, ops=1, read=60, written=40),
            "mlp.up": LayerTraffic("mlp.up", extern=1),
            "mlp": LayerTraffic("mlp", 100, [lost], ops=2, read=50, written=50),
        },
    )


def launch(name: str, **more: object) -> Launch:
    values: dict[str, object] = {"start": 0.0, "dur": 1000.0, "category": "memory", "phase": "forward"} | more
    return Launch(name, **values)  # type: ignore[arg-type]


def measured(*extra: Launch, steps: int = 2) -> RankTrace:
    launches = []
    for step in range(steps):
        for i, block in enumerate(BLOCKS):
            at = step * 1e5 + i * 1e4
            common: dict[str, object] = {"step": step, "frame": block, "compiled": True}
            launches += [
                launch("triton_a", start=at, **common),
                launch("nvjet", start=at + 2, category="matmul", op="aten::mm", **common),
                launch("triton_b", start=at + 3, **common),
            ]
    windows = [StepWindow(s, s * 1e5, s * 1e5 + 9e4) for s in range(steps)]
    return RankTrace(0, "cuda", windows, [*launches, *extra])


def joined(trace: FusionTrace, rank: RankTrace, *, compiled: bool = True) -> Joined:
    return join(
        trace, rank, trace_id="abc", rank=3, layer_classes={"layers.0.mlp": "mlp"}, blocks=BLOCKS, compiled=compiled
    )


def supported(*graphs: GraphSpan) -> FusionTrace:
    return FusionTrace(True, graphs=list(graphs))


def layer(rows: list[SpanRow], path: str, phase: str = "forward") -> SpanRow:
    return next(r for r in rows if r.kind == "layer" and r.layer == path and r.phase == phase)


def assert_tree(rows: list[SpanRow]) -> None:
    ids = [r.span_id for r in rows]
    assert len(set(ids)) == len(ids)
    parents = {r.span_id: r for r in rows}
    order = {"step": ["step"], "phase": ["step"], "layer": ["phase", "layer"], "kernel": ["layer"]}
    for row in rows:
        if row.parent_span_id is not None:
            assert parents[row.parent_span_id].kind in order[row.kind]


def test_a_shared_graph_gives_each_block_its_layers_and_times() -> None:
    spans, misses, kernels = joined(supported(graph()), measured())
    assert_tree(spans)
    for block in BLOCKS:
        assert layer(spans, f"{block}.mlp").fusion_rate == pytest.approx(0.6)
        assert layer(spans, f"{block}.mlp").fusion_status == "partial"
        assert layer(spans, f"{block}.mlp").main_cause == "layout_mismatch"
        assert layer(spans, f"{block}.norm").fusion_status == "complete"
        assert layer(spans, f"{block}.mlp.up").fusion_rate is None
        assert layer(spans, block).fusion_rate == pytest.approx(0.8)
        assert layer(spans, block).ms == pytest.approx(3.0)
    assert [(m.layer, m.bytes, m.addressable) for m in misses] == [(f"{b}.mlp", 40, True) for b in BLOCKS]
    assert {k.layer for k in kernels if k.name == "nvjet"} == {f"{b}.mlp.up" for b in BLOCKS}
    assert next(k for k in kernels if k.name == "nvjet").flops == 1000


def test_times_add_up_at_every_level() -> None:
    spans, _, kernels = joined(supported(graph()), measured(launch("aten::add", op="aten::add", layer="head")))
    total = sum(k.ms or 0 for k in spans if k.kind == "kernel")
    assert total == pytest.approx(6.5)
    assert spans[0].ms == pytest.approx(total)
    assert sum(p.ms or 0 for p in spans if p.kind == "phase") == pytest.approx(total)
    assert sum(k.ms for k in kernels) == pytest.approx(total)
    top = [r for r in spans if r.kind == "layer" and r.layer in ("layers", "head")]
    assert sum(r.ms or 0 for r in top) == pytest.approx(total)


def test_ids_depend_on_place_and_rank_only() -> None:
    once, again = (joined(supported(graph()), measured())[0] for _ in range(2))
    assert [r.span_id for r in once] == [r.span_id for r in again]
    assert span_id("abc", "step", 0) != span_id("abc", "step", 1)
    assert {r.trace_id for r in once} == {"abc"} and {r.rank for r in once} == {3}


def test_without_launches_bytes_are_known_and_times_are_not() -> None:
    spans, misses, kernels = joined(supported(graph()), RankTrace(None, "cpu"))
    assert_tree(spans)
    assert kernels == []
    assert {r.ms for r in spans} == {None}
    assert layer(spans, "layers.1.mlp").fusion_rate == pytest.approx(0.6)
    assert len(misses) == 2


def test_an_unsupported_trace_says_unknown_and_keeps_the_times() -> None:
    trace = FusionTrace(False, note="not supported on torch 9")
    spans, misses, _ = joined(trace, measured())
    assert_tree(spans)
    assert misses == []
    assert {r.fusion_status for r in spans} == {"unknown"}
    assert {r.fusion_rate for r in spans} == {None}
    assert spans[0].ms == pytest.approx(6.0)
    assert layer(spans, "layers.1").ms == pytest.approx(3.0)


def test_nothing_at_all_is_one_unknown_step() -> None:
    spans, misses, kernels = joined(supported(), RankTrace(None, "cpu"))
    assert [(r.kind, r.fusion_status, r.ms) for r in spans] == [("step", "unknown", None)]
    assert (misses, kernels) == ([], [])


def eager(*names: str, **more: object) -> list[Launch]:
    return [launch(n, op=n, step=s, start=s * 1e5 + 5e4, **more) for s in range(2) for n in names]


def test_an_eager_layer_is_broken_in_a_compiled_run_only() -> None:
    rank = measured(*eager("aten::pow", "aten::mean", "aten::mul", layer="norm"))
    spans = joined(supported(graph()), rank)[0]
    assert (layer(spans, "norm").fusion_status, layer(spans, "norm").main_cause) == ("broken", "uncompiled")
    assert {k.fusion_status for k in spans if k.kind == "kernel" and k.layer == "norm"} == {"broken"}
    spans = joined(supported(), rank, compiled=False)[0]
    assert layer(spans, "norm").fusion_status == "unknown"


def test_what_holds_a_broken_layer_is_partial() -> None:
    rank = measured(*eager("aten::pow", "aten::mean", layer="encoder.norm"))
    spans = joined(supported(graph()), rank)[0]
    assert layer(spans, "encoder.norm").fusion_status == "broken"
    assert layer(spans, "encoder").fusion_status == "partial"


def test_a_split_reduction_is_one_call_with_both_times() -> None:
    second = [
        launch("triton_per_view_3", step=s, start=s * 1e5 + 1, frame="layers.0", compiled=True, dur=500.0)
        for s in range(2)
    ]
    spans, _, kernels = joined(supported(graph()), measured(*second))
    row = next(k for k in spans if k.kind == "kernel" and k.layer == "layers.0.norm")
    assert (row.calls, row.ms) == (1, pytest.approx(1.5))
    assert {k.layer for k in kernels if k.name == "triton_per_view_3"} == {"layers.0.norm"}


def test_one_eager_operator_alone_has_nothing_to_fuse_with() -> None:
    rank = measured(
        *eager("aten::native_layer_norm", layer="norm"), *eager("aten::mm", layer="head", category="matmul")
    )
    spans = joined(supported(graph()), rank)[0]
    assert layer(spans, "norm").fusion_status == "complete"
    assert layer(spans, "head").fusion_status == "complete"


def test_a_little_eager_work_is_partial() -> None:
    rank = measured(*eager("aten::pow", "aten::mul", layer="norm", dur=1.0))
    assert layer(joined(supported(graph()), rank)[0], "norm").fusion_status == "partial"


@pytest.mark.parametrize(
    ("names", "status", "cause"),
    [
        (("aten::mul_", "aten::addcdiv_"), "broken", "per_parameter_loop"),
        (("multi_tensor_apply_kernel",), "partial", "foreach"),
        (("aten::_fused_adamw_",), "complete", ""),
    ],
)
def test_the_optimizer_by_how_it_steps(names: tuple[str, ...], status: str, cause: str) -> None:
    rank = measured(*eager(*names, phase="optimizer"))
    row = layer(joined(supported(graph()), rank)[0], "optimizer", "optimizer")
    assert (row.fusion_status, row.main_cause, row.layer_class) == (status, cause, "optimizer")


def test_sharding_and_loss_have_places_of_their_own() -> None:
    rank = measured(
        *eager("ncclDevKernel_AllGather", category="communication", layer="layers.0"),
        *eager("fsdp::all_gather_copy_in", layer="layers.0"),
        *eager("aten::_log_softmax", "aten::nll_loss_forward"),
    )
    spans = joined(supported(graph()), rank)[0]
    assert {k.kernel_kind for k in spans if k.kind == "kernel" and k.layer == "fsdp"} == {"collective", "copy"}
    assert layer(spans, "fsdp").fusion_status == "complete"
    assert layer(spans, "loss").main_cause == "uncompiled"
    assert layer(spans, "loss").layer_class == "loss"


def test_a_compiled_launch_nobody_knows_has_no_parent() -> None:
    stray = launch("triton_poi_mystery", compiled=True, start=-1.0)
    placed = launch("aten::topk", op="aten::topk", compiled=True, frame="layers.1", start=2e4)
    spans = joined(supported(graph()), measured(stray, placed))[0]
    orphan = next(k for k in spans if k.name == "triton_poi_mystery")
    known = next(k for k in spans if k.name == "aten::topk")
    assert orphan.parent_span_id is None and orphan.fusion_status == "unknown"
    assert known.parent_span_id is not None and known.layer == "layers.1"
    assert spans[0].ms == pytest.approx(7.0)


def test_a_cut_layer_is_broken_and_its_parent_partial() -> None:
    cut = graph()
    cut.hard[""] = ["graph_break"]
    spans = joined(supported(cut), measured())[0]
    assert (layer(spans, "layers.1").fusion_status, layer(spans, "layers.1").main_cause) == ("broken", "graph_break")
    assert layer(spans, "layers").fusion_status == "partial"
    assert spans[0].fusion_status == "partial"


def test_a_graph_that_runs_twice_a_step_counts_twice() -> None:
    rank = measured()
    rank.steps = rank.steps[:1]
    for x in rank.launches:
        x.step = 0
    spans, misses, _ = joined(supported(graph()), rank)
    assert layer(spans, "layers.0.mlp").bytes_read == 100
    assert [m.bytes for m in misses] == [80, 80]
    assert layer(spans, "layers.0.norm").calls == 2


def test_the_model_itself_counts_only_its_own_operators() -> None:
    own = GraphSpan("1/0", "forward", "", "Model", kernels=[KernelSpan("triton_c", "pointwise", "", actual=10)])
    own.layers[""] = LayerTraffic("", 10, ops=1, read=10)
    spans = joined(supported(graph(), own), RankTrace(None, "cuda"))[0]
    assert layer(spans, "").bytes_read == 10
    forward = next(r for r in spans if r.kind == "phase")
    outermost = [r for r in spans if r.kind == "layer" and r.layer in ("", "layers")]
    assert forward.bytes_read == sum(r.bytes_read or 0 for r in outermost)


def test_joining_needs_no_torch() -> None:
    code = "import costlab.probes.fusion.spans, costlab.probes.fusion.trace, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def work_of_joining(layers: int) -> int:
    blocks = [f"layers.{i}" for i in range(layers)]
    launches = [
        launch(name, start=float(i), step=0, frame=b, compiled=True, op=op)
        for i, b in enumerate(blocks)
        for name, op in (("triton_a", ""), ("nvjet", "aten::mm"), ("triton_b", ""))
    ]
    rank = RankTrace(0, "cuda", [StepWindow(0, 0.0, 1e6)], launches)
    with counted() as work:
        spans, _, _ = join(supported(graph()), rank, trace_id="t", rank=0, layer_classes={}, blocks=blocks)
    assert len([s for s in spans if s.kind == "kernel"]) == 3 * layers
    return work.calls


def test_joining_grows_no_faster_than_the_layers() -> None:
    assert work_of_joining(200) < 2.4 * work_of_joining(100)

"""Launches find their kernels: by name, by order, through shared graphs, with kernels that no span names."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.probes.fusion.matching import Match, Matcher, family, kernel_name
from costlab.probes.fusion.model import GraphSpan, KernelSpan
from costlab.probes.trace.model import Launch

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be shared

BLOCKS = [f"layers.{i}" for i in range(4)]


def loop(name: str, layer: str = "", kind: str = "pointwise") -> KernelSpan:
    return KernelSpan(name, kind, layer)


def call(op: str, layer: str = "") -> KernelSpan:
    return KernelSpan("extern_kernels.x", "extern", layer, ops=[op])


def block(root: str = "layers.0", phase: str = "forward", compile_id: str = "0/0") -> GraphSpan:
    kernels = [
        loop("triton_norm_0", "norm"),
        call("aten.mm.default", "up"),
        loop("triton_act_1"),
        call("aten.addmm.default", "down"),
        loop("triton_add_2"),
    ]
    return GraphSpan(compile_id, phase, root, "Block", kernels=kernels)


class Tape:
    """Launches in order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def add(self, name: str, op: str = "", frame: str = "", phase: str = "forward", **extra: object) -> None:
        category = "matmul" if op else "memory"
        at = float(len(self.launches))
        self.launches.append(
            Launch(name, at, 0.5, category, phase=phase, frame=frame, op=op, compiled=True, **extra)  # type: ignore[arg-type]
        )

    def block(self, frame: str = "", phase: str = "forward", **extra: object) -> None:
        for name, op in (
            ("triton_norm_0", ""),
            ("nvjet_1", "aten::mm"),
            ("triton_act_1", ""),
            ("nvjet_2", "aten::addmm"),
            ("triton_add_2", ""),
        ):
            self.add(name, op, frame, phase, **extra)


def places(found: list[Match], graphs: list[GraphSpan]) -> list[tuple[str, str]]:
    return [
        (m.base, graphs[m.graph].kernels[m.kernel].layer) for m in found if m.graph is not None and m.kernel is not None
    ]


EXPECTED = ["norm", "up", "", "down", ""]


def test_frames_say_which_block_a_shared_graph_runs_for() -> None:
    tape = Tape()
    for frame in ("layers.0", "layers.2", "layers.1"):
        tape.block(frame)
    found = Matcher([block()], BLOCKS).match(tape.launches)
    assert places(found, [block()]) == [(f, x) for f in ("layers.0", "layers.2", "layers.1") for x in EXPECTED]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_encoder_and_a_decoder_have_kernels_of_the_same_names(phase: str) -> None:
    roots = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    for compiled in (["encoder.0", "decoder.0"], roots, ["encoder.0", "encoder.1", "decoder.0"]):
        graphs = [block(root, phase, f"{i}/0") for i, root in enumerate(compiled)]
        order = roots if phase == "forward" else roots[::-1]
        tape = Tape()
        for frame in order:
            tape.block(frame, phase)
        found = Matcher(graphs, roots).match(tape.launches)
        assert places(found, graphs) == [(f, x) for f in order for x in EXPECTED]


def test_without_frames_blocks_run_in_order_and_backwards_in_backward() -> None:
    graphs = [block(), block(phase="backward")]
    tape = Tape()
    for phase in ("forward", "backward"):
        for _ in BLOCKS:
            tape.block(phase=phase)
    found = Matcher(graphs, BLOCKS).match(tape.launches)
    order = [m.base for m in found if m.name == "triton_norm_0"]
    assert order == [*BLOCKS, *reversed(BLOCKS)]
    products = [(m.phase, m.base) for m in found if m.name == "nvjet_1"]
    assert products == [("forward", b) for b in BLOCKS] + [("backward", b) for b in reversed(BLOCKS)]


def test_blocks_that_cannot_be_told_apart_are_not_guessed() -> None:
    tape = Tape()
    for _ in range(3):  # four blocks share the graph: which one did not run?
        tape.block()
    found = Matcher([block()], BLOCKS).match(tape.launches)
    assert {m.base for m in found} == {"layers"}


def test_two_micro_batches_are_two_passes() -> None:
    tape = Tape()
    for _ in range(2):
        for _ in BLOCKS:
            tape.block()
    found = Matcher([block()], BLOCKS).match(tape.launches)
    assert [m.base for m in found if m.name == "triton_add_2"] == BLOCKS * 2


def test_a_module_annotation_stands_in_for_the_frame() -> None:
    tape = Tape()
    tape.block(layer="layers.3.mlp")
    found = Matcher([block()], BLOCKS).match(tape.launches)
    assert {m.base for m in found} == {"layers.3"}


def test_a_recompile_for_wider_blocks_serves_those() -> None:
    graphs = [block("layers.0"), block("layers.2", compile_id="0/1")]
    tape = Tape()
    for frame in BLOCKS:
        tape.block(frame)
    found = Matcher(graphs, BLOCKS).match(tape.launches)
    assert [m.graph for m in found if m.name == "triton_norm_0"] == [0, 0, 1, 1]


def test_a_superseded_compile_counts_only_where_no_other_has_the_name() -> None:
    old, new = block(), block(compile_id="0/1")
    old.superseded = True
    old.kernels.append(loop("triton_only_old"))
    tape = Tape()
    tape.block("layers.0")
    tape.add("triton_only_old", frame="layers.0")
    assert [m.graph for m in Matcher([old, new], BLOCKS).match(tape.launches)] == [1] * 5 + [0]


def test_one_name_twice_in_a_graph_alternates() -> None:
    graph = GraphSpan("0/0", "forward", "", "", kernels=[loop("triton_x", "a"), loop("triton_x", "b")])
    tape = Tape()
    for _ in range(4):
        tape.add("triton_x")
    assert [layer for _, layer in places(Matcher([graph], []).match(tape.launches), [graph])] == ["a", "b", "a", "b"]


def test_recomputation_runs_forward_graphs_in_backward() -> None:
    tape = Tape()
    tape.block("layers.1", phase="backward")
    found = Matcher([block()], BLOCKS).match(tape.launches)
    assert {(m.base, m.phase, m.graph) for m in found} == {("layers.1", "backward", 0)}


def test_a_split_reduction_joins_its_parent() -> None:
    graph = GraphSpan(
        "0/0", "forward", "", "", kernels=[loop("triton_red_0", "norm", "reduction"), loop("triton_poi_1")]
    )
    tape = Tape()
    for name in ("triton_red_0", "triton_per_view_3", "triton_poi_1"):
        tape.add(name)
    found = Matcher([graph], []).match(tape.launches)
    assert [(m.kernel, m.alias) for m in found] == [(0, False), (0, True), (1, False)]


def test_a_call_with_several_kernels_is_one_span() -> None:
    graph = GraphSpan(
        "0/0",
        "backward",
        "",
        "",
        kernels=[loop("triton_a"), call("aten._flash_attention_backward.default"), loop("triton_b")],
    )
    tape = Tape()
    tape.add("triton_a", phase="backward")
    for name in ("dot_do_o", "dq_dk_dv", "convert_dq"):
        tape.add(name, "aten::_flash_attention_backward", phase="backward")
    tape.add("triton_b", phase="backward")
    found = Matcher([graph], []).match(tape.launches)
    assert [(m.kernel, m.alias) for m in found] == [(0, False), (1, False), (1, True), (1, True), (2, False)]


def test_products_at_the_seam_of_two_graphs_go_to_the_right_one() -> None:
    first = GraphSpan("0/0", "forward", "a", "", kernels=[loop("triton_a"), call("aten.mm.default", "last")])
    second = GraphSpan("1/0", "forward", "b", "", kernels=[call("aten.mm.default", "first"), loop("triton_b")])
    tape = Tape()
    tape.add("triton_a")
    tape.add("gemm", "aten::mm")
    tape.add("gemm", "aten::mm")
    tape.add("triton_b")
    found = Matcher([first, second], []).match(tape.launches)
    assert places(found, [first, second]) == [("a", ""), ("a", "last"), ("b", "first"), ("b", "")]


def test_a_graph_of_library_calls_only() -> None:
    graph = GraphSpan("0/0", "forward", "head", "", kernels=[call("aten.addmm.default", "")])
    tape = Tape()
    tape.add("gemm", "aten::addmm", frame="head")
    (found,) = Matcher([graph], []).match(tape.launches)
    assert (found.graph, found.kernel, found.base) == (0, 0, "head")


def test_eager_launches_stay_unmatched() -> None:
    launch = Launch("aten::mm", 0.0, 1.0, "matmul", op="aten::mm", phase="forward")
    (found,) = Matcher([block()], BLOCKS).match([launch])
    assert found.graph is None


def test_a_users_triton_kernel_has_its_own_name() -> None:
    graph = GraphSpan("0/0", "forward", "", "", kernels=[KernelSpan("my_kernel_0", "user_triton", "mlp")])
    tape = Tape()
    tape.add("my_kernel")
    assert places(Matcher([graph], []).match(tape.launches), [graph]) == [("", "mlp")]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("aten::mm", "matmul"),
        ("aten.addmm.default", "matmul"),
        ("mkl._mkl_linear", "matmul"),
        ("aten::cudnn_convolution", "convolution"),
        ("aten.convolution.default", "convolution"),
        ("aten.convolution_backward.default", "convolution_backward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_flash_attention_backward", "attention_backward"),
        ("aten.topk.default", "topk"),
        ("aten::topk", "topk"),
    ],
)
def test_families(operator: str, expected: str) -> None:
    assert family(operator) == expected


def test_the_cpp_profilers_counter_is_no_part_of_a_name() -> None:
    assert kernel_name("graph_12_cpp_fused_add_0") == "cpp_fused_add_0"
    assert kernel_name("triton_poi_fused_add_0") == "triton_poi_fused_add_0"


NAMES = st.sampled_from(
    ["triton_norm_0", "triton_act_1", "nvjet", "aten::mul", "triton_unknown", "graph_0_triton_add_2"]
)


@BUSY
@given(
    st.lists(
        st.tuples(NAMES, st.sampled_from(["", "aten::mm"]), st.sampled_from(["", *BLOCKS, "x"]), st.booleans()),
        max_size=20,
    )
)
def test_every_launch_is_matched_once_whatever_the_trace(rows: list[tuple[str, str, str, bool]]) -> None:
    launches = [
        Launch(name, float(i), 1.0, "memory", op=op, frame=frame, compiled=compiled, phase="forward")
        for i, (name, op, frame, compiled) in enumerate(rows)
    ]
    found = Matcher([block(), block(phase="backward")], BLOCKS).match(launches)
    assert [m.launch for m in found] == launches

"""Turns Inductor's final schedule of one graph into `GraphFacts`, inside the compile and therefore quickly.

Together with `inductor` the only module that reads torch internals; tried on torch 2.11.0 and 2.13.0. It reads and
never writes them.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch

from costlab.probes.fusion import fqn
from costlab.probes.fusion.facts import FxNode, GraphFacts, SchedKernel, SchedOp

_COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional", "c10d", "fsdp", "_c10d_functional_autograd"})
_VIEWS = frozenset({"reshape", "_unsafe_view", "alias", "detach", "lift_fresh_copy", "as_strided", "getitem"})
_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)")
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm"})


def compile_id() -> str:
    """The id of the frame being compiled ("2/0"), or ""."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def frame_modules(names: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """(FQN, class) of the modules whose methods are on the Python stack, innermost first.

    A frame counts when its first argument is a module in `names` (id -> FQN).
    """
    found: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames:
            owner = frame.f_locals.get(code.co_varnames[0])
            name = names.get(id(owner)) if isinstance(owner, torch.nn.Module) else None
            if name is not None and (not found or found[-1][0] != name):
                found.append((name, _class_name(type(owner))))
        frame = frame.f_back
    return tuple(found)


def _class_name(kind: type) -> str:
    """Class of a module without FSDP2's prefix."""
    name = kind.__name__
    return name[4:] if name.startswith("FSDP") and len(name) > 4 and name[4].isupper() else name


def resumed_at() -> str:
    """`file.py:line` after which the frame being compiled continues a function, "" for a frame from its start."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_code.co_filename.endswith("convert_frame.py"):
            code = frame.f_locals.get("code")
            found = _RESUMED.match(str(getattr(code, "co_name", "")))
            return f"{PurePath(code.co_filename).name}:{found.group(1)}" if found and code is not None else ""
        frame = frame.f_back
    return ""


def _hint(size: Any) -> int:
    """A dimension as a number; a dynamic one as the size it was traced with."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 0


def _numel(value: torch.Tensor) -> int:
    total = 1
    for size in value.shape:
        total *= _hint(size)
    return total


def tensor_bytes(value: Any) -> int:
    """Bytes of a (fake) tensor or of a sequence of them."""
    if isinstance(value, torch.Tensor):
        return _numel(value) * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(v) for v in value)
    return 0


def _describe_target(target: Any) -> tuple[str, str, str]:
    """(full name, packet, namespace) of a node's target."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target), target.overloadpacket.__name__, target.namespace
    name = str(getattr(target, "__name__", target))
    return name, name, ""


def _is_view(target: Any, packet: str) -> bool:
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and (bool(getattr(target, "is_view", False)) or packet in _VIEWS)


def _module_of(meta: dict[str, Any]) -> tuple[str, str]:
    """(source expression, class) of the module a node belongs to; ("?", "") where nothing says."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = meta.get(key)
        if stack:
            expression, kind = list(stack.values())[-1]
            return str(expression), _class_name(kind) if isinstance(kind, type) else str(kind).rpartition(".")[2]
    trace = meta.get("stack_trace") or ""
    return ("?" if not trace or "Gradient addition node" in trace else ""), ""


def _written(node: torch.fx.Node, packet: str) -> tuple[str, ...]:
    """Fresh buffers that an operator fills: dataflow goes through them, though no edge of the graph says so."""
    schema = getattr(node.target, "_schema", None)
    if packet != "triton_kernel_wrapper_mutation" and not getattr(schema, "is_mutable", False):
        return ()
    return tuple(i.name for i in node.all_input_nodes if _describe_target(i.target)[1].startswith("empty"))


def _group(name: str, meta: dict[str, Any]) -> str:
    """Nodes decomposed from one user-level operator share this."""
    sequence, original = meta.get("seq_nr"), meta.get("original_aten")
    if sequence is None or original is None:
        return name
    return f"{sequence}:{original}:{bool(meta.get('autograd_backward'))}"


def matmul_flops(packet: str, node: torch.fx.Node) -> int:
    """2·m·n·k of a matrix product from its operands' shapes."""
    shapes = [i.meta["val"].shape for i in node.all_input_nodes if isinstance(i.meta.get("val"), torch.Tensor)]
    value = node.meta.get("val")
    operands = shapes[1:3] if packet in ("addmm", "baddbmm") and len(shapes) > 2 else shapes[:2]
    if not operands or not isinstance(value, torch.Tensor):
        return 0
    return 2 * _numel(value) * _hint(operands[0][-1])


def attention_flops(packet: str, node: torch.fx.Node) -> int:
    """Operations of `_scaled_dot_product_*` and its backward, [batch, heads, tokens, width] operands; 0 for others.

    Forward Q K^T and P V; backward those of Q K^T again and of the four gradients. Keys and values may have fewer heads
    than queries, which torch 2.11's own formula refuses; a causal mask is not taken off, as there.
    """
    backward = packet.endswith("_backward")
    operands = node.args[1:4] if backward else node.args[:3]
    values = [a.meta.get("val") for a in operands if isinstance(a, torch.fx.Node)]
    shapes = [[_hint(s) for s in v.shape] for v in values if isinstance(v, torch.Tensor) and v.dim() == 4]
    if len(shapes) != 3:
        return 0
    (batch, heads, rows, width), (_, _, columns, _), (_, _, _, width_out) = shapes
    depth = 3 * width + 2 * width_out if backward else width + width_out
    return 2 * batch * heads * rows * columns * depth


def _flops(node: torch.fx.Node, packet: str) -> int:
    """Floating point operations of a library call; 0 where torch has no formula."""
    if packet in _MATMULS:
        return matmul_flops(packet, node)
    if packet.startswith("_scaled_dot_product") and (flops := attention_flops(packet, node)):
        return flops
    if "conv" not in packet and "attention" not in packet:
        return 0
    from torch._inductor.fx_utils import count_flops_fx

    return int(count_flops_fx(node) or 0)


def fx_nodes(graph: torch.fx.Graph, errors: Any) -> dict[str, FxNode]:
    """All nodes that produce a value, in order."""
    nodes: dict[str, FxNode] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "placeholder"):
            continue
        value = node.meta.get("val")
        target, packet, namespace = _describe_target(node.target) if node.op == "call_function" else ("", "", "")
        module, module_class = _module_of(node.meta)
        record = FxNode(
            name=node.name,
            op=node.op,
            target=target,
            packet=packet,
            namespace="collective" if namespace in _COLLECTIVE_NAMESPACES else namespace,
            inputs=tuple(i.name for i in node.all_input_nodes),
            nbytes=tensor_bytes(value),
            dtype=str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "",
            device=value.device.type if isinstance(value, torch.Tensor) else "",
            module=module,
            module_class=module_class,
            stack=node.meta.get("stack_trace") or "",
            group=_group(node.name, node.meta),
            view=_is_view(node.target, packet),
            mutates=bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False)),
            writes=_written(node, packet),
        )
        try:
            record.flops = _flops(node, packet)
        except Exception as error:  # a formula that fails must not cost the graph
            errors[f"flops of {packet}: {type(error).__name__}"] += 1
        nodes[node.name] = record
    return nodes


def kernel_kind(node: Any) -> str:
    """Kind of a final scheduler node, as in model.KernelSpan.kind."""
    from torch._inductor import ir, scheduler

    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return "nop"
    if node.is_foreach():
        return "foreach"
    if node.is_template():
        return "template"
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        return _extern_kind(node.node, ir)
    return "reduction" if node.is_reduction() else "pointwise"


def _extern_kind(node: Any, ir: Any) -> str:
    if isinstance(node, ir.MultiOutput):
        return "nop"
    by_name = {"DeviceCopy": "device_copy", "_WaitKernel": "wait"}
    if type(node).__name__ in by_name:
        return by_name[type(node).__name__]
    if isinstance(node, getattr(ir, "_CollectiveKernel", ())):
        return "collective"
    if isinstance(node, ir.UserDefinedTritonKernel):
        return "user_triton"
    return "extern"


def _role(node: Any) -> str:
    from torch._inductor import ir, scheduler

    if isinstance(node, scheduler.NopKernelSchedulerNode) or node.node is None:
        return "nop"
    if isinstance(node.node, ir.MultiOutput):
        return "multi_output"
    if node.is_template():
        return "template"
    return "extern" if isinstance(node, scheduler.ExternKernelSchedulerNode) else "loop"


def _indexed(dep: Any) -> tuple[int, int]:
    """(hash of how a dependency indexes its buffer, bytes it loads); (0, 0) for a dependency on the whole buffer."""
    index = getattr(dep, "index", None) if type(dep).__name__ == "MemoryDep" else None
    return (0, 0) if index is None else (hash((index, dep.size)), int(dep.numbytes_hint()))


def _sched_op(node: Any, kernel: int, renames: dict[str, str]) -> SchedOp:
    ir_node = node.node
    exact = ir_node.get_origin_node() if ir_node is not None else None
    reads: dict[str, dict[int, int]] = {}
    for dep in node.read_writes.reads:
        index, nbytes = _indexed(dep)
        for name in {dep.name, renames.get(dep.name, dep.name)}:
            reads.setdefault(name, {})[index] = nbytes
    return SchedOp(
        name=node.get_name(),
        kernel=kernel,
        role=_role(node),
        buffers=tuple(node.get_buffer_names()),
        reads=reads,
        origins=tuple(o.name for o in ir_node.get_origins()) if ir_node is not None else (),
        origin=exact.name if exact is not None else "",
        reduction=bool(node.is_reduction()),
    )


def schedule(scheduler: Any, facts: GraphFacts) -> None:
    """Fill kernels and operations of `facts` from the final `scheduler.nodes`."""
    renames = dict(scheduler.mutation_real_name)
    for index, kernel in enumerate(scheduler.nodes):
        members = [_sched_op(node, index, renames) for node in kernel.get_nodes()]
        facts.ops.update({m.name: m for m in members})
        facts.kernels.append(
            SchedKernel(
                index=index,
                kind=kernel_kind(kernel),
                device=str(kernel.get_device() or ""),
                ops=tuple(m.name for m in members),
                bytes_read=int(kernel.get_read_buffer_sizes()),
                bytes_written=int(kernel.get_write_buffer_sizes()),
            )
        )


def outputs(graph: torch.fx.Graph, facts: GraphFacts) -> None:
    """Fill the graph's outputs, and those among them that the user's code sees (not what backward keeps)."""
    from torch._guards import TracingContext

    node = next(n for n in reversed(graph.nodes) if n.op == "output")
    listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
    facts.outputs = frozenset(n.name for n in node.all_input_nodes)
    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None) if context is not None else None
    shown: Iterable[Any] = listed
    if metadata is not None and facts.phase != "backward":
        start = metadata.num_mutated_inp_runtime_indices
        shown = list(listed)[start : start + len(metadata.output_info)]
    facts.user_outputs = tuple(n.name for n in shown if isinstance(n, torch.fx.Node))


def frame_root(chain: tuple[tuple[str, str], ...], nodes: Iterable[FxNode], known: frozenset[str]) -> tuple[str, str]:
    """(FQN, class) of the module that the graph's paths are relative to."""
    relative = [fqn.from_source(n.module) for n in nodes if n.module not in ("", "?")]
    classes = dict(reversed(chain))
    candidates = [name for name, _ in chain]
    for name, _ in chain:
        candidates += [a for a in fqn.ancestors(name) if a not in candidates]
    root = fqn.closest_root(candidates or [""], relative, known)
    return root, classes.get(root, "")

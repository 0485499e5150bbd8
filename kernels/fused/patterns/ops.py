"""One way of reading the many spellings in a Dynamo graph: what a node computes, of what, and on which tensors.

A node may be `torch.mul(a, b)`, `a * b`, `a.mul(b)` or `aten.mul.Tensor`; all read as ("mul", (a, b)). Everything is
decided on the graph before autograd: torch's functions and methods, not normalised, with in-place writes and views.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_FUNCTIONS: dict[Any, str] = {
    operator.add: "add", torch.add: "add", operator.sub: "sub", torch.sub: "sub", operator.mul: "mul",
    torch.mul: "mul", operator.truediv: "div", torch.div: "div", operator.neg: "neg", torch.neg: "neg",
    operator.pow: "pow", torch.pow: "pow", torch.square: "square", torch.mean: "mean", torch.sum: "sum",
    torch.rsqrt: "rsqrt", torch.sqrt: "sqrt", torch.reciprocal: "reciprocal", torch.var: "var",
    operator.getitem: "getitem", torch.cat: "cat", torch.chunk: "chunk", torch.split: "split",
    F.silu: "silu", F.gelu: "gelu", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", torch.erf: "erf",
    F.rms_norm: "rms_norm", torch.rms_norm: "rms_norm", F.layer_norm: "layer_norm", torch.layer_norm: "layer_norm",
    F.linear: "linear", F.cross_entropy: "cross_entropy", torch.reshape: "view", torch.flatten: "flatten",
}  # fmt: skip
_METHODS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg", "pow": "pow", "square": "square",
    "mean": "mean", "sum": "sum", "rsqrt": "rsqrt", "sqrt": "sqrt", "reciprocal": "reciprocal", "chunk": "chunk",
    "split": "split", "sigmoid": "sigmoid", "view": "view", "reshape": "view", "flatten": "flatten",
}  # fmt: skip
_COMMUTES = frozenset(("add", "mul"))
_WRITES = tuple(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow", "setitem"))
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


@dataclass(frozen=True)
class Call:
    """What a node computes: a name of this module's own, positional and named arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by place or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


def read(node: Any) -> Call | None:
    """What the node computes, None for anything that these rules do not know."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        name = _FUNCTIONS.get(node.target)
    else:
        name = _METHODS.get(str(node.target)) if node.op == "call_method" else None
    return Call(name, node.args, dict(node.kwargs)) if name and "out" not in node.kwargs else None


def is_call(node: Any, name: str) -> Call | None:
    """The node's call if it computes `name`, else None."""
    call = read(node)
    return call if call is not None and call.name == name else None


def pairs(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Operands of a plain binary operation, in both orders where it commutes; [] for another node or with alpha."""
    call = is_call(node, name)
    if call is None or len(call.args) != 2 or call.kwargs:
        return []
    a, b = call.args
    return [(a, b), (b, a)] if name in _COMMUTES and a is not b else [(a, b)]


def value(node: Any) -> Tensor | None:
    """The example tensor of a node (a FakeTensor while compiling), None where there is none."""
    if not isinstance(node, fx.Node):
        return None
    found = node.meta.get("example_value", node.meta.get("val"))
    return found if isinstance(found, Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The node's dtype, None where it is no tensor."""
    found = value(node)
    return None if found is None else found.dtype


def cast_of(node: Any) -> fx.Node | None:
    """What the node converts to another dtype (or leaves as it is), None if it does anything else."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or not node.args:
        return None
    source, *rest = node.args
    if not isinstance(source, fx.Node) or set(node.kwargs) - {"dtype"}:
        return None
    name = str(node.target)
    known = name in _CASTS or name == "type_as" or (name in ("to", "type") and _only_dtype(rest, node.kwargs))
    before, after = value(source), value(node)
    if not known or before is None or after is None or before.device != after.device:
        return None
    return source


def _only_dtype(rest: list[Any], kwargs: dict[str, Any]) -> bool:
    wanted = rest[0] if len(rest) == 1 else kwargs.get("dtype") if not rest else None
    return isinstance(wanted, torch.dtype | fx.Node)


def uncast(node: Any) -> Any:
    """The node behind any conversions of dtype."""
    source = cast_of(node)
    while source is not None:
        node, source = source, cast_of(source)
    return node


def widened(node: Any) -> Any:
    """The node behind conversions that lose nothing; one that rounds is kept, since it changes the values after it."""
    source = cast_of(node)
    while source is not None and _holds(dtype_of(node), dtype_of(source)):
        node, source = source, cast_of(source)
    return node


def _holds(wide: torch.dtype | None, narrow: torch.dtype | None) -> bool:
    return wide is not None and narrow is not None and torch.promote_types(wide, narrow) == wide


def cast_next(node: fx.Node) -> bool:
    """Whether all that happens to the node is a conversion: a pattern then ends at that, not here."""
    return len(node.users) == 1 and cast_of(next(iter(node.users))) is node


def path_between(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """The conversions from `source` (left out) up to `node`."""
    found = []
    while node is not source:
        found.append(node)
        nearer = cast_of(node)
        if nearer is None:
            break
        node = nearer
    return found


def live(graph: fx.Graph) -> Iterator[fx.Node]:
    """The graph's nodes as they are now, those left out that are erased meanwhile."""
    return (node for node in list(graph.nodes) if not getattr(node, "_erased", False))


def number(value: Any) -> float | None:
    """A plain number, None for anything else; booleans are no numbers."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_last_dim(dim: Any, of: Any) -> bool:
    """Whether `dim` (an int, or one in a tuple) is the last dimension of the tensor that `of` makes."""
    tensor = value(of)
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    return tensor is not None and isinstance(dim, int) and dim in (-1, tensor.dim() - 1)


def storage(node: Any) -> int | None:
    """An identity of the memory a node's tensor lies in: equal for views of each other."""
    tensor = value(node)
    if tensor is None:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # tensors without storage alias nothing
        return None


def written(graph: fx.Graph) -> set[int]:
    """Memory that some node of the graph writes to in place; what is not understood counts as writing."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op.startswith("call_") and _writes(node):
            found |= {s for n in node.all_input_nodes if (s := storage(n)) is not None}
    return found


def _writes(node: fx.Node) -> bool:
    if "out" in node.kwargs or node.kwargs.get("inplace") is True or node.op == "call_module":
        return True
    name = getattr(node.target, "__name__", str(node.target))
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return node.target in _WRITES or (name.endswith("_") and not name.endswith("__")) or _positional_inplace(node, name)


def _positional_inplace(node: fx.Node, name: str) -> bool:
    return name in ("silu", "relu", "gelu", "dropout", "hardtanh", "leaky_relu", "elu") and True in node.args[1:]

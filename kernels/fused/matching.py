"""Recognises in a user's modules what the fused kernels compute: by structure and by trial, never by a class's name.

An RMSNorm is a module with one vector `weight`, a float eps and nothing else, whose forward agrees with the formula on
random inputs. Everything larger is found in the FX graph of a module's forward, its submodules taken as they are.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from costlab.kernels.fused.held import Held, read_after_stored
from costlab.kernels.fused.launch import MAX_COLUMNS
from costlab.kernels.fused.rms_norm import rms_norm_reference

MARK = "_costlab_unfused"  # on the class of a changed module: the class before
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


_FRESH = (nn.BatchNorm2d, nn.Conv2d, nn.Linear)  # their output is a tensor that nobody else holds
_IN_PLACE = tuple(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow"))


class NotTraceable(Exception):
    """A module's forward has no single graph; the message says why."""


def hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward (hooks of any kind)."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)


def eps_of(module: nn.Module) -> float | None:
    """The module's epsilon, None if it has none; nn.RMSNorm's default depends on the dtype and counts as none."""
    for name in EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float) and 0 < value < 1:
            return value
    return None


def is_rms_norm(module: nn.Module) -> bool:
    """Whether the module computes x / rms(x) * weight over the last dimension, found out by running a copy of it."""
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or [*module.children(), *module.buffers()] or hooked(module):
        return False
    weight, eps = parameters["weight"], eps_of(module)
    if weight.dim() != 1 or not 0 < weight.shape[0] <= MAX_COLUMNS or eps is None:
        return False
    return _agrees(module, lambda x, w: rms_norm_reference(x, w, eps), weight.shape[0])


def _agrees(module: nn.Module, formula: Callable[[Tensor, Tensor], Tensor], columns: int) -> bool:
    """Whether a fp32 CPU copy with a random weight gives the formula's values on inputs of several scales."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, generator=generator)
    try:
        trial = copy.deepcopy(module).to_empty(device="cpu").float()
        with torch.no_grad():
            dict(trial.named_parameters())["weight"].copy_(weight)
            for training, scale in ((True, 1.0), (True, 1e-3), (False, 30.0)):
                x = torch.randn(2, 3, columns, generator=generator) * scale + 0.3 * scale
                y = trial.train(training)(x.clone())
                if not isinstance(y, Tensor) or y.shape != x.shape:
                    return False
                torch.testing.assert_close(y.float(), formula(x, weight), rtol=1e-4, atol=1e-5)
    except Exception:  # whatever the user's forward raises, it is not the formula
        return False
    return True


def is_layer_norm(module: nn.Module) -> bool:
    """Whether the module is torch's LayerNorm over one dimension with weight and bias."""
    return (
        type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.normalized_shape[0] <= MAX_COLUMNS
        and module.weight is not None
        and module.bias is not None
        and not hooked(module)
    )


def is_linear(module: nn.Module, bias: bool) -> bool:
    """Whether the module is torch's Linear, with or without a bias as asked, and nothing hangs on it."""
    return type(module) is nn.Linear and (module.bias is not None) == bias and not hooked(module)


class _Tracer(fx.Tracer):
    """Takes every submodule as one node, except plain sequences, whose forward is known."""

    proxy_buffer_attributes = True  # a buffer may be cut by a size that is known only when it runs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return type(m).forward is not nn.Sequential.forward or hooked(m)


@contextlib.contextmanager
def traces_kept() -> Iterator[None]:
    """Inside, what `fed_linears` traced to look into a module is not traced again for the module's own rewrite."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


_kept: ContextVar[dict[nn.Module, fx.GraphModule] | None] = ContextVar("traces", default=None)


def trace_once(module: nn.Module) -> fx.GraphModule:
    """As `trace`, a graph to look at; it may be the one that `trace` will give."""
    kept = _kept.get()
    if kept is None:
        return trace(module)
    if module not in kept:
        kept[module] = trace(module)
    return kept[module]


def trace(module: nn.Module) -> fx.GraphModule:
    """The graph of the module's forward, if it is the same in training and evaluation mode. Raises NotTraceable."""
    earlier = (_kept.get() or {}).pop(module, None)
    return earlier if earlier is not None else _traced(module)


def _traced(module: nn.Module) -> fx.GraphModule:
    codes, kept, kind, held = [], module.training, type(module), Held(module)
    try:
        module.__class__ = getattr(kind, MARK, kind)
        for mode in (False, True):
            module.training = mode
            graph = _Tracer().trace(module)
            codes.append(graph.python_code("self").src)
    except Exception as error:  # user code under a tracer fails in any way it likes
        raise NotTraceable(f"its forward cannot be traced: {type(error).__name__}") from error
    finally:
        module.training, module.__class__ = kept, kind
        stored = held.restore()
    if stored:
        raise NotTraceable(f"its forward stores {stored}")
    if name := read_after_stored(module):
        raise NotTraceable(f"its forward reads {name}, which a module inside stores")
    if codes[0] != codes[1]:
        raise NotTraceable("its forward differs between training and evaluation")
    if any(n.op == "get_attr" and str(n.target).startswith("_tensor_constant") for n in graph.nodes):
        raise NotTraceable("its forward holds a tensor that is neither parameter nor buffer")
    reason = next((r for n in graph.nodes if (r := _effect(n, module))), None)
    if reason:
        raise NotTraceable(reason)
    return fx.GraphModule(module, graph)


def inlined(module: nn.Module) -> set[nn.Module]:
    """Plain sequences inside the module whose members `trace` takes one by one: they are not called themselves."""
    found: set[nn.Module] = set()
    for child in module.children():
        if type(child).forward is nn.Sequential.forward and not hooked(child):
            found |= {child} | inlined(child)
    return found


def _effect(node: fx.Node, module: nn.Module) -> str | None:
    """What makes it unsafe to move or drop operations around this node, or None."""
    name = getattr(node.target, "__name__", str(node.target))
    alone = bool(node.args) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) == 1
    child = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    in_place = getattr(child, "inplace", False) is True or node.kwargs.get("inplace", False) is True
    if (in_place or name == "relu_") and not alone:
        return f"{name} works in place on a tensor that is used elsewhere"
    written = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
    unseen = node.target is operator.iadd and alone and type(_producer(node.args[0], module)) in _FRESH
    if (written and name != "relu_") or name == "setitem" or (node.target in _IN_PLACE and not unseen):
        return f"{name} works in place"
    if not node.users and node.op.startswith("call") and node.target not in (operator.getitem, getattr):
        return f"{name} is called for its effect"
    return None


def _producer(node: Any, module: nn.Module) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def called(node: Any, module: nn.Module) -> nn.Module | None:
    """The submodule that this node calls with one positional argument, else None."""
    if isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        return module.get_submodule(str(node.target))
    return None


def operands(node: Any, functions: tuple[Any, ...], method: str) -> tuple[fx.Node, fx.Node] | None:
    """Both operands if the node is a plain binary operation on two nodes (no alpha, no scalar, not in place)."""
    if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
        return None
    right_kind = (node.op == "call_function" and node.target in functions) or (
        node.op == "call_method" and node.target == method
    )
    a, b = node.args
    return (a, b) if right_kind and isinstance(a, fx.Node) and isinstance(b, fx.Node) else None


def sum_of(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Operands of an addition."""
    return operands(node, (operator.add, torch.add), "add")


def in_place_sum_of(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Operands of an addition in place, which `trace` lets pass where nobody can tell."""
    return operands(node, (operator.iadd,), "")


def is_batch_norm(node: Any, module: nn.Module) -> bool:
    """Whether the node calls torch's BatchNorm2d with weight and bias, and nothing hangs on it."""
    norm = called(node, module)
    return type(norm) is nn.BatchNorm2d and norm.weight is not None and not hooked(norm)


def difference_of(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Operands of a subtraction."""
    return operands(node, (operator.sub, torch.sub), "sub")


def product_of(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Operands of a multiplication."""
    return operands(node, (operator.mul, torch.mul), "mul")


_ASKED = {"shape", "size", "dtype", "device", "dim"}


def fed_linears(node: fx.Node, module: nn.Module) -> list[nn.Module] | None:
    """The Linears without bias that are all that ever reads this node's value, there or one module down; else None."""
    found: list[nn.Module] = []
    for user in node.users:
        if user.op != "call_module" or [a for a in (*user.args, *user.kwargs.values()) if a is node] != [node]:
            return None
        child = module.get_submodule(str(user.target))
        if is_linear(child, bias=False) and not any(u.op == "output" for u in user.users):
            found.append(child)
            continue
        if user.args[0] is not node or hooked(child):
            return None
        try:
            graph = trace_once(child).graph
        except NotTraceable:
            return None
        x = next(n for n in graph.nodes if n.op == "placeholder")
        readers = [n for n in x.users if not _asks(n)]
        linears = [called(n, child) for n in readers]
        if not linears or any(n is None or not is_linear(n, bias=False) for n in linears):
            return None
        found += [n for n in linears if n is not None]
    return found or None


def _asks(node: fx.Node) -> bool:
    """Whether the node reads a tensor's form and not its values."""
    name = node.args[1] if node.target is getattr else node.target
    return node.op in ("call_function", "call_method") and name in _ASKED


def activation_of(node: Any, module: nn.Module) -> tuple[str, fx.Node] | None:
    """(name in `gated.ACTIVATIONS`, input) if the node is SiLU or GELU and does not work in place."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    x = node.args[0]
    child = called(node, module)
    if child is not None:
        if type(child) is nn.SiLU and not child.inplace and not hooked(child):
            return "silu", x
        if type(child) is nn.GELU and not hooked(child):
            return ("gelu_tanh" if child.approximate == "tanh" else "gelu"), x
        return None
    if node.op != "call_function" or len(node.args) != 1:
        return None
    if node.target is F.silu and not node.kwargs.get("inplace", False):
        return "silu", x
    if node.target is F.gelu:
        form = node.kwargs.get("approximate", "none")
        return {"none": ("gelu", x), "tanh": ("gelu_tanh", x)}.get(str(form))
    return None


def relu_of(node: Any, module: nn.Module) -> fx.Node | None:
    """Input of a ReLU, in place or not, else None."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    child = called(node, module)
    if child is not None:
        return node.args[0] if type(child) is nn.ReLU and not hooked(child) else None
    function = node.op == "call_function" and node.target in (F.relu, torch.relu, torch.relu_)
    method = node.op == "call_method" and node.target in ("relu", "relu_")
    return node.args[0] if (function or method) and len(node.args) == 1 else None


def rotation_of(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) if the node is x rotated by the halves convention in fp32 and cast back, else None."""
    x = _cast_back(node)
    joined = node.args[0] if x is not None else None
    if not isinstance(joined, fx.Node) or joined.op != "call_function" or joined.target is not torch.cat:
        return None
    parts = joined.args[0]
    dim = joined.kwargs.get("dim", joined.args[1] if len(joined.args) > 1 else 0)
    if dim not in (-1, 3) or not isinstance(parts, tuple | list) or len(parts) != 2:
        return None
    minus, plus = difference_of(parts[0]), sum_of(parts[1])
    if x is None or minus is None or plus is None:
        return None
    halves = [_half(f, x) for p in (*minus, *plus) for f in (product_of(p) or ())]
    factors = [f for p in (*minus, *plus) for f in (product_of(p) or ())]
    if len(factors) != 8:
        return None
    terms = [_term(factors[i : i + 2], halves[i : i + 2]) for i in range(0, 8, 2)]
    if any(t is None for t in terms):
        return None
    (half_a, cos), (half_b, sin), *rest = [t for t in terms if t is not None]
    if (half_a, half_b) != (0, 1) or sorted(rest, key=lambda t: t[0]) != [(0, sin), (1, cos)]:
        return None
    return x, cos, sin


def _term(factors: list[fx.Node], halves: list[int | None]) -> tuple[int, fx.Node] | None:
    """(which half, the other factor) of a product of one half and something."""
    if (halves[0] is None) == (halves[1] is None):
        return None
    at = 0 if halves[0] is not None else 1
    half = halves[at]
    return (half, factors[1 - at]) if half is not None else None


def _cast_back(node: Any) -> fx.Node | None:
    """x if the node is `something.to(x.dtype)` or `something.type_as(x)`."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or len(node.args) != 2 or node.kwargs:
        return None
    wanted = node.args[1]
    if node.target == "type_as" and isinstance(wanted, fx.Node):
        return wanted
    is_dtype = (
        node.target == "to"
        and isinstance(wanted, fx.Node)
        and wanted.op == "call_function"
        and wanted.target is getattr
        and wanted.args[1] == "dtype"
    )
    source = wanted.args[0] if is_dtype and isinstance(wanted, fx.Node) else None
    return source if isinstance(source, fx.Node) else None


def _half(node: fx.Node, x: fx.Node) -> int | None:
    """0 or 1 if the node is that half of x's fp32 copy along the last dimension."""
    if node.op != "call_function" or node.target is not operator.getitem or node.args[1] not in (0, 1):
        return None
    chunk = node.args[0]
    if not isinstance(chunk, fx.Node) or chunk.target not in ("chunk", torch.chunk) or len(chunk.args) < 2:
        return None
    dim = chunk.kwargs.get("dim", chunk.args[2] if len(chunk.args) > 2 else 0)
    wide = chunk.args[0]
    if chunk.args[1] != 2 or dim not in (-1, 3) or not isinstance(wide, fx.Node) or wide.op != "call_method":
        return None
    upcast = (wide.target == "float" and wide.args == (x,)) or (wide.target == "to" and wide.args == (x, torch.float32))
    return int(str(node.args[1])) if upcast and not wide.kwargs else None

"""Ops in two forms: a `torch.library.triton_op` for tracing, and the same body as a plain autograd function for eager.

The dispatcher, the schema checks and the functionalisation hooks of a custom op cost 50 to 100 us a call on the host,
which is more than many of the kernels take on the device. Where nobody looks (plain tensors, no torch.compile, no
dispatch mode, no functional transform) the body is therefore called past them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.library import triton_op

from costlab.kernels.fused.launch import direct_launch, is_direct

__all__ = ["FusedOp", "fused_op"]

_PLAIN = (Tensor, nn.Parameter)


def _unobserved(args: tuple[Any, ...]) -> bool:
    """Whether all tensors are plain and no mode or transform waits for their operations."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(a) in _PLAIN or not isinstance(a, Tensor) for a in args)


class FusedOp:
    """One op in both forms; calling it takes the eager one where that makes no difference to anybody."""

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self.body = body
        self.op = triton_op(name, mutates_args=())(body)
        self.function: type[Function] | None = None

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As of `torch.library`'s ops; both forms get this gradient. It cannot be differentiated again."""
        self.op.register_autograd(backward, setup_context=setup_context)
        body = self.body

        def forward(ctx: Any, *args: Any) -> Any:
            with direct_launch():
                output = body(*args)
            setup_context(ctx, args, output)
            return output

        def direct(ctx: Any, *grads: Any) -> Any:
            with direct_launch():
                return backward(ctx, *grads)

        recorded = once_differentiable(direct)

        def direct_backward(ctx: Any, *grads: Any) -> Any:
            return recorded(ctx, *grads) if torch.is_grad_enabled() else direct(ctx, *grads)

        members = {"forward": staticmethod(forward), "backward": staticmethod(direct_backward)}
        self.function = type(body.__name__, (Function,), members)

    def __call__(self, *args: Any) -> Any:
        """The op's output."""
        if torch.compiler.is_compiling():
            return self.op(*args)
        if is_direct():
            return self.body(*args)
        if self.function is None or not _unobserved(args):
            return self.op(*args)
        if torch.is_grad_enabled():
            return self.function.apply(*args)
        with direct_launch():
            return self.body(*args)


def fused_op(name: str) -> Callable[[Callable[..., Any]], FusedOp]:
    """Decorator for a body as `torch.library.triton_op` takes it, without mutated arguments."""
    return lambda body: FusedOp(name, body)

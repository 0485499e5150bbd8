"""The two forms of an op: the registered one for whoever traces or intercepts, the plain one for eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from costlab.kernels.fused import layer_norm, rms_norm

Draw = Callable[..., Tensor]


class Names(TorchDispatchMode):
    """Names of the operations that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_both_forms_are_the_same_function(draw: Draw) -> None:
    x, r, w, b = draw(6, 16), draw(6, 16), draw(16), draw(16)
    for op, inputs in ((rms_norm._add_rms_norm, (x, r, w)), (layer_norm._add_layer_norm, (x, r, w, b))):
        direct, registered = op(*inputs, 1e-5), op.op(*inputs, 1e-5)
        torch.testing.assert_close(direct, registered, rtol=0, atol=0)
        seeds = [torch.ones_like(t) for t in direct[:2]]
        gradients = [torch.autograd.grad(out[:2], inputs, seeds) for out in (direct, registered)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_mode_sees_the_op(draw: Draw) -> None:
    """Selective checkpointing, memory profilers and fake tensors work through dispatch modes."""
    with Names() as names:
        rms_norm.rms_norm(draw(6, 16), draw(16), 1e-5)
    assert "costlab.rms_norm.default" in names.seen


def test_a_subclass_sees_the_op(draw: Draw) -> None:
    class Wrapped(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    seen: list[str] = []
    rms_norm.rms_norm(draw(6, 16).detach().as_subclass(Wrapped), draw(16).detach(), 1e-5)
    assert any("costlab.rms_norm" in name for name in seen)


def test_without_gradients_nothing_is_recorded(draw: Draw) -> None:
    with torch.no_grad():
        assert not rms_norm.rms_norm(draw(6, 16), draw(16), 1e-5).requires_grad
    assert not rms_norm.rms_norm(draw(6, 16).detach(), draw(16).detach(), 1e-5).requires_grad


def test_a_second_derivative_is_refused_not_wrong(draw: Draw) -> None:
    x, w = draw(6, 16), draw(16)
    (first,) = torch.autograd.grad(rms_norm.rms_norm(x, w, 1e-5).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_changed_input_is_noticed(draw: Draw) -> None:
    x, w = draw(6, 16), draw(16)
    h = x * 1.0
    y = rms_norm.rms_norm(h, w, 1e-5)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

"""Backends for torch.compile that run the rules without Inductor: to look at a model, and to check numerics quickly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from costlab.kernels.fused.patterns.engine import Record, Wanted, rewrite

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def looking(wanted: Wanted, record: Record) -> Backend:
    """Runs the graph as it was captured; the sites go to the record."""

    def backend(module: fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        rewrite(module.graph, wanted, record, dry=True)
        return module.forward

    return backend


def rewriting(wanted: Wanted, record: Record) -> Backend:
    """Rewrites the graph and runs it through autograd's tracing, operator by operator."""

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        rewrite(module.graph, wanted, record)
        module.graph.lint()
        module.recompile()
        run: Callable[..., Any] = aot_eager(module, inputs)
        return run

    return backend

"""The only place that touches Inductor's hook for passes over the graph before autograd.

Tried on torch 2.11 and 2.13: `torch._inductor.config.pre_grad_custom_pass`, called with the graph. 2.11 takes one
callable; later versions take several and put `uuid()` in their cache keys. A pass that is there already goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from costlab.kernels.fused.patterns.engine import Record, Wanted, rewrite

_NAME = "pre_grad_custom_pass"


class Unsupported(Exception):
    """This torch has no such hook; the message says which version it is."""


@cache
def _code_digest() -> str:
    """Digest of the rules' and kernels' source, so that a change of either misses the caches."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted((*folder.glob("*.py"), *folder.parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class PatternPass:
    """The pass: callable on a graph, with the identity that Inductor's caches ask for."""

    def __init__(self, wanted: Wanted, record: Record, identity: str, before: Any = None) -> None:
        self.wanted, self.record, self.identity, self.before = wanted, record, identity, before

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        for one in self.before if isinstance(self.before, list | tuple) else [self.before] if self.before else []:
            one(graph)
        rewrite(graph, self.wanted, self.record)

    def uuid(self) -> Any:
        """What the compiled code depends on: rules, kernels and plan. None if an earlier pass has no identity."""
        before = self.before if isinstance(self.before, list | tuple) else [self.before] if self.before else []
        if any(not hasattr(one, "uuid") for one in before):
            return None
        return (_code_digest(), self.identity, *(one.uuid() for one in before))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Only the identity is written: caches pickle their keys."""
        return (_identity, (self.uuid(),))


def _identity(value: Any) -> Any:
    return value


def supported() -> bool:
    """Whether this torch has the hook."""
    from torch._inductor import config

    return hasattr(config, _NAME)


def install(wanted: Wanted, record: Record, identity: str) -> Callable[[], None]:
    """Put the pass into Inductor's configuration; returns what takes it out again. Raises Unsupported."""
    from torch._inductor import config

    if not supported():
        raise Unsupported(f"torch {torch.__version__} has no {_NAME}: functional code keeps its own path")
    before = getattr(config, _NAME)
    mine = _as_graph_pass(PatternPass)(wanted, record, identity, before)
    setattr(config, _NAME, mine)

    def remove() -> None:
        if getattr(config, _NAME) is mine:
            setattr(config, _NAME, before)

    return remove


@cache
def _as_graph_pass(kind: type[PatternPass]) -> type[PatternPass]:
    """The class as a subclass of torch's own, which its caches look for, where there is one."""
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return kind
    return type(kind.__name__, (kind, CustomGraphPass), {"__module__": kind.__module__})

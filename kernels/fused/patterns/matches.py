"""What a rule reports: a place where a kernel would compute the same, or why it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

Emit = Callable[["Emitter"], tuple[fx.Node, ...]]


@dataclass(frozen=True)
class Match:
    """One place in a graph.

    `outputs` are the nodes whose values the kernel gives, in the order of what `emit` returns; `operands` the nodes it
    reads, the first of which decides device, dtype and sizes; `inner` what becomes superfluous and may have no other
    users; `alike` the operands that must have the first one's dtype. `columns` and `rows` are the sizes the guards look
    at, ints or symbolic.
    """

    kernel: str
    outputs: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]
    emit: Emit = field(repr=False)
    columns: Any
    rows: Any
    alike: tuple[fx.Node, ...] = ()
    strided: bool = False  # whether the kernel takes any layout without a copy

    @property
    def root(self) -> fx.Node:
        """The node that stands for the whole."""
        return self.outputs[0]


@dataclass(frozen=True)
class NearMiss:
    """A place that looks like a kernel's and is not; the reason in words."""

    kernel: str
    root: fx.Node
    reason: str


Rule = Callable[[fx.Graph], Iterator[Match | NearMiss]]


class Emitter:
    """Puts new nodes after a given one and remembers them, so that they can be taken out again."""

    def __init__(self, graph: fx.Graph, after: fx.Node) -> None:
        self.graph = graph
        self.made: list[fx.Node] = []
        self._last = after

    def function(self, target: Any, *args: Any) -> fx.Node:
        """A call of a function."""
        return self._put(lambda: self.graph.call_function(target, args))

    def method(self, name: str, *args: Any) -> fx.Node:
        """A call of a tensor's method."""
        return self._put(lambda: self.graph.call_method(name, args))

    def _put(self, make: Callable[[], fx.Node]) -> fx.Node:
        with self.graph.inserting_after(self._last):
            node = make()
        self._last = node
        self.made.append(node)
        return node

    def undo(self) -> None:
        """Take out all that was put in; nothing may use it yet."""
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()

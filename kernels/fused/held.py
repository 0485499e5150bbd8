"""What a module's objects hold, so that a forward which was only traced leaves nothing of the tracer behind.

Tracing runs the user's forward on placeholders. A forward that stores a value (a hidden state for the loss, a counter)
would leave a placeholder in the user's model, and its graph would not store anything: neither may happen.
"""

from __future__ import annotations

import copy
import dis
import functools
from collections import deque
from types import CodeType, ModuleType
from typing import Any

from torch import Tensor, nn

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_TABLES = ("_buffers", "_parameters", "_modules")


class Held:
    """The attributes of a module and of all modules inside, with what their containers and plain objects hold.

    One level deep: a list in a list is not looked into. Objects are told apart by identity, not by value.
    """

    def __init__(self, module: nn.Module) -> None:
        seen: dict[int, tuple[str, _Container]] = {}
        for path, inner in module.named_modules():
            for name, value in [("", inner), *vars(inner).items()]:
                container = _container(value)
                if container is not None:
                    seen.setdefault(id(container), (f"{path}.{name}", container))
        self._was = [(name, container, copy.copy(container)) for name, container in seen.values()]

    def restore(self) -> str | None:
        """Put everything back; the name of an attribute that was not as before, None if all were."""
        changed = [entry for entry in self._was if not _same(*entry[1:])]
        named = [_named(*entry) for entry in changed]
        for _, container, was in changed:
            container.clear()
            container.extend(was) if isinstance(container, list | deque) else container.update(was)
        return named[0] if named else None


def _container(value: Any) -> _Container | None:
    """The value itself if it can be filled, or the attributes of an object."""
    if isinstance(value, dict | list | set | deque):
        return value
    attributes = None if isinstance(value, Tensor | type | ModuleType) else getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _same(a: _Container, b: _Container) -> bool:
    both = [[*c.keys(), *c.values()] if isinstance(c, dict) else list(c) for c in (a, b)]
    return len(both[0]) == len(both[1]) and all(x is y for x, y in zip(*both, strict=True))


def _named(name: str, now: _Container, was: _Container) -> str:
    """`layers.0.hidden` for an attribute, the container's own name otherwise."""
    keys = []
    if isinstance(now, dict) and isinstance(was, dict):
        keys = [str(k) for k in {**now, **was} if k not in now or k not in was or now[k] is not was[k]]
    return ".".join(part for part in [*name.split("."), *keys[:1]] if part and part not in _TABLES)


def read_after_stored(module: nn.Module) -> str | None:
    """An attribute that the module's forward reads and a forward inside stores, None if there is none.

    A trace takes the module inside as one call and what it stored in an earlier one as a constant.
    """
    read = _names(type(module), "LOAD")
    kinds = {type(inner) for inner in module.modules() if inner is not module}
    return min((name for kind in kinds for name in read & _names(kind, "STORE")), default=None)


def _names(kind: type[nn.Module], what: str) -> frozenset[str]:
    """Names of the attributes that forwards of the class and of its bases load or store."""
    codes = [getattr(vars(c).get("forward"), "__code__", None) for c in kind.__mro__]
    return frozenset().union(*(_attributes(c, what) for c in codes if isinstance(c, CodeType)))


@functools.cache
def _attributes(code: CodeType, what: str) -> frozenset[str]:
    """Names of the attributes that the code, or a function in it, loads or stores."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in (f"{what}_ATTR", f"{what}_METHOD")}
    inner = [_attributes(c, what) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(names.union(*inner))

"""Module FQNs: strip what wrappers add, walk up, and move a path from one instance of a repeated block to another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

_SOURCE = re.compile(r"^[LG]\['[^']*'\]\.?")
_MODULES = re.compile(r"_modules\['([^']+)'\]")
_ITEM = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.__getattr__\('([^']+)'\)")
_WRAPPERS = frozenset({"__self__", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_CALL = re.compile(r"@\d+(?=\.|$)")


@lru_cache(maxsize=16384)
def normalise(name: str) -> str:
    """FQN without the attributes that torch.compile, FSDP, DDP and checkpoint wrappers add.

    A leading `module.` is DDP's; further inside it is the user's own name and stays.
    """
    parts = [p for p in name.split(".") if p and p not in _WRAPPERS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


@lru_cache(maxsize=16384)
def from_source(expression: str) -> str:
    """Path relative to the compiled frame, from a guard source such as `L['self']._modules['layers']['0'].attn`."""
    text = _SOURCE.sub("", expression)
    text = _MODULES.sub(r"\1", text)
    text = _ITEM.sub(lambda m: "." + next(g for g in m.groups() if g is not None), text)
    return normalise(_CALL.sub("", text).strip("."))


def join(root: str, relative: str) -> str:
    """`root.relative`, either of which may be empty."""
    return f"{root}.{relative}" if root and relative else root or relative


def parent(path: str) -> str | None:
    """The enclosing path; None for the model itself ("")."""
    if not path:
        return None
    return path.rpartition(".")[0]


def ancestors(path: str) -> Iterator[str]:
    """`path`, its parent, ..., ""."""
    current: str | None = path
    while current is not None:
        yield current
        current = parent(current)


def inside(path: str, root: str) -> bool:
    """Whether `path` is `root` or below it."""
    return not root or path == root or path.startswith(root + ".")


@lru_cache(maxsize=16384)
def pattern(path: str) -> str:
    """`path` with its indices replaced, the same for all instances of a repeated block."""
    return ".".join("#" if part.isdigit() else part for part in path.split(".")) if path else ""


def alike(path: str, root: str) -> str | None:
    """The ancestor of `path` (or itself) that is an instance of the same repeated block as `root`, if there is one."""
    wanted = pattern(root)
    depth = root.count(".") + 1 if root else 0
    prefix = ".".join(path.split(".")[:depth]) if depth else ""
    return prefix if pattern(prefix) == wanted and (prefix or not root) else None


def closest_root(candidates: Iterable[str], paths: Iterable[str], known: frozenset[str]) -> str:
    """The first candidate under which most of `paths` name a module in `known`.

    A frame's paths are relative to the module that it was compiled for, but a compiled function that takes the model
    as an argument has paths from the model's top: the candidates are the frame's module and the modules around it.
    """
    wanted = [p for p in set(paths) if p]
    options = list(candidates) or [""]
    if not wanted or not known:
        return options[0]
    scores = [sum(join(root, path) in known for path in wanted) for root in options]
    return options[scores.index(max(scores))]


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `layers.2` before `layers.10` and a module before what is inside it."""
    if not path:
        return ()
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split("."))

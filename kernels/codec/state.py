"""A training state as flat names: dicts, lists and objects with `state_dict()` become `model.layers.0.weight`."""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.writing import Box, Value

Leaf = Value
_SCALARS = (bool, int, float, str, type(None))
_LEAVES = (torch.Tensor, bytes, *_SCALARS)


def _plain(value: Any) -> bool:
    """Whether a value is a list or tuple of scalars alone, which is stored as one value."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(inner, _SCALARS) for inner in value)


def _walk(value: Any, name: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, _LEAVES):
        yield name, value
    elif _plain(value):
        yield name, list(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _walk(inner, f"{name}.{key}" if name else str(key))
    elif callable(getattr(value, "state_dict", None)):
        yield from _walk(value.state_dict(), name)
    else:
        raise CheckpointError(f"{name}: a {type(value).__name__} is no tensor, number, text, bytes or container")


def flatten(state: Any) -> dict[str, Leaf]:
    """Flat names to leaves. `CheckpointError` for other objects and for two values of one name."""
    found: dict[str, Leaf] = {}
    for name, leaf in _walk(state, ""):
        if name in found:
            raise CheckpointError(f"two values have the name {name!r}")
        found[name] = leaf
    return found


def restore(state: Any, get: Callable[[str, Leaf], Leaf], name: str = "") -> Any:
    """The same state with every leaf replaced by `get(name, leaf)`.

    Dicts and lists are changed in place, tuples rebuilt, objects given the result through `load_state_dict`.
    """
    if isinstance(state, _LEAVES):
        return get(name, state)
    if _plain(state):
        found = get(name, list(state))
        return type(state)(found) if isinstance(found, list) and type(state) in (list, tuple) else found
    if isinstance(state, dict):
        for key in state:
            state[key] = restore(state[key], get, f"{name}.{key}" if name else str(key))
        return state
    if isinstance(state, list):
        state[:] = [restore(inner, get, f"{name}.{i}" if name else str(i)) for i, inner in enumerate(state)]
        return state
    if isinstance(state, tuple):
        return tuple(restore(inner, get, f"{name}.{i}" if name else str(i)) for i, inner in enumerate(state))
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(restore(dict(state.state_dict()), get, name))
        return state
    raise CheckpointError(f"{name}: a {type(state).__name__} can't be restored")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of one leaf: its name in the file, the local value, and the shard's place (None: whole)."""

    name: str
    value: Leaf
    box: Box | None = None


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor (its `_spec` tells; without torch.distributed there are none)."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def shard_box(tensor: Any) -> Box:
    """The place of a DTensor's local shard; `CheckpointError` for partial placements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("a partial DTensor holds no values of its own: reduce it before saving")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(tensor.to_local().shape):
        raise CheckpointError(f"DTensor shard of {tuple(tensor.to_local().shape)} where {tuple(shape)} belongs")
    # An empty shard's offset may be past the end.
    kept = tuple(min(s, g - n) for s, n, g in zip(start, shape, tensor.shape, strict=True))
    return Box(tuple(tensor.shape), kept)


def _writes_replica(name: str, tensor: Any) -> bool:
    """Of the ranks that hold the same shard, one writes it: which one differs by name, to spread the work."""
    coordinate = tensor.device_mesh.get_coordinate()
    pairs = zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True)
    owner = zlib.crc32(name.encode())
    return all(at == owner % size for placement, at, size in pairs if placement.is_replicate())


def parts_of(state: Any, rank: int, world_size: int, per_rank: Sequence[str] = ()) -> list[Part]:
    """What this rank writes. Nothing is gathered.

    DTensors: the local shard, once among its replicas. Plain tensors and numbers are taken to be the same on
    every rank and written by one; those whose name matches a glob of `per_rank` (random-generator state,
    data-loader position) differ, and every rank writes its own as `name@rank`.
    """
    found = []
    differs = re.compile("|".join(fnmatch.translate(pattern) for pattern in per_rank) or r"(?!)").match
    for name, value in flatten(state).items():
        if is_dtensor(value):
            box = shard_box(value)
            with torch.no_grad():
                local = value.to_local()  # type: ignore[union-attr]
            if _writes_replica(name, value) and (local.numel() or not value.numel()):  # type: ignore[union-attr]
                found.append(Part(name, local, box))
        elif differs(name):
            found.append(Part(f"{name}@{rank}", value))
        elif world_size == 1 or zlib.crc32(name.encode()) % world_size == rank:
            found.append(Part(name, value))
    return found

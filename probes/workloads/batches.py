"""Batches as users make them: tensors in tuples, lists, mappings and dataclasses, or objects that move themselves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, Tensor)


def mapped(batch: Any, change: Callable[[Any], Any], ends: Callable[[Any], bool] = is_tensor) -> Any:
    """The same nesting with everything changed for which `ends` holds; all else stays as it is."""
    out: Any
    if ends(batch):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(v, change, ends) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(v, change, ends) for v in batch)
    if isinstance(batch, MutableMapping):
        out = copy.copy(batch)  # a tokenizer's encoding stays one, with its attributes
        out.update({k: mapped(v, change, ends) for k, v in batch.items()})
        return out
    if isinstance(batch, Mapping):
        return {k: mapped(v, change, ends) for k, v in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        out = copy.copy(batch)  # `replace` would call __init__, which may check or compute
        for field in dataclasses.fields(batch):
            object.__setattr__(out, field.name, mapped(getattr(batch, field.name), change, ends))
        return out
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    values: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, list | tuple):
        values = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for value in values:
        yield from tensors(value)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to the device (no copy where it already is there).

    What has a `to` of its own moves itself: packed sequences, graphs, a tokenizer's encodings.
    """

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)

    return mapped(batch, move, lambda v: callable(getattr(v, "to", None)) and not isinstance(v, type))


def count_samples(batch: Any) -> int:
    """Leading dimension of the first tensor of a nested batch that has one, 1 for scalars alone, 0 without tensors."""
    sizes = [int(t.shape[0]) if t.dim() else 1 for t in tensors(batch)]
    return next((n for n in sizes if n), 0)

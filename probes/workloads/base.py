"""The workload protocol: what a training step is made of, for built-in models and a user's own."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from costlab.probes.workloads.batches import to_device


class WorkloadError(Exception):
    """The workload could not be built; the message says what, where and what to do."""


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload's `make` may depend on.

    `device` is this rank's device; `dtype` the computation dtype (parameters are kept in fp32 and cast by the
    parallel wrapper). `batch` samples per rank and `seq` tokens per sample are 0 when the user left them open.
    """

    device: torch.device
    dtype: torch.dtype
    size: str
    batch: int
    seq: int
    seed: int
    rank: int
    world_size: int


@dataclass
class Workload:
    """A model, its data and its loss.

    `batch(step)` returns the step's data on the rank's device, different on every rank. `loss(model, batch)`
    runs the forward pass and returns a scalar. `blocks` are the FQNs to shard and compile one by one (found by
    `find_blocks` when empty). `flops_per_batch` counts forward and backward of one rank's batch without
    recomputation; None means "count it". `dynamic` is handed to torch.compile where the user leaves it open: False
    where blocks of one class differ in shape and each should be specialised. `calls` say how often a batch calls the
    model ("") and those blocks that it does not call once; they are found with the FLOPs.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    name: str = "custom"
    title: str = ""
    unit: str = "samples"
    units_per_batch: int = 0
    blocks: list[str] = field(default_factory=list)
    flops_per_batch: float | None = None
    flops_formula: str = ""
    dynamic: bool | None = None
    source: str = ""
    calls: dict[str, int] = field(default_factory=dict)


def seed_all(seed: int) -> None:
    """Seed the generators that a model or its data may draw from: torch's, on all devices, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % 2**32)


def find_blocks(model: nn.Module) -> list[str]:
    """FQNs of the repeated blocks: the children of the containers that hold most parameters.

    A container is a ModuleList, ModuleDict or Sequential with at least two children; without one, the model's direct
    children are the blocks. Plain layers, such as a Linear, are none: compiled one by one nothing is left to fuse. A
    model of nothing else has no blocks.
    """
    candidates: list[tuple[int, str, nn.Module]] = []
    for name, module in model.named_modules():
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(children) > 1:
            candidates.append((sum(p.numel() for p in module.parameters()), name, module))
    total = sum(p.numel() for p in model.parameters()) or 1
    chosen: list[str] = []
    covered: list[str] = []
    for numel, name, module in sorted(candidates, key=lambda c: (-c[0], len(c[1]))):
        inside = any(name == c or name.startswith(f"{c}.") or c.startswith(f"{name}.") for c in covered if c or name)
        if inside or numel < 0.05 * total or not _is_repetition(module):
            continue
        covered.append(name)
        chosen += [f"{name}.{child}" if name else child for child, m in module.named_children() if _is_composite(m)]
    return sorted(chosen or _composite_children(model), key=_natural)


def _composite_children(module: nn.Module, prefix: str = "") -> list[str]:
    """FQNs of the direct children made of others; in place of a list, which cannot be called, those that it holds."""
    found = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _composite_children(child, f"{prefix}{name}.")
        elif _is_composite(child):
            found.append(f"{prefix}{name}")
    return found


def _is_composite(module: nn.Module) -> bool:
    """Whether it has parameters and is made of other modules."""
    return any_parameters(module) and next(module.children(), None) is not None


def any_parameters(module: nn.Module) -> bool:
    """True if the module owns or contains a parameter."""
    return next(module.parameters(), None) is not None


def _is_repetition(module: nn.Module) -> bool:
    children = [m for m in module.children() if _is_composite(m)]
    if children and all(isinstance(m, nn.ModuleList | nn.Sequential) and _holds_blocks(m) for m in children):
        return False  # a list of stages: the blocks are one level further down
    types = Counter(type(m).__name__ for m in children)
    return bool(types) and types.most_common(1)[0][1] >= 2


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a child with parameters is made of others; a sequence of plain layers is a block itself."""
    return any(_is_composite(m) for m in module.children())


def _natural(name: str) -> list[tuple[int, str | int]]:
    return [(0, int(t)) if t.isdigit() else (1, t) for t in re.split(r"(\d+)", name)]


def coerce(result: object, where: str) -> Workload:
    """Accept what a user's `make` returns: a Workload, or a (model, batches, loss) triple or dict.

    `batches` may be a function of the step, an iterable (kept in memory and cycled through), or a function without
    arguments that gives such an iterable or, each time, a batch: a tensor, tuple or dict.
    """
    if isinstance(result, Workload):
        return result
    if isinstance(result, dict):
        missing = {"model", "batches", "loss"} - result.keys()
        if missing:
            raise WorkloadError(f"{where} returned a dict without {', '.join(sorted(missing))}")
        result = (result["model"], result["batches"], result["loss"])
    if not (isinstance(result, tuple) and len(result) == 3):
        kind = type(result).__name__
        raise WorkloadError(
            f"{where} returned {kind}; return (model, batches, loss), such a dict, or a costlab Workload"
        )
    model, batches, loss = result
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"{where}: the first value must be a torch.nn.Module, got {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError(f"{where}: the model has no parameter that can be trained")
    if not callable(loss):
        raise WorkloadError(
            f"{where}: the third value must be a function loss(model, batch), got {type(loss).__name__}"
        )
    return Workload(model=model, batch=_batch_source(batches, where), loss=loss)


def initialise_lazy_modules(workload: Workload, device: torch.device) -> None:
    """Give `nn.LazyLinear` and its like their shapes, by one forward pass on the device; without any, nothing is run.

    Buffers that have a value stay as they are. Raises what the model or the loss raises.
    """
    model = workload.model
    if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    model.to(device)
    kept = {b: b.clone() for b in model.buffers() if not is_lazy(b)}
    with torch.no_grad():
        workload.loss(model, to_device(workload.batch(0), device))
        for buffer, value in kept.items():
            buffer.copy_(value)


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without an argument and not with one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins need not tell
        return False
    return not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def one_number(loss: object) -> Tensor:
    """A workload's loss; WorkloadError where it is not a tensor with one element."""
    if not isinstance(loss, Tensor):
        hint = "; return its .loss" if hasattr(loss, "loss") else ""
        raise WorkloadError(f"the loss function must return a tensor with one element, got {type(loss).__name__}{hint}")
    if loss.numel() != 1:
        raise WorkloadError(f"the loss function must return a tensor with one element, got shape {list(loss.shape)}")
    return loss


def _batch_source(batches: object, where: str) -> Callable[[int], Any]:
    if callable(batches) and takes_nothing(batches):
        source, batches = batches, batches()
        if isinstance(batches, Tensor | tuple | dict):
            return lambda _step: source()
    elif callable(batches):
        return batches
    if isinstance(batches, Iterable):
        kept: list[Any] = []
        for item in batches:
            kept.append(item)
            if len(kept) >= 64:
                break
        if not kept:
            raise WorkloadError(f"{where}: the batches are empty")
        return lambda step: kept[step % len(kept)]
    raise WorkloadError(f"{where}: the second value must be a function of the step or an iterable of batches")


def batch_beside(workload: Workload, step: int = 0) -> Any:
    """The batch of that step on the device of the model's first parameter: for a call of the loss outside a step."""
    device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
    return to_device(workload.batch(step), device)

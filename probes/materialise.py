"""Models on the meta device: sharded first and filled afterwards, so that no rank ever holds the whole model.

The order is FSDP2's own: `fully_shard`, storage on the device, then initial values. Values come from the model's
`init_weights()`, where it has one that can be called without arguments, else from each module's `reset_parameters()`.
What a step costs does not depend on them, its loss does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from costlab.probes.failures import one_line
from costlab.probes.workloads.base import seed_all

SPREAD = 0.02  # standard deviation of matrices that no module initialises, as GPT-2's


def unfilled(model: nn.Module) -> bool:
    """Whether some parameter or buffer has no storage yet."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


class Filled(NamedTuple):
    """How a model was filled, in a sentence, and what a reader of its losses should know."""

    how: str
    doubts: list[str]


def on_device(model: nn.Module, device: torch.device, seed: int) -> Filled | None:
    """Move the whole model to the device, filled if it was on the meta device; says how, None for one that was not."""
    if unfilled(model):
        return fill(model, device, seed)
    model.to(device)
    return None


def fill(model: nn.Module, device: torch.device, seed: int) -> Filled:
    """Give every tensor storage on the device and a value, in place; says how. Sharded parameters stay sharded."""
    empty = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}
    buffers = [name for name, _ in model.named_buffers() if name in empty]
    ties = _ties(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    _tie(model, ties)
    seed_all(seed)
    with torch.no_grad():
        _plain_values(model, empty)
        filled = _own_values(model, empty)
    if buffers and not callable(getattr(model, "init_weights", None)):
        some = ", ".join(buffers[:3]) + (" …" if len(buffers) > 3 else "")
        filled.doubts.append(
            f"{len(buffers)} buffers are zero ({some}): an init_weights() of the model would fill them"
        )
    return filled


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, since new storage would part them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, parameter)


def _plain_values(model: nn.Module, empty: set[str]) -> None:
    """Values that no step turns into infinities, for all that no module initialises itself."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in empty:
            continue
        if not tensor.is_floating_point() or not isinstance(tensor, nn.Parameter) or name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, SPREAD)


def _own_values(model: nn.Module, empty: set[str]) -> Filled:
    said = "the model came on the meta device and was filled"
    doubts = []
    own = getattr(model, "init_weights", None)
    if callable(own):
        try:
            own()
            return Filled(f"{said} by its init_weights()", [])
        except Exception as error:  # it may want arguments, or tensors that are not sharded
            doubts.append(f"its init_weights() failed ({one_line(f'{type(error).__name__}: {error}', 120)})")
    return Filled(f"{said} by its modules' reset_parameters()", [*doubts, *_reset(model, empty)])


def _reset(model: nn.Module, empty: set[str]) -> list[str]:
    """Let every module that had an empty tensor of its own initialise itself; names those that cannot."""
    failed = []
    for path, module in model.named_modules():
        mine: list[Tensor] = [t for n, t in module.named_parameters(path, recurse=False) if n in empty]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if mine and callable(reset):
            try:
                reset()
            except Exception as error:  # an initialiser that sharded tensors do not have
                failed.append(f"{path or type(module).__name__} ({type(error).__name__})")
    return [f"reset_parameters() failed in {', '.join(failed[:3])}: plain values there"] if failed else []

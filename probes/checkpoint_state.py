"""A training state as a tree of tensors: how large, copied, blanked, filled, and compared bit by bit.

Trees are what `torch.distributed.checkpoint.state_dict.get_state_dict` returns: dicts and lists of tensors, DTensors
and plain values. Only this rank's shard of a DTensor is ever touched. Reading a tree never changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Path = tuple[str | int, ...]
Tree = dict[str, Any]
PATTERN = 0x5A  # what blank tensors hold, so that a value left unread shows as different


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tree:
    """The live state by FQN; tensors are the training's own, not copies."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def put_in(model: nn.Module, optimizer: torch.optim.Optimizer, state: Tree) -> None:
    """Make a state of `training_state` the training's own.

    A parameter that takes no part in the loss has no optimizer state to put back, which torch 2.13 refuses if strict.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    trained = [p for group in optimizer.param_groups for p in group["params"]]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(strict=all(p in optimizer.state for p in trained)),
    )


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of every value that is no dict, list or tuple, in a fixed order."""
    if isinstance(tree, dict):
        for key in tree:
            yield from leaves(tree[key], (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with every tensor replaced."""
    import torch

    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, torch.Tensor) else tree


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, any other tensor itself; shares memory."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def is_shard(value: Any) -> bool:
    """Whether it is a DTensor of which ranks hold different parts."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor) and any(p.is_shard() for p in value.placements)


def local_bytes(tree: Tree) -> int:
    """Bytes of all tensors this rank holds."""
    import torch

    return sum(_bytes(local(v)) for _, v in leaves(tree) if isinstance(v, torch.Tensor))


def stored_bytes(tree: Tree, world: int) -> float:
    """This rank's part of a checkpoint's size: shards count whole, what all ranks hold alike is stored once."""
    import torch

    tensors = [v for _, v in leaves(tree) if isinstance(v, torch.Tensor)]
    return sum(_bytes(local(t)) / (1 if is_shard(t) else world) for t in tensors)


def dotted(path: Path) -> str:
    """A path as it is written in messages."""
    return ".".join(map(str, path))


def digest(value: Any) -> str:
    """A fingerprint of a value this rank holds: of a tensor's dtype, shape and bits, else of its text."""
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value)
    shard = local(value)
    raw = bits(shard).cpu().numpy().tobytes()
    return f"{shard.dtype} {tuple(shard.shape)} {hashlib.sha256(raw).hexdigest()}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as one-dimensional integers of the same width."""
    import torch

    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    return tensor.contiguous().reshape(-1).view(width)


def identical(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits (so NaN equals the same NaN, and -0.0 differs from 0.0); devices may differ."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bits(a), bits(b.to(a.device)))


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tree's values at one moment: local tensors by path, and plain values as they are."""

    values: dict[Path, Any]

    def differences(self, tree: Any) -> list[Path]:
        """Paths in `tree` whose value is not exactly that of the snapshot; paths missing on either side included."""
        other = dict(leaves(tree))
        wrong = [p for p in other if p not in self.values or not _same(self.values[p], other[p])]
        return wrong + [p for p in self.values if p not in other]

    def part(self, units: list[Path]) -> Snapshot:
        """The values below the given paths."""
        prefixes = set(units)
        lengths = {len(u) for u in units}
        return Snapshot({p: v for p, v in self.values.items() if any(p[:n] in prefixes for n in lengths)})


def snapshot(tree: Tree, device: torch.device | None = None) -> Snapshot:
    """Copy every local tensor, to `device` where given; the copies are complete on return for the current stream."""
    import torch

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shard = local(value)
        return shard.clone() if device is None or shard.device == device else shard.to(device, copy=True)

    return Snapshot({path: copy(value) for path, value in leaves(tree)})


def _same(saved: Any, restored: Any) -> bool:
    import torch

    if isinstance(saved, torch.Tensor) != isinstance(restored, torch.Tensor):
        return False
    if isinstance(saved, torch.Tensor):
        return identical(saved, local(restored))
    return type(saved) is type(restored) and (saved == restored or repr(saved) == repr(restored))  # repr: NaN


def blank(tree: Any) -> Any:
    """A tree of fresh tensors of the same kind and sharding on the same devices, holding a recognisable pattern."""

    def fresh(tensor: Tensor) -> Tensor:
        import torch

        with torch.no_grad():
            made = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
            shard = local(made)
            if shard.numel():
                bits(shard).view(torch.uint8).fill_(PATTERN)
        return made

    return mapped(tree, fresh)


def renewed(target: Tree, source: Tree) -> Tree:
    """`source`'s structure and plain values with the tensors of `target`, into which its tensors are copied."""
    import torch

    tensors = dict(leaves(target))

    def copy(tree: Any, path: Path) -> Any:
        if isinstance(tree, dict):
            return {key: copy(value, (*path, key)) for key, value in tree.items()}
        if isinstance(tree, list):
            return [copy(value, (*path, index)) for index, value in enumerate(tree)]
        if isinstance(tree, torch.Tensor):
            local(tensors[path]).copy_(local(tree))
            return tensors[path]
        return tree

    with torch.no_grad():
        result: Tree = copy(source, ())
    return result


def units(tree: Tree) -> list[Path]:
    """Paths of the parts a tree may be loaded in: model tensors, each parameter's optimizer state, the rest."""
    found: list[Path] = []
    for key, value in tree.items():
        inner = value.items() if isinstance(value, dict) else ()
        for name, part in inner:
            if key == "optim" and name == "state" and isinstance(part, dict):
                found += [(key, name, parameter) for parameter in part]
            else:
                found.append((key, name))
    return found


def subtree(tree: Tree, paths: list[Path]) -> Tree:
    """The tree restricted to `paths`; shares its values."""
    result: Tree = {}
    for path in paths:
        source: Any = tree
        place: Any = result
        for key in path[:-1]:
            source = source[key]
            place = place.setdefault(key, {})
        place[path[-1]] = source[path[-1]]
    return result


def in_parts(tree: Tree, count: int) -> list[list[Path]]:
    """The tree's units in `count` groups of about equal global size; the same split on every rank."""
    import torch

    sizes = {
        u: sum(v.numel() * v.element_size() for _, v in leaves(subtree(tree, [u])) if isinstance(v, torch.Tensor))
        for u in units(tree)
    }
    limit = sum(sizes.values()) / max(count, 1)
    groups: list[list[Path]] = [[]]
    filled = 0.0
    for unit, size in sizes.items():
        if groups[-1] and filled + size > limit and len(groups) < count:
            groups.append([])
            filled = 0.0
        groups[-1].append(unit)
        filled += size
    return groups

"""What must hold for a match to be rewritten: device, dtype, layout, sizes, aliasing. Else the graph stays as it is.

The path is chosen per shape: "specialised" where all sizes are known numbers, "dynamic" where the number of rows is
symbolic but within the limits, "eager" (the unfused operations) where the kernel does not serve the shape. Looking at a
symbolic size makes torch.compile guard on the answer: another shape that answers differently is compiled again, and
chooses anew.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from costlab.kernels.fused.launch import FLOATS, MAX_COLUMNS, usable
from costlab.kernels.fused.patterns.matches import Match
from costlab.kernels.fused.patterns.ops import dtype_of, storage, value

Path = Literal["specialised", "dynamic", "eager"]


@dataclass(frozen=True)
class Limits:
    """Sizes and dtypes a rewrite is wanted for; the defaults are what the kernels take.

    `reference` lets the operators' eager references stand in where Triton kernels cannot run, which costs time and
    saves none: for tests of the rewriting itself.
    """

    rows_min: int = 1
    rows_max: int | None = None
    columns_max: int = MAX_COLUMNS
    dtypes: tuple[torch.dtype, ...] = FLOATS
    reference: bool = False


@dataclass(frozen=True)
class Choice:
    """Which path a shape takes, and why where it is not a kernel's."""

    path: Path
    reason: str = ""


def choose(match: Match, limits: Limits, written: Container[int]) -> Choice:
    """The path of a match; `written` is the memory that the graph writes to in place."""
    reason = (
        _device(match, limits)
        or _dtype(match, limits)
        or _layout(match)
        or _aliasing(match, written)
        or _sizes(match, limits)
    )
    if reason:
        return Choice("eager", reason)
    return Choice("specialised" if isinstance(match.rows, int) else "dynamic")


def _device(match: Match, limits: Limits) -> str:
    tensors = [t for n in match.operands if (t := value(n)) is not None]
    if len(tensors) != len(match.operands):
        return "an operand is no known tensor"
    if len({t.device for t in tensors}) > 1:
        return "its operands are on different devices"
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) and not _plain_fake(t) for t in tensors):
        return "an operand is a tensor subclass"
    kind = tensors[0].device.type
    if limits.reference or (kind == "cuda" and _triton()):
        return ""
    return f"Triton kernels are not available on {kind}"


def _plain_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor


def _triton() -> bool:
    return usable(torch.empty(0, device="cuda"))


def _dtype(match: Match, limits: Limits) -> str:
    dtype = dtype_of(match.operands[0])
    if dtype not in limits.dtypes:
        return f"no kernel for {dtype}"
    if any(dtype_of(n) != dtype for n in match.alike):
        return "its operands differ in dtype"
    for node in match.inner:
        between = dtype_of(node)
        if between is not None and between.is_floating_point and torch.promote_types(between, dtype) != between:
            return f"it rounds to {between} in between"
    return ""


def _layout(match: Match) -> str:
    if match.strided:
        return ""
    first = value(match.operands[0])
    return "" if first is not None and first.dim() and _unit(first) else "its rows are strided: the kernel would copy"


def _unit(tensor: torch.Tensor) -> bool:
    return bool(tensor.shape[-1] == 1 or tensor.stride(-1) == 1)


def _aliasing(match: Match, written: Container[int]) -> str:
    touched = (*match.operands, *match.inner, *match.outputs)
    return "memory it reads or makes is written in place" if any(storage(n) in written for n in touched) else ""


def _sizes(match: Match, limits: Limits) -> str:
    if not isinstance(match.columns, int):
        return "the length of its rows is not known when compiling"
    if not 0 < match.columns <= limits.columns_max:
        return f"rows of {match.columns}, the kernel takes 1 to {limits.columns_max}"
    if bool(match.rows < limits.rows_min):
        return f"fewer than {limits.rows_min} rows"
    if limits.rows_max is not None and bool(match.rows > limits.rows_max):
        return f"more than {limits.rows_max} rows"
    return ""


def unshared(match: Match) -> str:
    """Why what becomes superfluous would have to be computed all the same, "" if it would not."""
    gone: set[fx.Node] = {*match.inner, *match.outputs}
    for node in match.inner:
        if any(user not in gone for user in node.users):
            return "a value inside it is used elsewhere"
    return ""

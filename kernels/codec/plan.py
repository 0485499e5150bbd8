"""What a save will store: every value with its codec, sizes and place in the file, before any byte is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec import crc, triton_blocks
from costlab.kernels.codec.codecs import Choice, Codec, Encoded, block_grid, effective, encode, error_bound
from costlab.kernels.codec.layout import (
    ALIGN,
    PAGE,
    Entry,
    Kind,
    align,
    data_start,
    dense_code_bytes,
    extent_length,
    part_offsets,
    place,
    scale_bytes,
)
from costlab.kernels.codec.state import Part
from costlab.kernels.codec.writing import Box, check_storable, entry_of, literal_entry, patch_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costlab.kernels.codec.snapshot import DeviceCopy

    Bytes = NDArray[np.uint8]


_NOTHING = torch.empty(0, dtype=torch.uint8)
_NO_PATCH = np.empty(0, np.uint8)


class Way(Enum):
    """How an item gets into the staging memory.

    RAW: its bytes are copied. KERNEL: a kernel codes it on the GPU, sizes known beforehand, nothing
    synchronised. READY: it was coded when the save was planned (on the CPU, and codecs without a kernel).
    """

    RAW = auto()
    KERNEL = auto()
    READY = auto()


@dataclass(slots=True)
class Item:
    """One value of the save. `packing` is what the background does before it is written: zstd, or coding of zeros."""

    entry: Entry
    source: torch.Tensor
    way: Way
    choice: Choice
    ready: Encoded | None = None
    packing: bool = False
    staged_at: int = 0
    patch: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def end(self) -> int:
        """Where its staged bytes end."""
        return self.staged_at + self.entry.length


Encode = Callable[[str, torch.Tensor, Choice], tuple[Encoded, bytes, int]]


def _kernel_serves(tensor: torch.Tensor, choice: Choice) -> bool:
    if choice.codec is Codec.LOG8:
        return triton_blocks.usable_flat(tensor)
    return choice.codec in (Codec.FP8, Codec.INT8) and triton_blocks.usable(
        tensor, block_grid(tuple(tensor.shape), choice.block)
    )


def _coded_later(name: str, tensor: torch.Tensor, choice: Choice, box: Box) -> Entry:
    """The entry of a tensor that is copied raw or coded by a kernel: all sizes follow from its shape."""
    shape = tuple(tensor.shape)
    parts = (
        dense_code_bytes(choice, tensor.numel(), tensor.element_size()), scale_bytes(choice, shape), 0,
    )  # fmt: skip
    stored = Choice(choice.codec, choice.block)
    return Entry(
        name, Kind.TENSOR, stored, tensor.dtype, shape, box.global_shape, box.start, parts=parts,
        bound=error_bound(choice), length=extent_length(parts),
    )  # fmt: skip


def item_of(
    part: Part, choose: Callable[[str, tuple[int, ...], torch.dtype], Choice], encode_now: Encode, zeros: frozenset[str]
) -> Item:
    """Plan one value; `zeros` names tensors whose codes had many zeros at the last save."""
    value = part.value
    if not isinstance(value, torch.Tensor):
        entry, data = literal_entry(part.name, value)
        return Item(entry, _padded(data), Way.RAW, Choice())
    tensor = value.detach()
    check_storable(part.name, tensor)
    shape = tuple(tensor.shape)
    box = part.box or Box(shape, (0,) * len(shape))
    choice = effective(choose(part.name, box.global_shape, tensor.dtype), tensor.dtype, tensor.numel())
    if choice.codec in (Codec.RAW, Codec.ZSTD):
        entry = _coded_later(part.name, tensor, Choice(), box)
        return Item(entry, tensor, Way.RAW, choice, packing=choice.codec is Codec.ZSTD)
    if _kernel_serves(tensor, choice):
        entry = _coded_later(part.name, tensor, choice, box)
        return Item(entry, tensor, Way.KERNEL, choice, packing=choice.sparse and part.name in zeros)
    found, base, chain = encode_now(part.name, tensor, choice)
    return Item(
        entry_of(part.name, found, box, base, chain), tensor, Way.READY, choice, ready=found, patch=patch_bytes(found)
    )


def encode_plainly(_name: str, tensor: torch.Tensor, choice: Choice) -> tuple[Encoded, bytes, int]:
    """`Encode` without deltas."""
    return encode(tensor, choice), bytes(32), 0


@dataclass(slots=True)
class Plan:
    """Items in file order: the fixed ones lie at their final place, the others are packed and appended."""

    fixed: list[Item]
    packed: list[Item]
    start: int
    fixed_end: int
    packed_end: int
    source_bytes: int
    paddings: list[tuple[int, int]]
    device_copy: DeviceCopy | None = None

    @property
    def items(self) -> list[Item]:
        """All items."""
        return [*self.fixed, *self.packed]

    @property
    def coded_later(self) -> bool:
        """Whether kernels code some of it, so that the entries are complete only after the device is done."""
        return any(item.way is Way.KERNEL for item in self.items)

    def release(self) -> None:
        """Let go of the state's tensors; their values must be copied."""
        for item in self.items:
            item.source, item.ready = _NOTHING, None


def lay_out(items: Sequence[Item]) -> Plan:
    """Give every item its place; large ones first would not help, so the order is the state's."""
    start = data_start([item.entry.name for item in items])
    fixed = [item for item in items if not item.packing]
    packed = [item for item in items if item.packing]
    cursor = start
    for item in fixed:
        if item.entry.length:
            item.staged_at = item.entry.offset = place(cursor, item.entry.length)
            item.entry.crcs = [0] * crc.chunk_count(item.entry.offset, item.entry.length)
            cursor = item.end if item.entry.kind is Kind.TENSOR else item.staged_at + _slot(item.entry.length)
    loose = 0
    for item in packed:
        item.staged_at = place(loose, item.entry.length)
        loose = item.end
    size = sum(item.source.numel() * item.source.element_size() for item in items)
    return Plan(fixed, packed, start, cursor, loose, size, _paddings(fixed, start))


def _paddings(items: Sequence[Item], start: int) -> list[tuple[int, int]]:
    """(first, last + 1) of the bytes from `start` that belong to no value: between extents and between their parts.

    A literal's slot counts as its own: it is staged with zeros behind it.
    """
    found, cursor = [], start
    for item in items:
        at, sizes = item.staged_at, item.entry.parts
        for offset, size in zip(part_offsets(sizes), sizes, strict=True):
            if size:
                if at + offset > cursor:
                    found.append((cursor, at + offset))
                cursor = at + offset + (size if item.entry.kind is Kind.TENSOR else _slot(size))
    return found


def _slot(size: int) -> int:
    """What a literal takes in the file: its length may change within 64 bytes without moving anything."""
    return align(size, ALIGN) if size < PAGE else size


def _padded(data: Bytes) -> torch.Tensor:
    """A literal's bytes and zeros to the end of its slot."""
    return torch.from_numpy(np.pad(data, (0, _slot(data.size) - data.size)))


Signature = list[tuple[object, ...]]


def signature(parts: Sequence[Part]) -> Signature:
    """What must be equal for a plan to serve again: names, addresses, shapes and dtypes; literals by their slot."""
    found: Signature = []
    for part in parts:
        value = part.value
        if isinstance(value, torch.Tensor):
            found.append((part.name, value.data_ptr(), value.dtype, value.shape, value.stride(), part.box))
        else:
            entry, data = literal_entry(part.name, value)
            found.append((part.name, entry.kind, _slot(data.size)))
    return found


def reusable(plan: Plan) -> bool:
    """Whether another save can use the plan: nothing in it was coded when it was made or changes size later."""
    return not plan.packed and all(item.way is not Way.READY for item in plan.fixed)


def renew(plan: Plan, parts: Sequence[Part]) -> None:
    """Give a reusable plan the values of the next save, whose signature is the same."""
    for item, part in zip(plan.fixed, parts, strict=True):
        value, old = part.value, item.entry
        if isinstance(value, torch.Tensor):
            item.source = value.detach()
            old.patch_count = old.patch_offset = old.patch_length = 0
            old.patch_crcs = []
            old.low = old.high = 0
        else:
            item.entry, data = literal_entry(part.name, value)
            item.source = _padded(data)
            item.entry.offset, item.entry.crcs = old.offset, list(old.crcs)
        item.patch = _NO_PATCH


class PlanCache:
    """The last plan, for the saves after it: planning a thousand tensors costs more than copying them."""

    def __init__(self) -> None:
        self._key: object = None
        self._plan: Plan | None = None

    def get(self, key: object, parts: Sequence[Part], make: Callable[[], Plan]) -> Plan:
        """The plan for these parts; `make` is called when `key` (what else it depends on) or they have changed."""
        key = (key, signature(parts))
        if self._plan is not None and key == self._key:
            renew(self._plan, parts)
            return self._plan
        plan = make()
        self._key, self._plan = (key, plan) if reusable(plan) else (None, None)
        return plan

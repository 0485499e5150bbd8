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
    Entry,
    Kind,
    data_start,
    dense_code_bytes,
    extent_length,
    place,
    scale_bytes,
)
from costlab.kernels.codec.state import Part
from costlab.kernels.codec.writing import Box, check_storable, entry_of, literal_entry, patch_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


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
        return Item(entry, torch.from_numpy(data.copy()), Way.RAW, Choice())
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

    @property
    def items(self) -> list[Item]:
        """All items."""
        return [*self.fixed, *self.packed]

    @property
    def source_bytes(self) -> int:
        """Bytes of the state before coding."""
        return sum(item.source.numel() * item.source.element_size() for item in self.items)


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
            cursor = item.end
    loose = 0
    for item in packed:
        item.staged_at = place(loose, item.entry.length)
        loose = item.end
    return Plan(fixed, packed, start, cursor, loose)

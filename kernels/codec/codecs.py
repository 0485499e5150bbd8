"""One tensor, one codec: `encode` gives an `Encoded`, `decode` gives the tensor back.

| codec | for | bits a value (16x16) | keeps |
|---|---|---|---|
| RAW | everything exact | as stored | every bit |
| ZSTD | lossless byte planes | fp32 about 27 | every bit |
| BF16 | weights | 16 | 8 mantissa bits |
| FP8 | weights, first moment | 8.125 | see `fp8` |
| INT8, INT4 | weights | 8.125, 4.125 | see `integer` |
| LOG8 | second moment | 8 | see `log8` |
| SQRT_FP8 | second moment | 8.125 | FP8 of the square root |
| DELTA4 | weights against a base | 4.125 | INT4 of the difference |

Tensors that aren't fp32, bf16 or fp16, empty tensors, and tensors a codec can't hold (a second moment with a
negative value, say) are stored RAW whatever was asked; blocks with non-finite values are stored raw beside the
codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec import fp8, integer, log8, lossless, sparse
from costlab.kernels.codec.blocks import Block, Grid, from_blocks, grid_of, to_blocks
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.sparse import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Codec(IntEnum):
    """The number is what the file records."""

    RAW = 0
    BF16 = 1
    FP8 = 2
    INT8 = 3
    INT4 = 4
    LOG8 = 5
    SQRT_FP8 = 6
    ZSTD = 7
    DELTA4 = 8


BLOCKED = frozenset({Codec.FP8, Codec.INT8, Codec.INT4, Codec.SQRT_FP8, Codec.DELTA4})
RAW_BLOCKS = frozenset({Codec.FP8, Codec.INT8, Codec.INT4})
# The pipeline learns only after LOG8 was coded that it was unfit: the whole tensor is then one raw block.
PATCHED = RAW_BLOCKS | {Codec.LOG8}
SPARSE = frozenset({Codec.FP8, Codec.INT8, Codec.SQRT_FP8, Codec.LOG8})
LOSSLESS = frozenset({Codec.RAW, Codec.ZSTD})
PER_TENSOR: Block = (0, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec and its block; `(0, 0)` is one block for the whole tensor. `sparse` allows coding of zeros."""

    codec: Codec = Codec.RAW
    block: Block = PER_TENSOR
    sparse: bool = True

    @property
    def label(self) -> str:
        """Such as `fp8 16x16`."""
        name = self.codec.name.lower().replace("_", "-")
        if self.codec not in BLOCKED:
            return name
        return f"{name} per tensor" if self.block == PER_TENSOR else f"{name} {self.block[0]}x{self.block[1]}"


@dataclass(slots=True)
class Encoded:
    """One coded tensor. `codes`, `structure` and `patch_values` are uint8; `scales` fp32; `patch_blocks` int64
    block numbers.

    `low` and `high` are log8's range. `bound` is the codec's guaranteed error, 0 for lossless (its unit: see
    the codec).
    """

    choice: Choice
    dtype: torch.dtype
    shape: tuple[int, ...]
    codes: torch.Tensor
    scales: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    structure: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    layout: Layout = Layout.DENSE
    patch_blocks: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    patch_values: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    low: int = 0
    high: int = 0
    bound: float = 0.0

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes, scales, structure, raw blocks and their numbers."""
        patch = self.patch_values.numel() + 4 * self.patch_blocks.numel() + (4 if self.patch_blocks.numel() else 0)
        return self.codes.numel() + 4 * self.scales.numel() + self.structure.numel() + patch


def block_grid(shape: tuple[int, ...], block: Block) -> Grid:
    """As `blocks.grid_of`, with `(0, 0)` meaning one block for the tensor."""
    numel = math.prod(shape)
    return Grid(1, numel, numel, 1, max(numel, 1)) if block == PER_TENSOR else grid_of(shape, block)


def effective(choice: Choice, dtype: torch.dtype, numel: int) -> Choice:
    """What a choice becomes for a tensor of this dtype and size: RAW where the codec says nothing about it."""
    plain = choice.codec is Codec.RAW or numel == 0
    unfit = choice.codec not in LOSSLESS and dtype not in fp8.FLOATS
    idle = choice.codec is Codec.BF16 and dtype is torch.bfloat16
    return Choice() if plain or unfit or idle else choice


def error_bound(choice: Choice, low: int = 0, high: int = 0) -> float:
    """The guaranteed error of a codec before rounding to the original dtype.

    FP8, INT8, INT4: of the block's largest magnitude (DELTA4: of the difference's, SQRT_FP8: of the root's);
    BF16: of the value; LOG8: of the value, or of 2**-126 where it is less.
    """
    slack = 2.0**-20
    by_codec = {
        Codec.BF16: 2.0**-8,
        Codec.FP8: 16 / 448 + slack,
        Codec.SQRT_FP8: 16 / 448 + slack,
        Codec.INT8: 0.5 / 127 + slack,
        Codec.INT4: 0.5 / 7 + slack,
        Codec.DELTA4: 0.5 / 7 + slack,
    }
    return log8.bound(low, high) if choice.codec is Codec.LOG8 else by_codec.get(choice.codec, 0.0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in C order, uint8 [nbytes]; a view where the tensor is contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _numpy(x: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = x.detach().cpu().numpy()
    return found


def _raw(x: torch.Tensor) -> Encoded:
    return Encoded(Choice(), x.dtype, tuple(x.shape), as_bytes(x))


def encode(x: torch.Tensor, choice: Choice, base: torch.Tensor | None = None) -> Encoded:
    """Encode a tensor of any shape, stride and dtype on its device; `base` (same shape) is what DELTA4 subtracts."""
    x = x.detach()
    choice = effective(choice, x.dtype, x.numel())
    if choice.codec in RAW_BLOCKS:
        return _pack_zeros(_encode_blocks(x, choice))
    match choice.codec:
        case Codec.RAW:
            return _raw(x)
        case Codec.ZSTD:
            stored, structure = lossless.compress(_numpy(as_bytes(x)), x.element_size())
            return Encoded(
                choice, x.dtype, tuple(x.shape), torch.from_numpy(stored.copy()),
                structure=torch.from_numpy(structure.copy()),
            )  # fmt: skip
        case Codec.LOG8:
            return _pack_zeros(_encode_log8(x, choice))
        case Codec.BF16:
            narrow = x.to(torch.bfloat16)
            if not bool(torch.isfinite(narrow).all()):
                return _raw(x)
            return Encoded(choice, x.dtype, tuple(x.shape), as_bytes(narrow), bound=error_bound(choice))
        case Codec.SQRT_FP8:
            return _pack_zeros(_encode_root(x, choice))
        case _:
            return _encode_delta(x, choice, base)


def _block_codes(x: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grid = block_grid(tuple(x.shape), choice.block)
    whole = (grid.height, grid.width) if choice.block == PER_TENSOR else choice.block
    view = x.reshape(1, -1) if choice.block == PER_TENSOR else x
    if choice.codec in (Codec.FP8, Codec.SQRT_FP8):
        return fp8.encode(view, whole)
    if choice.codec is Codec.INT8:
        return integer.encode8(view, whole)
    codes, scales, bad = integer.encode_torch(view, whole, integer.INT4_MAX)
    return integer.pack4(codes), scales, bad


def _encode_blocks(x: torch.Tensor, choice: Choice) -> Encoded:
    codes, scales, bad = _block_codes(x, choice)
    blocks, values = raw_blocks(x, block_grid(tuple(x.shape), choice.block), bad)
    return Encoded(
        choice, x.dtype, tuple(x.shape), codes, scales,
        patch_blocks=blocks, patch_values=values, bound=error_bound(choice),
    )  # fmt: skip


def raw_blocks(x: torch.Tensor, grid: Grid, bad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the marked blocks (int64, on the CPU) and their values as bytes, each padded to a full block."""
    numbers = bad.nonzero().view(-1)
    if not numbers.numel():
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    tiles = to_blocks(x.contiguous().view(bits).reshape(-1), grid)
    rows, cols = numbers // grid.block_cols, numbers % grid.block_cols
    return numbers.cpu(), as_bytes(tiles[rows, :, cols, :]).cpu()


def _encode_log8(x: torch.Tensor, choice: Choice) -> Encoded:
    found = log8.encode(x)
    if found is None:
        return _raw(x)
    codes, low, high = found
    bound = error_bound(choice, low, high)
    return Encoded(choice, x.dtype, tuple(x.shape), codes, low=low, high=high, bound=bound)


def _encode_root(x: torch.Tensor, choice: Choice) -> Encoded:
    root = x.float().sqrt()
    if not bool(torch.isfinite(root).all()):
        return _raw(x)
    codes, scales, _ = _block_codes(root, choice)
    return Encoded(choice, x.dtype, tuple(x.shape), codes, scales, bound=error_bound(choice))


def _encode_delta(x: torch.Tensor, choice: Choice, base: torch.Tensor | None) -> Encoded:
    if base is None or base.shape != x.shape:
        raise CheckpointError("a delta needs a base of the same shape")
    difference = x.float() - base.to(x.device)
    if not bool(torch.isfinite(difference).all()):
        return _raw(x)
    codes, scales, _ = _block_codes(difference, choice)
    return Encoded(choice, x.dtype, tuple(x.shape), codes, scales, bound=error_bound(choice))


def _pack_zeros(found: Encoded) -> Encoded:
    """Code the zeros when that is smaller; moves sparse codes to the CPU."""
    choice = found.choice
    if not choice.sparse or choice.codec not in SPARSE or not found.codes.numel():
        return found
    cols = block_grid(found.shape, choice.block).cols
    nonzero = int(torch.count_nonzero(found.codes))
    best = min((size, layout) for layout, size in sparse.sizes(found.codes.numel(), nonzero, cols).items())[1]
    if best is Layout.DENSE:
        return found
    values, structure = sparse.pack_as(best, _numpy(found.codes), cols)
    found.layout, found.codes, found.structure = best, torch.from_numpy(values), torch.from_numpy(structure)
    return found


def dense_codes(found: Encoded) -> torch.Tensor:
    """The codes as one uint8 tensor without sparse coding."""
    if found.layout is Layout.DENSE:
        return found.codes
    count, cols = math.prod(found.shape), block_grid(found.shape, found.choice.block).cols
    return torch.from_numpy(sparse.unpack(found.layout, _numpy(found.codes), _numpy(found.structure), count, cols))


def decode(found: Encoded, base: torch.Tensor | None = None, device: torch.device | None = None) -> torch.Tensor:
    """The tensor, in its original dtype and shape, on `device` (default: where the codes are).

    RAW without a device change is a view of `codes`. Raises `CheckpointError` for codes that the encoder never writes.
    """
    count, codec = math.prod(found.shape), found.choice.codec
    if codec is Codec.RAW:
        return found.codes.view(found.dtype).view(found.shape).to(device or found.codes.device)
    if codec is Codec.ZSTD:
        itemsize = found.dtype.itemsize
        flat = lossless.decompress(_numpy(found.codes), _numpy(found.structure), itemsize, count)
        return torch.from_numpy(flat).view(found.dtype).view(found.shape).to(device or found.codes.device)
    codes = dense_codes(found)
    codes = codes.to(device or codes.device)
    if codec is Codec.BF16:
        return codes.view(torch.bfloat16).to(found.dtype).view(found.shape)
    if codec is Codec.LOG8:
        values = log8.decode(codes, found.low, found.high, found.dtype)
        return _restore_blocks(values, found, block_grid(found.shape, PER_TENSOR)).view(found.shape)
    return _decode_blocks(found, codes, base)


def _decode_blocks(found: Encoded, codes: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    codec, grid = found.choice.codec, block_grid(found.shape, found.choice.block)
    scales = found.scales.to(codes.device)
    wide = torch.float32 if codec in (Codec.SQRT_FP8, Codec.DELTA4) else found.dtype
    if codec in (Codec.FP8, Codec.SQRT_FP8):
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise CheckpointError("an FP8 code is NaN, which the encoder never writes")
        flat = fp8.decode(codes, scales, grid, wide)
    elif codec is Codec.INT8:
        if bool((codes == 0x80).any()):
            raise CheckpointError("an INT8 code is -128, which the encoder never writes")
        flat = integer.decode8(codes, scales, grid, wide)
    else:
        unpacked = integer.unpack4(codes, grid.numel)
        if bool((unpacked == -8).any()):
            raise CheckpointError("an INT4 code is -8, which the encoder never writes")
        flat = integer.decode_torch(unpacked, scales, grid, wide)
    if codec is Codec.SQRT_FP8:
        flat = flat.square()
    if codec is Codec.DELTA4:
        if base is None or base.numel() != grid.numel:
            raise CheckpointError("a delta can't be decoded without its base")
        flat = base.to(codes.device).float().reshape(-1) + flat
    flat = _restore_blocks(flat.to(found.dtype), found, grid)
    return flat.view(found.shape)


def _restore_blocks(flat: torch.Tensor, found: Encoded, grid: Grid) -> torch.Tensor:
    numbers = found.patch_blocks
    if not numbers.numel():
        return flat
    bits = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    tiles = to_blocks(flat.view(bits), grid).clone()
    rows, cols = numbers // grid.block_cols, numbers % grid.block_cols
    raw = found.patch_values.view(bits).view(-1, grid.height, grid.width)
    tiles[rows.to(flat.device), :, cols.to(flat.device), :] = raw.to(flat.device)
    return from_blocks(tiles, grid).contiguous().view(found.dtype)

"""log2-8-bit: the codec of Adam's second moment, which spans tens of binades and must not be flushed to zero.

The bit pattern of a non-negative fp32, read as an integer, is 2**23 * (log2 + 127) with the logarithm
interpolated linearly inside a binade. The codec quantises that integer uniformly between the least positive
(`low`) and the greatest (`high`) pattern of the tensor: code 0 is exactly 0, code c in 1..255 is the pattern
`low + rint((c - 1) * (high - low) / 254)`. Integers and correctly rounded fp32 only, so that every device gives
the same codes; a library log2 would not.

Encode: `code = 1 + rint(fp32(bits - low) * (254 / fp32(high - low)))`, every operation rounded to nearest.
Fit for values in [0, inf); a tensor with others is kept raw. Size: 8 b a value.

Error: a pattern is off by at most half a step, (high - low) / 508, by the coder's four fp32 roundings of 2**-24 of the
range each, and by 1/2 for the decoded pattern's own rounding; `bound` is that over 2**23, at most 0.51. Patterns that
far apart are values that differ by at most `bound` of the encoded value, whichever of them is larger and also across a
power of two; a subnormal value differs by at most `bound` of the least normal one, 2**-126.
"""

from __future__ import annotations

import numpy as np
import torch

from costlab.kernels.codec import triton_blocks

INFINITY_BITS = 0x7F800000
_NEGATIVE_ZERO = -(2**31)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).float().view(torch.int32)


def value_range(x: torch.Tensor) -> tuple[int, int] | None:
    """(low, high) bit patterns of a tensor's positive values, (1, 1) where none is; None when the codec is unfit."""
    bits = _bits(x)
    if bool(((bits >= INFINITY_BITS) | ((bits < 0) & (bits != _NEGATIVE_ZERO))).any()):
        return None
    positive = bits[bits > 0]
    return (int(positive.min()), int(positive.max())) if positive.numel() else (1, 1)


def normal_range(low: int, high: int) -> tuple[int, int]:
    """The range as stored: what the kernels leave for a tensor without positive values becomes (1, 1)."""
    return (low, high) if low <= high else (1, 1)


def encode_torch(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """uint8 codes [numel] of values within the range; any device."""
    bits = _bits(x)
    inverse = torch.tensor(254.0, device=x.device) / torch.tensor(max(high, low + 1) - low, device=x.device).float()
    steps = (bits.clamp_min(low) - low).float() * inverse
    codes = steps.round().clamp_max(254).to(torch.int32) + 1
    return torch.where(bits > 0, codes, 0).to(torch.uint8)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """Codes uint8 [numel], low, high; None when a value is negative or not finite."""
    if not triton_blocks.usable_flat(x):
        found = value_range(x)
        return None if found is None else (encode_torch(x, *found), *found)
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    measured = torch.empty(3, dtype=torch.int32, device=x.device)
    triton_blocks.log8_encode_into(x.contiguous(), codes, measured)
    low, high, unfit = (int(v) for v in measured.tolist())
    return None if unfit else (codes, *normal_range(low, high))


def table(low: int, high: int) -> torch.Tensor:
    """The 256 fp32 values of a range, on the CPU."""
    steps = np.arange(255, dtype=np.float64) * (max(high, low + 1) - low) / 254
    patterns = np.minimum(low + np.rint(steps), max(high, low)).astype(np.int32)
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int32), patterns]).view(np.float32))


def decode(codes: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat values of `dtype` [numel] from codes and the stored range."""
    values = table(low, high).to(codes.device)
    if triton_blocks.usable_flat(codes):
        out = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
        triton_blocks.log8_decode_into(codes, values, out)
        return out
    return values[codes.int()].to(dtype)


def bound(low: int, high: int) -> float:
    """Largest error of a value in this range before rounding to its dtype, of the value or of 2**-126 if it is less."""
    return ((high - low) * (1 / 508 + 2**-22) + 1) / 2**23

"""FP8 E4M3 rounding, defined bit by bit.

E4M3 (the "fn" variant of OCP FP8): 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinities; 0x7F and
0xFF are NaN; largest value 448 (0x7E), smallest normal 2**-6, smallest subnormal 2**-9.

The rule of this package: round to nearest, ties to even; anything above 448 becomes 448 (saturation); a result
of zero is always code 0x00, also from negative inputs. Inputs are finite: the encoders find non-finite values
before they get here.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

E4M3_MAX = 448.0
E4M3_NAN_MASK = 0x7F


def _value(code: int) -> float:
    """The value of one non-negative E4M3 code."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return float(mantissa * 2.0**-9)
    return float((1 + mantissa / 8) * 2.0 ** (exponent - 7))


@cache
def e4m3_values() -> NDArray[np.float32]:
    """All 256 E4M3 values as fp32, indexed by code."""
    positive = [_value(code) for code in range(127)] + [float("nan")]
    return np.array(positive + [-v for v in positive], dtype=np.float32)


def e4m3_encode_reference(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The written reference: nearest representable value by search, ties to the even code.

    `x` is fp32 and finite, any shape. Exact because neighbours' midpoints are exact in fp64.
    """
    values = e4m3_values()[:127].astype(np.float64)
    midpoints = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x.astype(np.float64))
    low = np.searchsorted(midpoints, magnitude, side="left")
    tie = (low < len(midpoints)) & (midpoints[np.minimum(low, len(midpoints) - 1)] == magnitude)
    code = np.where(tie & (low % 2 == 1), low + 1, low).astype(np.uint8)
    return np.where((x < 0) & (code > 0), code | 0x80, code).astype(np.uint8)


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """fp32, finite, any shape and device -> uint8 codes of the same shape; equal to the reference for every input."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(codes == 0x80, torch.zeros_like(codes), codes)


def e4m3_decode(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> fp32 values; the NaN codes give NaN."""
    return codes.view(torch.float8_e4m3fn).float()

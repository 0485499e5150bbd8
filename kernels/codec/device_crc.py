"""CRC32C on the GPU: the chunks of what was copied there are checked where they lie.

A CRC is linear over GF(2): advancing its 32-bit state over zeros is a 32x32 bit matrix. Lane j of L takes the words
j, j + L, ... of a chunk and advances its state by L words before each; at the end each lane's state is advanced to the
end of the chunk and all are added. A chunk shorter than a multiple of L words is taken to begin with zeros, which
change nothing; its seed is the state before its first word.
"""

# Triton has no types for its decorator or for what a kernel takes.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc,assignment"

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from costlab.kernels.codec.triton_blocks import INTERPRETED

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if TYPE_CHECKING:
    from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78
LANES = 1024


def _advance_byte(states: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for _ in range(8):
        states = (states >> np.uint32(1)) ^ np.where(states & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return states


@cache
def advances() -> NDArray[np.int32]:
    """int32 [bits 32, lanes]: where lane j sends each bit of its state to reach the end, `LANES` - j words later."""
    states, found = np.uint32(1) << np.arange(32, dtype=np.uint32), []
    for _ in range(LANES):
        for _ in range(4):
            states = _advance_byte(states)
        found.append(states)
    return np.ascontiguousarray(np.stack(found[::-1], axis=1)).view(np.int32)


@cache
def _advances_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(advances()).to(device)


if triton is not None:

    @triton.jit
    def _crc_kernel(rows_ptr, wrong_ptr, advances_ptr, L: tl.constexpr):
        """rows int64 [chunks, 4]: address, words, state before, state after; wrong[chunk] = 0 where it is right."""
        row = rows_ptr + tl.program_id(0) * 4
        source = tl.load(row).to(tl.pointer_type(tl.int32))
        words = tl.load(row + 1).to(tl.int32)
        before, after = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
        columns = ()
        for bit in tl.static_range(32):
            # Lane 0 is L words before the end: the step from one of a lane's words to the next.
            columns = columns + (tl.load(advances_ptr + bit * L),)  # noqa: RUF005
        rounds = (words + L - 1) // L
        lane = tl.arange(0, L)
        state = tl.zeros([L], tl.int32)
        for number in range(rounds):
            at = number * L + lane - (rounds * L - words)
            word = tl.load(source + at, mask=at >= 0, other=0) ^ tl.where(at == 0, before, 0)
            for bit in tl.static_range(32):
                word = word ^ (((state << (31 - bit)) >> 31) & columns[bit])
            state = word
        last = tl.zeros([L], tl.int32)
        for bit in tl.static_range(32):
            last = last ^ (((state << (31 - bit)) >> 31) & tl.load(advances_ptr + bit * L + lane))
        tl.store(wrong_ptr + tl.program_id(0), tl.xor_sum(last, axis=0) ^ after)


def usable(device: torch.device) -> bool:
    """Whether this device's tensors can be checked where they are."""
    return triton is not None and (device.type == "cuda" or INTERPRETED)


def check(rows: list[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    """int32 [chunks], 0 for every chunk that is right, on the current stream.

    A row is a chunk: its address (a multiple of 4), its words of 4 bytes (at least one), the CRC32C that it continues
    and the CRC32C after it.
    """
    numbers = np.array(rows, dtype=np.int64)
    # Both CRCs as states, that is inverted, and as signed numbers.
    numbers[:, 2:] = (~numbers[:, 2:]).astype(np.int32)
    table = torch.from_numpy(numbers)
    wrong = torch.empty(len(rows), dtype=torch.int32, device=device)
    _crc_kernel[(len(rows),)](table.to(device), wrong, _advances_on(device), L=LANES, num_warps=4)
    return wrong

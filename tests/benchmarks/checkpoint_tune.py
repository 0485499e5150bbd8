"""Tiles of the 16x16 FP8 kernels: each checked and timed, the fastest used by the rest of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from checkpoint_common import GB, Bench, seconds

from costlab.kernels.codec import fp8, triton_tiles
from costlab.kernels.codec.blocks import grid_of

_ENCODE_TILES = {4: ((256, 1), (1024, 4)), 2: ((512, 2), (2048, 4))}
_DECODE_SHAPES = ((16, 1), (8, 1), (4, 1), (2, 2), (1, 4), (1, 8), (4, 4))


def _decode_tiles(itemsize: int) -> list[triton_tiles.DecodeTile]:
    """One 16-byte store a thread; one, four or eight warps."""
    found = []
    for warps in (1, 4, 8):
        columns = 128 * warps * (4 // itemsize)
        found += [triton_tiles.DecodeTile(columns, warps, rows, spans) for rows, spans in _DECODE_SHAPES]
        found += [triton_tiles.DecodeTile(columns, warps, rows, spans, True) for rows, spans in ((4, 1), (1, 4))]
    return found


def section_tune(bench: Bench) -> None:
    """Tiles of the 16x16 kernels, each checked against the generic kernel's; the rest of the run uses the fastest."""
    if bench.device.type != "cuda" or not triton_tiles.hopper(bench.device):
        return
    side = 16384
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(side, side, device="cuda").to(dtype)
        grid, kind, size = grid_of((side, side), (16, 16)), str(dtype)[6:], dtype.itemsize
        want, scales, _ = fp8.encode(x)
        values = fp8.decode(want, scales, grid, dtype)
        codes, out, count = torch.empty_like(want), torch.empty_like(values), torch.zeros(1, dtype=torch.int32).cuda()
        moved = x.nbytes + codes.nbytes + scales.nbytes

        def measure(name: str, work: Callable[[], object], got: torch.Tensor, right: torch.Tensor) -> float:
            got.zero_()
            speed = moved / seconds(bench.device, work, 7, 3)  # noqa: B023
            same = torch.equal(got, right)
            bench.add(f"tune {kind} {name}", speed / GB, "GB/s" if same else "GB/s, WRONG")  # noqa: B023
            return speed if same else 0.0

        encoders = {}
        for tile in _ENCODE_TILES[size]:
            encode = partial(triton_tiles.encode_tiles, x, grid, codes, scales, count, "e4m3", tile)
            encoders[tile] = measure(f"encode {tile[0]}x{tile[1]}", encode, codes, want)
        decoders = {}
        for shape in _decode_tiles(size):
            decode = partial(triton_tiles.decode_tiles, want, scales, grid, out, shape)
            label = f"decode {shape.columns}x{shape.warps}, {shape.rows} rows, {shape.spans} spans"
            decoders[shape] = measure(label + (", streaming" if shape.streaming else ""), decode, out, values)
        triton_tiles.ENCODE_TILE[size] = max(encoders, key=lambda t: encoders[t])
        triton_tiles.DECODE_TILE[size] = max(decoders, key=lambda t: decoders[t])
        bench.add(f"tune {kind} encode: used below", str(triton_tiles.ENCODE_TILE[size]), "")
        bench.add(f"tune {kind} decode: used below", str(triton_tiles.DECODE_TILE[size]), "")
        fill = x.nbytes / seconds(bench.device, x.zero_, 7, 3)
        bench.add(f"tune {kind} fill, bytes written", fill / GB, "GB/s")

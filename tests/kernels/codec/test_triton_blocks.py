"""Triton kernels against the torch definition: in the interpreter (its own process) and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from costlab.kernels.codec import fp8, integer, log8, triton_blocks, triton_tiles
from costlab.kernels.codec.blocks import grid_of
from costlab.kernels.codec.rounding import e4m3_encode_reference

SMALL = [((40, 50), (16, 16)), ((5, 3, 20), (16, 16)), ((16, 256), (16, 16)), ((9, 90), (1, 32)), ((100,), (1, 32)),
         ((130, 129), (128, 128)), ((), (16, 16))]  # fmt: skip


def check(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Encode and decode in both formats must be bit-equal to torch on the CPU, with a non-finite block present."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if x.numel() > 20:
        x.view(-1)[7], x.view(-1)[-1] = float("nan"), float("inf")
    grid = grid_of(shape, block)
    for fmt in ("e4m3", "int8"):
        if fmt == "e4m3":
            codes, scales, bad = fp8.encode_torch(x, block)
        else:
            codes, scales, bad = integer.encode_torch(x, block, 127)
        codes = codes.view(torch.uint8)
        got = torch.zeros(grid.numel, dtype=torch.uint8, device=device)
        got_scales = torch.zeros(grid.blocks, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        triton_blocks.encode_into(x.to(device), grid, got, got_scales, count, fmt)
        assert torch.equal(got.cpu(), codes), (shape, block, dtype, fmt)
        assert torch.equal(got_scales.cpu(), scales)
        assert int(count) == int(bad.sum())
        out = torch.zeros(grid.numel, dtype=dtype, device=device)
        triton_blocks.decode_into(got, got_scales, grid, out, fmt)
        decoded = fp8.decode_torch if fmt == "e4m3" else integer.decode_torch
        want = decoded(codes if fmt == "e4m3" else codes.view(torch.int8), scales, grid, dtype)
        assert torch.equal(out.cpu(), want), (shape, block, dtype, fmt)


def check_tiles(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """The 16x16 tiles, whole rows of them, against torch; blocks with NaN and infinities of both signs, and zeros."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[0, 0], x[5, 40], x[15, -1], x[-16:, 64:80] = float("nan"), float("inf"), float("-inf"), 0
    x[:, 16:32] = torch.tensor([-1e-9, 1e-9, -448.0, -0.0], dtype=dtype).repeat(shape[0], 4)
    grid = grid_of(shape, (16, 16))
    tile = triton_tiles.encode_tile(grid, dtype)
    assert tile is not None
    for fmt in ("e4m3", "int8"):
        want, scales, bad = fp8.encode_torch(x) if fmt == "e4m3" else integer.encode_torch(x, (16, 16), 127)
        got = torch.full((grid.numel,), 77, dtype=torch.uint8, device=device)
        got_scales = torch.full((grid.blocks,), 7.0, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        triton_tiles.encode_tiles(x.to(device), grid, got, got_scales, count, fmt, tile)
        assert torch.equal(got.cpu(), want.view(torch.uint8)), (shape, dtype, fmt)
        assert torch.equal(got_scales.cpu(), scales) and int(count) == int(bad.sum()) == 3
        if device == "cuda" and fmt == "e4m3":
            # Every code, also those the encoder never writes.
            got[:256] = torch.arange(256, dtype=torch.uint8, device=device)
            out = torch.zeros(grid.numel, dtype=dtype, device=device)
            decoding = triton_tiles.decode_tile(grid, dtype)
            assert decoding is not None
            triton_tiles.decode_tiles(got, got_scales, grid, out, decoding)
            decoded = fp8.decode_torch(got.cpu(), got_scales.cpu(), grid, dtype)
            assert torch.equal(out.cpu().nan_to_num(-3.0), decoded.nan_to_num(-3.0)), (shape, dtype)


def check_rounding(device: str) -> None:
    """Blocks whose scale is exactly 1 puts hard values through the kernel's rounding unscaled."""
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    hard = bf16[torch.isfinite(bf16) & (bf16.abs() <= 448)]
    hard = torch.nn.functional.pad(hard, (0, -hard.numel() % 127)).view(-1, 127)
    x = torch.cat([hard, torch.full((hard.shape[0], 1), 448.0)], dim=1)
    grid = grid_of(tuple(x.shape), (128, 128))
    codes = torch.zeros(grid.numel, dtype=torch.uint8, device=device)
    scales, count = torch.zeros(grid.blocks, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    triton_blocks.encode_into(x.to(device), grid, codes, scales, count, "e4m3")
    assert (codes.cpu().view(x.shape).numpy() == e4m3_encode_reference(x.numpy())).all()


def check_log8(device: str, dtype: torch.dtype) -> None:
    """Codes, range and decoded values equal torch's; unfit values are counted."""
    v = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 5 - 10).exp2().to(dtype)
    v[:9] = 0
    found = log8.value_range(v)
    assert found is not None
    codes = torch.zeros(v.numel(), dtype=torch.uint8, device=device)
    measured = torch.zeros(3, dtype=torch.int32, device=device)
    triton_blocks.log8_encode_into(v.to(device), codes, measured)
    assert measured.tolist() == [*found, 0]
    assert torch.equal(codes.cpu(), log8.encode_torch(v, *found))
    out = torch.zeros(v.numel(), dtype=dtype, device=device)
    triton_blocks.log8_decode_into(codes, log8.table(*found).to(device), out)
    assert torch.equal(out.cpu(), log8.decode(codes.cpu(), *found, dtype))
    v[3], v[4] = -1, float("nan")
    triton_blocks.log8_encode_into(v.to(device), codes, measured)
    assert int(measured[2]) == 2


def main() -> None:
    """What the interpreter process runs."""
    for shape, block in SMALL:
        for dtype in fp8.FLOATS:
            check(shape, block, dtype, "cpu")
    for dtype in fp8.FLOATS:
        check_tiles((32, 1024), dtype, "cpu")
        check_tiles((16, 1536), dtype, "cpu")
    check_rounding("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        check_log8("cpu", dtype)


def test_interpreted_kernels_equal_torch() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = f"import runpy; runpy.run_path({__file__!r})['main']()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", fp8.FLOATS)
@pytest.mark.parametrize("columns", [256, 512, 768, 1024, 1536, 2560, 4096, 11008, 12288, 2050])
def test_a_width_gets_the_best_tile_that_divides_it(columns: int, dtype: torch.dtype) -> None:
    grid = grid_of((32, columns), (16, 16))
    best, narrow = triton_tiles.ENCODE_TILE[dtype.itemsize], triton_tiles.NARROW_ENCODE_TILE[dtype.itemsize]
    divides = [tile for tile in (best, narrow) if columns % tile[0] == 0]
    assert triton_tiles.encode_tile(grid, dtype) == (divides[0] if divides else None)
    wide, thin = triton_tiles.DECODE_TILE[dtype.itemsize], triton_tiles.NARROW_DECODE_TILE[dtype.itemsize]
    whole = [tile for tile in (wide, thin) if columns % tile.whole == 0]
    assert triton_tiles.decode_tile(grid, dtype) == (whole[0] if whole else None)
    assert triton_tiles.encode_tile(grid_of((32, columns), (128, 128)), dtype) is None
    assert triton_tiles.decode_tile(grid_of((31, columns), (16, 16)), dtype) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", fp8.FLOATS)
@pytest.mark.parametrize(("shape", "block"), [*SMALL, ((1024, 4096), (16, 16)), ((1000, 1000), (128, 128))])
def test_gpu_kernels_equal_torch(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> None:
    check(shape, block, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", fp8.FLOATS)
@pytest.mark.parametrize("shape", [(16, 1024), (48, 3072), (32, 2560), (4096, 4096)])
def test_gpu_tiles_equal_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_tiles(shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_rounding_and_log8() -> None:
    check_rounding("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        check_log8("cuda", dtype)

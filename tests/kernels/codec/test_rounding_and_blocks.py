"""E4M3 rounding against the written reference, and the block grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec import fp8
from costlab.kernels.codec.blocks import FP32_MIN_NORMAL, block_scales, from_blocks, grid_of, to_blocks
from costlab.kernels.codec.rounding import e4m3_decode, e4m3_encode, e4m3_encode_reference, e4m3_values


def _every_hard_value() -> torch.Tensor:
    """All finite bf16 values, every midpoint between E4M3 neighbours, and the fp32 values on both sides of it."""
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.from_numpy(e4m3_values()[:127].astype(np.float64))
    middle = ((values[1:] + values[:-1]) / 2).float()
    near = [middle, torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(0.0))]
    hard = torch.cat([bf16[torch.isfinite(bf16)], *near, torch.tensor([463.9, 464.0, 464.1, 1e30, 2.0**-10, 2.0**-11])])
    return torch.cat([hard, -hard])


def test_torch_rounding_equals_the_reference() -> None:
    x = _every_hard_value()
    assert (e4m3_encode(x).numpy() == e4m3_encode_reference(x.numpy())).all()


def test_reference_is_nearest_even_and_saturates() -> None:
    x = np.array([0.0, -0.0, 1.0, 1.0625, 1.1875, 464.0, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10, -(2.0**-11)], np.float32)
    got = e4m3_values()[e4m3_encode_reference(x)]
    assert got.tolist() == [0.0, 0.0, 1.0, 1.0, 1.25, 448.0, 448.0, -448.0, 0.0, 2.0**-8, 0.0]
    assert not np.signbit(got[[1, 10]]).any()


def test_codes_of_all_values_are_themselves() -> None:
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F and c != 0x80], dtype=torch.uint8)
    assert torch.equal(e4m3_encode(e4m3_decode(finite)), finite)


@pytest.mark.parametrize(
    ("shape", "block", "rows", "cols"),
    [
        ((40, 50), (16, 16), 40, 50),
        ((3, 16, 50), (16, 16), 48, 50),
        ((64, 64, 3, 3), (16, 16), 2304, 16),
        ((1000,), (16, 16), 63, 16),
        ((), (16, 16), 1, 16),
        ((0, 7), (16, 16), 0, 16),
        ((1, 4096), (16, 16), 256, 16),
    ],
)
def test_grid_follows_the_rule(shape: tuple[int, ...], block: tuple[int, int], rows: int, cols: int) -> None:
    grid = grid_of(shape, block)
    assert (grid.rows, grid.cols) == (rows, cols)


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 40), max_size=4).map(tuple), block=st.sampled_from([(16, 16), (1, 32), (4, 8)]))
def test_blocks_round_trip(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    grid = grid_of(shape, block)
    flat = torch.arange(grid.numel, dtype=torch.float32)
    if grid.numel:
        assert torch.equal(from_blocks(to_blocks(flat, grid), grid), flat)


def test_scales_are_never_zero_or_subnormal() -> None:
    tiny = torch.full((1, 4, 1, 4), 1e-40)
    scales, bad = block_scales(torch.cat([tiny, torch.zeros_like(tiny)]), 448.0)
    assert (scales == FP32_MIN_NORMAL).all()
    assert not bad.any()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    dtype=st.sampled_from(fp8.FLOATS),
    block=st.sampled_from(fp8.INTERCHANGE_BLOCKS),
    exponent=st.integers(-40, 12),
    seed=st.integers(0, 99),
)
def test_fp8_stays_in_its_bound(
    shape: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int], exponent: int, seed: int
) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(dtype)
    codes, scales, bad = fp8.encode(x, block)
    grid = grid_of(shape, block)
    back = fp8.decode(codes, scales, grid, torch.float32)
    if not grid.numel:
        assert back.numel() == 0
        return
    assert not bad.any()
    amax = to_blocks(x.float().reshape(-1), grid).abs().amax(dim=(1, 3))[:, None, :, None]
    error = to_blocks((back - x.float().reshape(-1)).abs(), grid)
    assert (error <= amax * (16 / 448 + 2**-20) + 2.0**-136).all()


def test_strided_views_encode_like_their_copies() -> None:
    base = torch.randn(80, 100)
    for view in (base.t(), base[::2, 3:], base.view(2, 40, 100)[:, 5:]):
        a, b = fp8.encode(view), fp8.encode(view.clone(memory_format=torch.contiguous_format))
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_encoding_a_decoded_tensor_again_gives_the_same_codes() -> None:
    x = torch.randn(256, 256)
    codes, scales, _ = fp8.encode(x)
    back = fp8.decode(codes, scales, grid_of((256, 256), (16, 16)), torch.float32).view(256, 256)
    assert torch.equal(fp8.encode(back)[0], codes)

"""Every codec: round trips of any shape and dtype, bounds, non-finite values, sparse coding, hostile codes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costlab.kernels.codec import integer, log8, lossless, sparse
from costlab.kernels.codec.codecs import RAW_BLOCKS, Choice, Codec, Encoded, decode, encode
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.sparse import Layout

WEIGHT_CODECS = [
    Choice(Codec.FP8, (16, 16)), Choice(Codec.FP8, (128, 128)), Choice(Codec.FP8, (1, 32)), Choice(Codec.FP8),
    Choice(Codec.INT8, (16, 16)), Choice(Codec.INT4, (16, 16)), Choice(Codec.INT4, (1, 32)), Choice(Codec.BF16),
    Choice(Codec.ZSTD), Choice(),
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 36), max_size=4).map(tuple)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from(WEIGHT_CODECS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_round_trip_keeps_shape_dtype_and_bound(shape: tuple[int, ...], choice: Choice, dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = encode(x, choice)
    back = decode(found)
    assert back.shape == x.shape and back.dtype == x.dtype
    if x.numel():
        limit = found.bound * x.float().abs().max() + 2**-8 * x.float().abs().max() * (dtype is not torch.float32)
        assert (back.float() - x.float()).abs().max() <= limit


@pytest.mark.parametrize("choice", [Choice(), Choice(Codec.ZSTD)])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.randn(33, 7, dtype=torch.float64),
        torch.arange(9).view(3, 3).t(),
        torch.tensor(True),
        torch.randn(8, 8).to(torch.float8_e4m3fn),
        torch.complex(torch.randn(5), torch.randn(5)),
        torch.empty(0, 3, dtype=torch.bfloat16),
    ],
)
def test_lossless_codecs_keep_every_bit(x: torch.Tensor, choice: Choice) -> None:
    assert _same_bits(decode(encode(x, choice)).reshape(-1), x.contiguous().reshape(-1))


@pytest.mark.parametrize("choice", [c for c in WEIGHT_CODECS if c.codec in RAW_BLOCKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_blocks_come_back_bit_for_bit(choice: Choice, dtype: torch.dtype) -> None:
    x = torch.randn(70, 90).to(dtype)
    x[3, 4], x[69, 89], x[40, 20] = float("nan"), float("inf"), float("-inf")
    found = encode(x, choice)
    back = decode(found)
    assert _same_bits(back[3, :16], x[3, :16])
    assert torch.isnan(back[3, 4]) and back[69, 89] == float("inf") and back[40, 20] == float("-inf")
    assert torch.isfinite(back).sum() == torch.isfinite(x).sum()
    if choice.block == (16, 16):
        assert found.patch_blocks.tolist() == [0, 2 * 6 + 1, 4 * 6 + 5]


@pytest.mark.parametrize("choice", [Choice(Codec.BF16), Choice(Codec.LOG8), Choice(Codec.SQRT_FP8, (16, 16))])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, -1.0])
def test_codecs_without_raw_blocks_fall_back_to_raw(choice: Choice, value: float) -> None:
    x = torch.rand(40, 40)
    x[7, 7] = value
    back = decode(encode(x, choice))
    if value in (3.4e38, -1.0) and choice.codec is not Codec.BF16 and value > 0:
        assert torch.isfinite(back).all()
    elif choice.codec is Codec.BF16 and value == -1.0:
        assert back[7, 7] == -1.0
    else:
        assert _same_bits(back, x)


def test_integers_and_bools_are_never_coded_lossily() -> None:
    for x in (torch.arange(500), torch.randn(20, 20, dtype=torch.float64), torch.rand(20, 20) > 0.5):
        assert encode(x, Choice(Codec.FP8, (16, 16))).choice.codec is Codec.RAW


def test_log8_keeps_zero_and_the_smallest_value_and_its_bound() -> None:
    v = (torch.randn(200, 300) * 8 - 40).exp2()
    v[0, :5] = 0
    found = encode(v, Choice(Codec.LOG8))
    back = decode(found)
    assert (back[0, :5] == 0).all() and ((back == 0) == (v == 0)).all()
    assert _log8_error(v, back) <= found.bound
    assert back.max() == v.max() and back[back > 0].min() == v[v > 0].min()


def _log8_error(v: torch.Tensor, back: torch.Tensor) -> float:
    """Largest error in the unit of the codec's bound."""
    exact = v.double()
    return float(((back.double() - exact).abs() / exact.clamp_min(2.0**-126)).max())


_PATTERNS = st.one_of(
    st.integers(0, log8.INFINITY_BITS - 1),
    st.integers(0, 254).flatmap(lambda e: st.integers(-3, 3).map(lambda off: (e << 23) + off)),
    st.integers(0, 1 << 23),
).map(lambda bits: min(max(bits, 0), log8.INFINITY_BITS - 1))


@given(patterns=st.lists(_PATTERNS, min_size=1, max_size=200))
@example(patterns=[0x3F800000, 0x3F7FFFFF, 0x3F800001, 1, log8.INFINITY_BITS - 1])
@settings(max_examples=300, deadline=None)
def test_log8_error_never_exceeds_its_bound(patterns: list[int]) -> None:
    v = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    found = encode(v, Choice(Codec.LOG8))
    assert found.choice.codec is Codec.LOG8
    assert _log8_error(v, decode(found)) <= found.bound == log8.bound(found.low, found.high) < 0.51


@pytest.mark.parametrize(("low", "high"), [(1e-30, 1e30), (1e-38, 3e38), (1e-4, 1e3), (0.9, 1.1), (1e-45, 1e-37)])
def test_log8_bound_is_tight_for_dense_values(low: float, high: float) -> None:
    """Every pattern's neighbourhood is met, so that a bound twice too small or twice too large would show."""
    ends = torch.tensor([low, high]).view(torch.int32).tolist()
    v = torch.linspace(ends[0], ends[1], 400_001, dtype=torch.float64).round().to(torch.int32).view(torch.float32)
    found = encode(v, Choice(Codec.LOG8))
    assert 0.45 * found.bound < _log8_error(v, decode(found)) <= found.bound


@pytest.mark.parametrize("v", [torch.zeros(30), torch.full((30,), 3.0), torch.tensor(1e-45), torch.tensor([0.0, 2.0])])
def test_log8_of_degenerate_ranges_is_exact(v: torch.Tensor) -> None:
    assert torch.equal(decode(encode(v, Choice(Codec.LOG8))), v)


def test_int4_packing_is_its_own_inverse() -> None:
    for count in (0, 1, 2, 15, 16):
        codes = torch.randint(-7, 8, (count,), dtype=torch.int8)
        assert torch.equal(integer.unpack4(integer.pack4(codes), count), codes)


def test_delta_restores_against_its_base_and_needs_it() -> None:
    base, x = torch.randn(64, 48), torch.randn(64, 48)
    found = encode(x, Choice(Codec.DELTA4, (16, 16)), base)
    assert (decode(found, base) - x).abs().max() <= found.bound * (x - base).abs().max() + 1e-6
    with pytest.raises(CheckpointError, match="base"):
        decode(found)
    with pytest.raises(CheckpointError, match="base"):
        encode(x, Choice(Codec.DELTA4, (16, 16)), base[:32])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3000), st.integers(1, 300), st.floats(0, 1), st.integers(0, 5), st.sampled_from(list(Layout)),
)  # fmt: skip
def test_sparse_layouts_round_trip_in_their_stated_size(
    count: int, cols: int, density: float, seed: int, layout: Layout
) -> None:
    rng = np.random.default_rng(seed)
    codes = (rng.integers(1, 256, count) * (rng.random(count) < density)).astype(np.uint8)
    values, structure = sparse.pack_as(layout, codes, cols)
    assert (sparse.unpack(layout, values, structure, count, cols) == codes).all()
    assert values.size + structure.size == sparse.sizes(count, int(np.count_nonzero(codes)), cols)[layout]


@pytest.mark.parametrize(("zeros", "layout"), [(0.0, Layout.DENSE), (0.5, Layout.BITMAP), (0.99, Layout.CSR16)])
def test_the_smaller_coding_of_zeros_is_chosen_and_recorded(zeros: float, layout: Layout) -> None:
    x = torch.randn(256, 256) + 3
    x[torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) < zeros] = 0
    found = encode(x, Choice(Codec.FP8, (16, 16)))
    assert found.layout is layout
    assert torch.equal(decode(found), decode(encode(x, Choice(Codec.FP8, (16, 16), sparse=False))))


def _csr(starts: list[int], columns: list[int]) -> np.ndarray:
    return np.concatenate([np.array(starts, "<u4").view(np.uint8), np.array(columns, "<u2").view(np.uint8)])


@pytest.mark.parametrize(
    ("layout", "values", "structure"),
    [
        (Layout.DENSE, [1] * 7, []),
        (Layout.DENSE, [1] * 8, [1]),
        (Layout.BITMAP, [1, 2], [0b111]),
        (Layout.BITMAP, [1], [0b11, 0]),
        (Layout.BITMAP, [0], [0b1]),
        (Layout.CSR16, [1, 2], _csr([1, 1, 2], [0, 1])),
        (Layout.CSR16, [1, 2], _csr([0, 2, 1], [0, 1])),
        (Layout.CSR16, [1, 2], _csr([0, 1, 3], [0, 1])),
        (Layout.CSR16, [1, 2], _csr([0, 1, 2], [0, 4])),
        (Layout.CSR16, [1, 2], _csr([0, 2, 2], [1, 0])),
        (Layout.CSR16, [1, 2], _csr([0, 2, 2], [1, 1])),
        (Layout.CSR16, [1, 2], _csr([0, 1, 2, 2], [0, 1])),
    ],
)
def test_malformed_sparse_codes_are_refused(layout: Layout, values: list[int], structure: list[int]) -> None:
    with pytest.raises(CheckpointError):
        sparse.unpack(layout, np.array(values, np.uint8), np.array(structure, np.uint8), 8, 4)


def test_bits_past_the_end_of_a_bitmap_are_refused() -> None:
    with pytest.raises(CheckpointError, match="past the last"):
        sparse.unpack(Layout.BITMAP, np.array([1, 2], np.uint8), np.array([0b10000001], np.uint8), 5, 5)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([1, 2, 4, 8]))
def test_byte_planes_round_trip(raw: bytes, itemsize: int) -> None:
    flat = np.frombuffer(raw[: len(raw) // itemsize * itemsize], np.uint8)
    stored, structure = lossless.compress(flat, itemsize)
    assert (lossless.decompress(stored, structure, itemsize, flat.size // itemsize) == flat).all()


def test_malformed_byte_planes_are_refused() -> None:
    stored, structure = lossless.compress(np.zeros(4000, np.uint8), 4)
    cut = structure.copy()
    cut[1] -= 1
    wrong_method = structure.copy()
    wrong_method[0] = 9
    cases = [
        (stored, structure, 4, 999), (stored[:-1], structure, 4, 1000), (stored, structure[:-1], 4, 1000),
        (np.append(stored, np.uint8(0)), structure, 4, 1000), (stored, cut, 4, 1000), (stored, wrong_method, 4, 1000),
        (stored[::-1].copy(), structure, 4, 1000),
    ]  # fmt: skip
    for case in cases:
        with pytest.raises(CheckpointError):
            lossless.decompress(*case)


def test_a_zip_bomb_plane_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(50_000_000)), np.uint8)
    structure = np.frombuffer(lossless._PLANE.pack(1, bomb.size), np.uint8)
    with pytest.raises(CheckpointError, match="declares 50000000"):
        lossless.decompress(bomb, structure, 1, 1000)


def _with_code(found: Encoded, code: int) -> Encoded:
    codes = found.codes.clone()
    codes[5] = code
    return dataclasses.replace(found, codes=codes)


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        (Choice(Codec.FP8, (16, 16)), 0x7F),
        (Choice(Codec.FP8, (16, 16)), 0xFF),
        (Choice(Codec.INT8, (16, 16)), 0x80),
        (Choice(Codec.INT4, (16, 16)), 0x80),
    ],
)
def test_codes_that_the_encoder_never_writes_are_refused(choice: Choice, code: int) -> None:
    found = encode(torch.randn(32, 32), choice)
    with pytest.raises(CheckpointError, match="never writes"):
        decode(_with_code(found, code))


def test_log8_table_ends_at_its_range() -> None:
    values = log8.table(0x3F800000, 0x40000000)
    assert values[0] == 0 and values[1] == 1.0 and values[255] == 2.0
    assert (values[1:].diff() > 0).all()

"""What a lossy checkpoint may do to values, and the codecs' error table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec.codecs import Choice, Codec, decode, encode
from costlab.probes import checkpoint_error
from costlab.probes.checkpoint_error import codec_errors, within_bound

CODED = [Choice(Codec.FP8, (16, 16)), Choice(Codec.INT8, (16, 16)), Choice(Codec.BF16), Choice(Codec.LOG8)]


@pytest.mark.parametrize("choice", CODED, ids=lambda c: c.label)
@pytest.mark.parametrize("shape", [(48, 40), (7,), (1, 3, 17)])
@given(seed=st.integers(0, 1000), spread=st.floats(0, 6))
@settings(max_examples=15, deadline=None)
def test_every_coded_value_is_within_its_bound(
    choice: Choice, shape: tuple[int, ...], seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    values = values.square() if choice.codec is Codec.LOG8 else values
    coded = encode(values, choice)
    back = decode(coded)
    assert within_bound(values, back, coded.choice, coded.bound)
    largest = int(values.abs().argmax())
    beyond = back.clone()
    beyond.view(-1)[largest] = values.view(-1)[largest] * (1 + 4 * coded.bound + 1e-5)
    assert not within_bound(values, beyond, coded.choice, coded.bound)


@pytest.mark.parametrize("rows", [256, 257, 300, 383, 384, 511, 640])
@pytest.mark.parametrize("choice", CODED[:2], ids=lambda c: c.label)
def test_large_tensors_are_judged_in_pieces_by_the_same_blocks(
    choice: Choice, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_error, "PIECE_VALUES", 1)
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, 20, generator=generator) * torch.exp(4 * torch.randn(rows, 20, generator=generator))
    coded = encode(values, choice)
    back = decode(coded)
    assert within_bound(values, back, coded.choice, coded.bound)
    pieces = list(checkpoint_error._pieces(values, choice))
    assert torch.equal(torch.cat(pieces), values) and (len(pieces) > 1) is (rows > 256)
    assert all(len(p) >= 16 for p in pieces)
    back[rows - 1, 19] += 10 * values.abs().max()
    assert not within_bound(values, back, coded.choice, coded.bound)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.ZSTD])
def test_a_lossless_codec_allows_no_rounding(codec: Codec) -> None:
    values = torch.linspace(1, 2, 256).view(16, 16)
    assert within_bound(values, values.clone(), Choice(codec), 0.0)
    assert not within_bound(values, torch.nextafter(values, torch.tensor(9.0)), Choice(codec), 0.0)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_second_moments_of_any_size_are_within_their_bound(dtype: torch.dtype, data: st.DataObject) -> None:
    exponents = data.draw(st.lists(st.floats(-150, 15), min_size=1, max_size=60))
    values = torch.tensor(exponents, dtype=torch.float64).exp2().to(dtype)
    coded = encode(values, Choice(Codec.LOG8))
    assert within_bound(values, decode(coded), coded.choice, coded.bound)


def test_what_is_not_finite_must_come_back_as_it_was() -> None:
    values = torch.ones(16, 16)
    values[0, 0] = float("inf")
    coded = encode(values, CODED[0])
    assert within_bound(values, decode(coded), coded.choice, coded.bound)
    assert not within_bound(values, torch.full((16, 16), 448.0), coded.choice, coded.bound)
    assert not within_bound(values, values.to(torch.bfloat16), coded.choice, coded.bound)


def test_errors_are_sampled_from_every_tensor_and_alike_from_both_moments() -> None:
    shapes = {"embedding": (512, 64), "first": (128, 64), "last": (64, 64), "small": (4, 64)}
    state: dict[str, Any] = {}
    for name, shape in shapes.items():
        state |= {f"{name}.weight": torch.ones(shape), f"{name}.exp_avg": torch.ones(shape)}
        state |= {f"{name}.exp_avg_sq": torch.ones(shape), f"{name}.step": torch.tensor(3.0)}
    found = dict(checkpoint_error.sample(state, limit=2 * 4 * 32 * 64 * 4))
    assert set(found) == set(state)
    for name, expected in {"embedding": 32 + 4 * 32, "first": 32, "last": 32, "small": 4}.items():
        assert {len(found[f"{name}.{part}"]) for part in ("exp_avg", "exp_avg_sq")} == {expected}
    tight = dict(checkpoint_error.sample(state, limit=1))
    assert {len(t) for n, t in tight.items() if n.endswith("exp_avg")} == {16, 4}


def test_a_linear_code_of_the_second_moment_is_seen_in_the_update() -> None:
    """2 % of error in v, and the first resumed update is off by far more than the gate lets through."""
    from costlab.kernels.codec.policy import PRESETS, Policy, TensorClass

    generator = torch.Generator().manual_seed(0)
    v = torch.exp(5 * torch.randn(64, 64, generator=generator)) * 1e-8
    state = {"w.exp_avg": torch.randn(64, 64, generator=generator) * v.sqrt(), "w.exp_avg_sq": v, "w.step": 500}
    good = codec_errors(state, PRESETS["fp8"], 0, "x", timing=False)
    linear = Policy("linear", {TensorClass.SECOND_MOMENT: Choice(Codec.FP8, (16, 16))})
    bad = codec_errors(state, linear, 0, "x", timing=False)
    assert good.update_error is not None and bad.update_error is not None
    assert good.update_error < 0.1 < bad.update_error
    assert [r.rel_l2 < 0.05 for r in bad.rows] == [True]
    assert bad.worst == "w"

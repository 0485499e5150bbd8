"""Tensor classes and presets, the first-update gate, and the codec table."""

from __future__ import annotations

import pytest
import torch

from costlab.kernels.codec.codecs import Choice, Codec, decode, encode
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.gate import Adam, Moments, first_update_error
from costlab.kernels.codec.policy import PRESETS, TensorClass, classify, preset
from costlab.kernels.codec.table import claim, codec_table


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind"),
    [
        ("model.layers.0.mlp.up.weight", (8, 8), torch.bfloat16, TensorClass.WEIGHT),
        ("model.layers.0.input_layernorm.weight", (8, 8), torch.float32, TensorClass.EXACT),
        ("model.head.bias", (8,), torch.float32, TensorClass.EXACT),
        ("model.moe.router.weight", (8, 8), torch.float32, TensorClass.EXACT),
        ("optim.state.head.weight.exp_avg", (8, 8), torch.float32, TensorClass.FIRST_MOMENT),
        ("optim.state.head.weight.exp_avg_sq", (8, 8), torch.float32, TensorClass.SECOND_MOMENT),
        ("optim.state.norm.weight.exp_avg_sq", (8, 8), torch.float32, TensorClass.EXACT),
        ("optim.state.head.weight.step", (), torch.float32, TensorClass.EXACT),
        ("rng.cuda", (16, 16), torch.uint8, TensorClass.EXACT),
        ("abnormality.weight", (8, 8), torch.int64, TensorClass.EXACT),
    ],
)
def test_classes(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: TensorClass) -> None:
    assert classify(name, shape, dtype) is kind


def test_presets_are_exact_by_default_and_say_when_they_are_not() -> None:
    assert not preset("exact").lossy and not preset("lossless").lossy
    assert all(PRESETS[name].lossy for name in ("fp8", "int8", "delta"))
    assert preset("fp8").choose("a.exp_avg_sq", (8, 8), torch.float32).codec is Codec.LOG8
    assert preset("fp8").choose("a.bias", (8,), torch.float32).codec is Codec.RAW
    with pytest.raises(CheckpointError, match="exact, lossless, fp8"):
        preset("fp16")


def test_overrides_win_and_make_a_policy_lossy() -> None:
    policy = preset("exact").with_overrides(("*.embed.*", Choice(Codec.INT8, (16, 16))))
    assert policy.choose("m.embed.weight", (8, 8), torch.float32).codec is Codec.INT8
    assert policy.lossy


def _trained_moments() -> tuple[torch.Tensor, torch.Tensor]:
    """Moments whose rows differ by many binades, as those of rare and frequent tokens do."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(256, 1, generator=generator) * 4
    v = (torch.randn(256, 256, generator=generator) - 20 + rows).exp2()
    return v.sqrt() * torch.randn(256, 256, generator=generator) * 0.3, v


def _error(first: Choice, second: Choice, gradient: torch.Tensor | None = None) -> float:
    m, v = _trained_moments()
    back = decode(encode(m, first)), decode(encode(v, second))
    found = first_update_error([Moments("p", m, v, *back, 1000, gradient)], Adam())
    assert found is not None
    return found.overall


def test_the_gate_passes_log8_and_catches_linear_eight_bits() -> None:
    assert _error(Choice(), Choice()) == 0.0
    assert _error(Choice(), Choice(Codec.LOG8)) < 0.015
    assert _error(Choice(Codec.FP8, (16, 16)), Choice(Codec.LOG8)) < 0.05
    assert _error(Choice(), Choice(Codec.FP8, (16, 16))) > 1
    assert _error(Choice(), Choice(Codec.INT8, (16, 16))) > 10


def test_the_gate_uses_a_real_gradient_and_calls_non_finite_infinite() -> None:
    _, v = _trained_moments()
    assert _error(Choice(), Choice(Codec.LOG8), v.sqrt()) != _error(Choice(), Choice(Codec.LOG8))
    m = torch.ones(4, 4)
    found = first_update_error([Moments("p", m, m, m * float("nan"), m, 3)])
    assert found is not None and found.worst == float("inf") and found.worst_name == "p"
    assert first_update_error([]) is None


def test_the_table_ranks_codecs_as_measured_on_real_models() -> None:
    m, v = _trained_moments()
    state = {
        "w.weight": torch.randn(256, 256) * 0.02,
        "o.w.exp_avg": m,
        "o.w.exp_avg_sq": v,
        "o.w.step": torch.tensor(9),
    }
    rows = {(r.codec, r.tensor_class): r for r in codec_table(state, timing=False)}
    weight = {codec: r for (codec, kind), r in rows.items() if kind is TensorClass.WEIGHT}
    assert weight["raw"].rel_l2 == 0 and weight["raw"].bits == 32
    assert weight["fp8 16x16"].bits == 8.125 and 0.02 < weight["fp8 16x16"].rel_l2 < 0.03
    assert weight["int8 16x16"].rel_l2 < weight["fp8 16x16"].rel_l2 / 3
    assert weight["fp8 16x16"].update_error is None
    second = {codec: r for (codec, kind), r in rows.items() if kind is TensorClass.SECOND_MOMENT}
    assert second["fp8 16x16"].rel_l2 < 0.05 and (second["fp8 16x16"].update_error or 0) > 1
    assert second["log8"].flushed == 0 and (second["log8"].update_error or 1) < 0.015
    assert second["log8"].encode_gbs is None


def test_the_table_measures_speed_when_asked() -> None:
    row = codec_table({"w.weight": torch.randn(64, 64)}, [Choice(Codec.FP8, (16, 16))])[0]
    assert row.encode_gbs and row.decode_gbs


def test_the_claim_of_3_2_bits_needs_mostly_zeros() -> None:
    needed = claim(3.2)
    assert (round(needed.bitmap_zeros, 3), round(needed.csr16_zeros, 3), round(needed.csr32_zeros, 3)) == (
        0.741, 0.873, 0.924,
    )  # fmt: skip

"""The codec table: what each codec does to given tensors, measured. Data only; the command line renders it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from costlab.kernels.codec.codecs import PER_TENSOR, Choice, Codec, Encoded, decode, encode
from costlab.kernels.codec.fp8 import FLOATS
from costlab.kernels.codec.gate import Adam, Moments, first_update_error
from costlab.kernels.codec.policy import TensorClass, classify

CHOICES: tuple[Choice, ...] = (
    Choice(),
    Choice(Codec.ZSTD),
    Choice(Codec.BF16),
    Choice(Codec.FP8, PER_TENSOR),
    Choice(Codec.FP8, (16, 16)),
    Choice(Codec.FP8, (128, 128)),
    Choice(Codec.FP8, (1, 32)),
    Choice(Codec.INT8, (16, 16)),
    Choice(Codec.INT4, (16, 16)),
    Choice(Codec.INT4, (1, 32)),
    Choice(Codec.SQRT_FP8, (16, 16)),
    Choice(Codec.LOG8),
)
CODED = (TensorClass.WEIGHT, TensorClass.FIRST_MOMENT, TensorClass.SECOND_MOMENT)
_SECOND_ONLY = frozenset({Codec.SQRT_FP8, Codec.LOG8})


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec on all tensors of one class.

    `bits` stored bits a value, everything included; `ratio` original over stored bytes; `rel_l2` and `max_abs`
    over finite values; `flushed` values that were not zero and came back as zero; `zeros` share of zero codes;
    `update_error` relative error of the first resumed Adam update with only this class coded (None for weights
    or without both moments); `encode_gbs` and `decode_gbs` original bytes over wall time of the class's largest tensor
    (None when timing is off).
    """

    codec: str
    tensor_class: TensorClass
    values: int
    bits: float
    ratio: float
    rel_l2: float
    max_abs: float
    flushed: int
    update_error: float | None
    encode_gbs: float | None
    decode_gbs: float | None


@dataclass(frozen=True, slots=True)
class SparseClaim:
    """A claimed size for FP8 16x16 with sparse zeros, and the share of zeros each coding needs to reach it."""

    bits: float
    bitmap_zeros: float
    csr16_zeros: float
    csr32_zeros: float


def claim(bits: float = 3.2, value_bits: int = 8, scale_bits: float = 32 / 256, cols: int = 1024) -> SparseClaim:
    """Share of zeros needed for `bits` a value: bitmap `1 + b d + s`, CSR `(b + w) d + 32 / cols + s`, d non-zero."""
    bitmap = (bits - 1 - scale_bits) / value_bits
    csr16, csr32 = ((bits - 32 / cols - scale_bits) / (value_bits + w) for w in (16, 32))
    return SparseClaim(bits, 1 - bitmap, 1 - csr16, 1 - csr32)


def _timed(tensor: torch.Tensor, work: Callable[[], object]) -> float:
    """Least wall seconds of three calls, device work included."""
    best = float("inf")
    for _ in range(3):
        _synchronize(tensor)
        start = time.perf_counter()
        work()
        _synchronize(tensor)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(slots=True)
class _Sums:
    values: int = 0
    original: int = 0
    stored: int = 0
    error: float = 0.0
    norm: float = 0.0
    max_abs: float = 0.0
    flushed: int = 0

    def add(self, tensor: torch.Tensor, coded: Encoded, back: torch.Tensor) -> None:
        self.values += tensor.numel()
        self.original += tensor.numel() * tensor.element_size()
        self.stored += coded.nbytes
        finite = torch.isfinite(tensor)
        exact = torch.where(finite, tensor, 0).double()
        difference = torch.where(finite, back.to(tensor.device), 0).double() - exact
        self.error += float(difference.square().sum())
        self.norm += float(exact.square().sum())
        self.max_abs = max(self.max_abs, float(difference.abs().max()))
        self.flushed += int(((exact != 0) & (back.to(tensor.device) == 0)).sum())


def _row(
    choice: Choice, kind: TensorClass, tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor],
    adam: Adam, timing: bool,
) -> CodecRow:  # fmt: skip
    sums, restored = _Sums(), {}
    encode_gbs = decode_gbs = None
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    for name, tensor in tensors.items():
        coded = encode(tensor, choice)
        restored[name] = decode(coded)
        sums.add(tensor, coded, restored[name])
        if timing and name == largest:
            encode_gbs = tensor.nbytes / _timed(tensor, partial(encode, tensor, replace(choice, sparse=False))) / 1e9
            decode_gbs = tensor.nbytes / _timed(tensor, partial(decode, coded)) / 1e9
    error = first_update_error(paired_moments(state, restored), adam)
    return CodecRow(
        codec=choice.label,
        tensor_class=kind,
        values=sums.values,
        bits=8 * sums.stored / sums.values,
        ratio=sums.original / sums.stored,
        rel_l2=(sums.error / sums.norm) ** 0.5 if sums.norm else 0.0,
        max_abs=sums.max_abs,
        flushed=sums.flushed,
        update_error=None if error is None or kind is TensorClass.WEIGHT else error.overall,
        encode_gbs=encode_gbs,
        decode_gbs=decode_gbs,
    )


def paired_moments(state: Mapping[str, torch.Tensor], restored: Mapping[str, torch.Tensor]) -> list[Moments]:
    """Parameters with both moments in `state` of which at least one is in `restored`; steps from `<parameter>.step`."""
    found = []
    for name, second in state.items():
        stem, _, last = name.rpartition(".")
        first = f"{stem}.exp_avg"
        if last != "exp_avg_sq" or first not in state or not (name in restored or first in restored):
            continue
        step = int(state[f"{stem}.step"]) if f"{stem}.step" in state else 1
        m, v = restored.get(first, state[first]), restored.get(name, second)
        found.append(Moments(stem, state[first], second, m.to(second.device), v.to(second.device), step))
    return found


def codec_table(
    state: Mapping[str, torch.Tensor],
    choices: Sequence[Choice] = CHOICES,
    adam: Adam | None = None,
    timing: bool = True,
    classes: Sequence[TensorClass] = CODED,
) -> list[CodecRow]:
    """A row for each codec and tensor class of a flat state (names as `classify` reads them); exact tensors are
    left out.

    Codecs of the second moment are tried on second moments only. Empty and non-float tensors are skipped.
    """
    rows = []
    for kind in classes:
        tensors = {
            n: t
            for n, t in state.items()
            if t.numel() and t.dtype in FLOATS and classify(n, tuple(t.shape), t.dtype) is kind
        }
        fitting = [c for c in choices if c.codec not in _SECOND_ONLY or kind is TensorClass.SECOND_MOMENT]
        rows += [_row(c, kind, tensors, state, adam or Adam(), timing) for c in fitting if tensors]
    return rows

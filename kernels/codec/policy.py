"""Which codec a tensor gets: its class, by name and shape, and a preset that maps classes to codecs.

| preset | weights | first moment | second moment | everything else |
|---|---|---|---|---|
| exact (default) | raw | raw | raw | raw |
| lossless | zstd | zstd | zstd | raw |
| fp8 | FP8 16x16 | FP8 16x16 | log8 | raw |
| int8 | INT8 16x16 | FP8 16x16 | log8 | raw |
| delta | INT4 16x16 of the change since the last save | FP8 16x16 | log8 | raw |

Everything else is: norms, biases, routers, step counts, random-generator state, learning rates, integers, and
the moments of such parameters. Presets other than exact and lossless are for rare restarts: rounding at every
save acts like a lower learning rate. For near-Gaussian weights INT8 has a quarter of FP8's error at the same
size.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from costlab.kernels.codec.blocks import Block
from costlab.kernels.codec.codecs import LOSSLESS, Choice, Codec
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.fp8 import FLOATS

BLOCK: Block = (16, 16)
_FIRST = frozenset({"exp_avg", "momentum_buffer"})
_SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
_EXACT_PARTS = ("norm", "bias", "router", "rng", "step", "lr", "scheduler")


class TensorClass(StrEnum):
    """What a tensor is to the training step."""

    WEIGHT = "weight"
    FIRST_MOMENT = "first moment"
    SECOND_MOMENT = "second moment"
    EXACT = "exact"


def classify(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorClass:
    """The class of a tensor by its dotted name, global shape and dtype; in doubt EXACT."""
    parts = name.lower().split(".")
    if dtype not in FLOATS or len(shape) < 2:
        return TensorClass.EXACT
    if any(part == exact or (exact in part and exact == "norm") for part in parts for exact in _EXACT_PARTS):
        return TensorClass.EXACT
    if parts[-1] in _SECOND:
        return TensorClass.SECOND_MOMENT
    return TensorClass.FIRST_MOMENT if parts[-1] in _FIRST else TensorClass.WEIGHT


@dataclass(frozen=True, slots=True)
class Policy:
    """Codec by tensor class. `overrides` are (glob over names, choice) pairs, the first match wins.

    `keyframe_every` is set for the delta preset: every K-th save holds the weights exactly, the ones between
    hold deltas.
    """

    name: str
    choices: dict[TensorClass, Choice] = field(default_factory=dict)
    overrides: tuple[tuple[str, Choice], ...] = ()
    keyframe_every: int | None = None

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Choice:
        """The codec of a tensor; RAW where the policy names none."""
        for pattern, choice in self.overrides:
            if fnmatch.fnmatchcase(name, pattern):
                return choice
        return self.choices.get(classify(name, shape, dtype), Choice())

    @property
    def lossy(self) -> bool:
        """Whether any tensor may come back changed."""
        every = [*self.choices.values(), *(choice for _, choice in self.overrides)]
        return any(choice.codec not in LOSSLESS for choice in every)

    def with_overrides(self, *pairs: tuple[str, Choice]) -> Policy:
        """The same policy with (glob, choice) pairs tried first."""
        return replace(self, overrides=(*pairs, *self.overrides))


def _moments(weight: Choice) -> dict[TensorClass, Choice]:
    return {
        TensorClass.WEIGHT: weight,
        TensorClass.FIRST_MOMENT: Choice(Codec.FP8, BLOCK),
        TensorClass.SECOND_MOMENT: Choice(Codec.LOG8),
    }


PRESETS = {
    "exact": Policy("exact"),
    "lossless": Policy("lossless", dict.fromkeys(list(TensorClass)[:3], Choice(Codec.ZSTD))),
    "fp8": Policy("fp8", _moments(Choice(Codec.FP8, BLOCK))),
    "int8": Policy("int8", _moments(Choice(Codec.INT8, BLOCK))),
    "delta": Policy("delta", _moments(Choice(Codec.DELTA4, BLOCK)), keyframe_every=10),
}


def preset(name: str) -> Policy:
    """The preset of this name; `CheckpointError` names the ones there are."""
    if name not in PRESETS:
        raise CheckpointError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]

"""Kinds of failures by their words, and that each says what to try."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from costlab.probes.failures import KINDS, classify

WIDE, NARROW = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3, dtype=torch.bfloat16)
MIXED: list[Callable[[], object]] = [
    lambda: functional.linear(WIDE, NARROW[0, 0]),
    lambda: functional.conv2d(WIDE, NARROW),
    lambda: functional.scaled_dot_product_attention(WIDE, NARROW, WIDE),
    lambda: functional.layer_norm(NARROW, (3,), torch.ones(3, dtype=torch.float64)),
    lambda: torch.dot(WIDE.flatten(), NARROW.flatten()),
    lambda: functional.batch_norm(WIDE, torch.zeros(1), torch.ones(1), NARROW.flatten()[:1], training=True),
]


@pytest.mark.parametrize("mix", MIXED)
def test_operators_that_take_one_element_type_say_so(mix: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        mix()
    assert classify("RuntimeError", str(caught.value)) == "dtype"


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "host-out-of-memory"),
        ("DistBackendError", "NCCL error: unhandled system error", "communication"),
        ("OSError", "[Errno 28] No space left on device", "disk"),
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5", "error"),
    ],
)
def test_known_words_have_a_kind_with_advice(name: str, message: str, kind: str) -> None:
    assert classify(name, message) == kind
    assert KINDS[kind]

"""Keys of torch's caches of compiled graphs."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from costlab.probes.compile_internals import read_cache_keys, salted_caches

torch_dynamo = pytest.importorskip("torch._dynamo")


def caches(salt: str) -> tuple[int, int]:
    """(hits, misses) of the FX-graph cache when one function is compiled anew under a salt."""
    from torch._dynamo.utils import counters

    torch_dynamo.reset()
    counters.clear()
    with salted_caches(salt):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    found: Any = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_a_graph_is_found_again_under_its_own_salt_only() -> None:
    """The second compile of a salt hits; another salt, and none, know nothing of it."""
    from torch._inductor.codecache import FxGraphHashDetails

    before = FxGraphHashDetails.__init__
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    assert caches(one) == (0, 1)
    assert caches(other) == (0, 1)
    assert caches(one) == (1, 0)
    assert FxGraphHashDetails.__init__ is before


def test_no_salt_changes_no_key() -> None:
    """An empty salt leaves torch's own method in place, an error inside puts it back."""
    from torch._inductor.codecache import FxGraphHashDetails

    before = FxGraphHashDetails.__init__
    with salted_caches(""):
        assert FxGraphHashDetails.__init__ is before
    with pytest.raises(ZeroDivisionError), salted_caches("salt"):
        assert FxGraphHashDetails.__init__ is not before
        raise ZeroDivisionError
    assert FxGraphHashDetails.__init__ is before


def test_keys_are_hashed_once() -> None:
    """After `read_cache_keys` torch's own function has its answer."""
    from torch._inductor.codecache import torch_key

    read_cache_keys()
    first = torch_key()
    assert first and torch_key() is first

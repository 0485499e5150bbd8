"""Graphs are compiled anew in every test: one out of torch's caches was rewritten before, and meets no pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._functorch.config
import torch._inductor.config


@pytest.fixture(autouse=True)
def no_graph_from_a_cache() -> Iterator[None]:
    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield

"""Keys of torch's caches of compiled graphs, and modules that torch would leave eager."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn

from costlab.probes.compile_internals import compile_module, passed_over, read_cache_keys, salted_caches

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


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A user's own code."""
        return self.linear(x).relu()


LIBRARY = {
    "sequence": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "linear": lambda: nn.Linear(8, 8),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_torchs_own_classes_are_compiled_too_and_share_their_graphs(name: str) -> None:
    from torch._dynamo.utils import counters

    torch_dynamo.reset()
    counters.clear()
    blocks = [LIBRARY[name]() for _ in range(12)]
    hooked: list[int] = []
    for number, block in enumerate(blocks):
        assert passed_over(block)
        block.register_forward_pre_hook(lambda *_, number=number: hooked.append(number))
        compile_module(block, backend="eager")
    x = torch.randn(2, 4, 8, requires_grad=True)
    for block in blocks:
        x = block(x)
    assert counters["stats"]["unique_graphs"] == 1
    assert hooked == list(range(12))
    assert sorted(blocks[0].state_dict()) == sorted(LIBRARY[name]().state_dict())


def test_many_structures_of_one_class_are_not_one_code_that_is_compiled_again() -> None:
    from torch._dynamo.utils import counters

    torch_dynamo.reset()
    counters.clear()
    x = torch.randn(2, 8, requires_grad=True)
    for width in range(8, 20):
        block = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
        compile_module(block, backend="eager")
        x = block(x)
    assert counters["frames"]["ok"] == counters["stats"]["unique_graphs"] == 12
    assert not counters["unimplemented"]


def test_a_users_own_module_is_compiled_as_it_is() -> None:
    block = Own()
    assert not passed_over(block)
    undo = compile_module(block, backend="eager")
    assert "forward" not in vars(block)
    assert block._compiled_call_impl is not None
    undo()
    assert block._compiled_call_impl is None


def test_what_was_compiled_can_be_made_as_it_was() -> None:
    block = LIBRARY["sequence"]()
    compile_module(block, backend="eager")()
    assert "forward" not in vars(block)
    assert block._compiled_call_impl is None
    assert passed_over(block)


def test_keys_are_asked_for_and_an_absent_one_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.runtime.cache as triton_cache
    from torch._inductor import codecache

    asked: list[str] = []
    monkeypatch.setattr(codecache, "torch_key", lambda: asked.append("torch"))
    monkeypatch.setattr(triton_cache, "triton_key", lambda: asked.append("triton"))
    read_cache_keys()
    assert asked == ["torch", "triton"]
    monkeypatch.delattr(codecache, "torch_key")
    read_cache_keys()
    assert asked == ["torch", "triton", "triton"]


def test_cache_entries_of_torchs_own_classes_are_counted() -> None:
    from costlab.probes.shapes import cache_entries

    torch_dynamo.reset()
    block = LIBRARY["sequence"]()
    compile_module(block, backend="eager")
    before = cache_entries(block)
    block(torch.randn(2, 8))
    after = cache_entries(block)
    assert before is not None and after is not None
    assert after - before == 1

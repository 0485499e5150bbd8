"""A user's forward that was only looked at leaves the user's model as it was."""

from __future__ import annotations

import copy
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from costlab.kernels.fused import matching, registry
from costlab.kernels.fused.held import Held


class Keeps(nn.Module):
    """Gated like a real feed-forward, and stores something of each call as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.kind, self.calls = kind, 0
        self.seen: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=2)
        self.shapes: set[Any] = set()
        self.state, self.cache = SimpleNamespace(last=None), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        stores = {
            "buffer": lambda: setattr(self, "steps", self.steps + 1),
            "new attribute": lambda: setattr(self, "hidden", y),
            "counter": lambda: setattr(self, "calls", self.calls + 1),
            "list": lambda: self.seen.append(y),
            "deque": lambda: self.recent.append(y),
            "set": lambda: self.shapes.add(y),
            "object": lambda: setattr(self.state, "last", y),
            "dictionary": lambda: self.cache.update(y=y),
            "inner module": lambda: setattr(self.down, "aux", y),
            "attribute gone": lambda: delattr(self, "calls") if hasattr(self, "calls") else None,
            "nothing": lambda: None,
        }
        stores[self.kind]()
        return self.down(y)


NAMES = {
    "buffer": "steps", "new attribute": "hidden", "counter": "calls", "list": "seen", "deque": "recent",
    "set": "shapes", "object": "state.last", "dictionary": "cache.y", "inner module": "down.aux",
    "attribute gone": "calls",
}  # fmt: skip


def holdings(module: nn.Module) -> list[Any]:
    """Everything that the modules and their containers hold."""
    state = vars(module)["state"]
    lists = [list(module.seen), list(module.recent), list(module.shapes), dict(module.cache), dict(vars(state))]
    return [dict(vars(m)) for m in module.modules()] + [dict(module._buffers), *lists]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_stores_is_refused_and_undone(kind: str, training: bool) -> None:
    module = Keeps(kind).train(training)
    before = holdings(module)
    with pytest.raises(matching.NotTraceable, match=f"^its forward stores {NAMES[kind]}$"):
        matching.trace(module)
    after = holdings(module)
    assert [list(x) for x in before] == [list(x) for x in after]
    pairs = zip(before, after, strict=True)
    assert all(a[k] is b[k] for a, b in pairs if isinstance(a, dict) for k in a)


def test_a_forward_that_stores_nothing_is_traced() -> None:
    for training in (True, False):
        module = Keeps("nothing").train(training)
        assert any(n.op == "call_module" for n in matching.trace(module).graph.nodes)
        assert module.training == training


def test_a_failing_trace_is_undone_too() -> None:
    class Fails(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = x
            return x if x.sum() > 0 else -x

    module = Fails("nothing")
    with pytest.raises(matching.NotTraceable, match="TraceError"):
        matching.trace(module)
    assert not hasattr(module, "hidden")


def test_a_stored_value_still_reaches_the_loss(device: torch.device) -> None:
    """Like the auxiliary loss of a router, which is read from the module after the forward."""
    model = nn.ModuleList([Keeps("new attribute"), Keeps("nothing")]).to(device)
    assert registry.apply(model) == ["gated_linear: 1"]
    model[0](torch.randn(2, 8, device=device))
    assert isinstance(model[0].hidden, Tensor)


class Router(nn.Module):
    """Stores a loss of its own, which is none before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.aux = nn.Linear(8, 8, bias=False), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        self.aux = y.square().mean()
        return y


class Routed(Keeps):
    def __init__(self) -> None:
        super().__init__("nothing")
        self.gate = Router()


class Reads(Routed):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + next(self.gate.aux for _ in range(1))


@pytest.mark.parametrize(("kind", "found"), [(Routed, True), (Reads, False)])
def test_what_an_inner_forward_stores_is_no_constant(device: torch.device, kind: type[Keeps], found: bool) -> None:
    model = kind().to(device)
    plain, findings = copy.deepcopy(model), list[str]()
    assert bool(registry.apply(model, findings=findings)) == found
    assert any("reads aux, which a module inside stores" in f for f in findings) == (not found)
    x = torch.randn(2, 8, device=device)
    torch.testing.assert_close(model(x), plain(x))


def test_a_python_module_held_is_no_container() -> None:
    """What is imported while a forward is traced stays imported."""
    module, functions = nn.Linear(2, 2), ModuleType("functions")
    module.functions = functions
    held = Held(module)
    functions.late = 1  # type: ignore[attr-defined]
    assert held.restore() is None
    assert functions.late == 1  # type: ignore[attr-defined]

"""The collector and the running torch: what it needs is there, nothing stays behind, no compile breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import codecache, debug, scheduler
from torch._inductor.codegen import cpp

from costlab.probes.fusion import extract, inductor
from costlab.probes.fusion.inductor import FusionCollector, missing_internals
from tests.fusion_truth.scheduling import device, triton_scheduling

PATCHED = (
    (scheduler.Scheduler, "fuse_nodes"),
    (scheduler.Scheduler, "can_fuse"),
    (scheduler.Scheduler, "codegen"),
    (scheduler.WhyNoFuse, "__call__"),
    (codecache.FxGraphHashDetails, "__init__"),
    (debug, "set_kernel_post_grad_provenance_tracing"),
    (cpp, "set_kernel_post_grad_provenance_tracing"),
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(torch.sin(x))) + x


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with triton_scheduling():
        yield


def run(model: nn.Module) -> None:
    torch.compile(model)(torch.randn(4, 8, device=device(), requires_grad=True)).sum().backward()


def originals() -> list[Any]:
    return [owner.__dict__[name] for owner, name in PATCHED]


def test_the_running_torch_has_what_is_needed() -> None:
    assert missing_internals() == []


def test_everything_is_unpatched_after_exit_even_by_an_exception() -> None:
    before = originals()
    with FusionCollector():
        assert all(now is not then for now, then in zip(originals(), before, strict=True))
    assert originals() == before
    with pytest.raises(ValueError), FusionCollector():
        raise ValueError
    assert originals() == before


def test_collectors_may_nest() -> None:
    before = originals()
    model = Small().to(device())
    with FusionCollector(model) as outer, FusionCollector(model) as inner:
        run(model)
    assert originals() == before
    assert len(outer.trace().graphs) == len(inner.trace().graphs) == 2


@pytest.mark.parametrize("hook", ["schedule", "fx_nodes", "compile_id", "frame_modules"])
def test_an_error_in_a_hook_never_breaks_a_compile(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an internal moved")

    monkeypatch.setattr(extract, hook, fails)
    model = Small().to(device())
    with FusionCollector(model) as collector:
        run(model)
    trace = collector.trace()
    assert trace.supported
    assert trace.graphs == []
    assert any("an internal moved" in name for name in trace.errors)


def test_an_unknown_torch_gives_an_unsupported_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "REQUIRED", (*inductor.REQUIRED, ("torch._inductor.scheduler", "Scheduler.absent")))
    before = originals()
    model = Small().to(device())
    with FusionCollector(model) as collector:
        assert originals() == before, "no patch may stay behind"
        run(model)
    trace = collector.trace()
    assert not trace.supported
    assert "not supported on torch" in trace.note and "Scheduler.absent" in trace.note
    assert trace.graphs == []


def test_a_patch_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise TypeError("frozen class")

    before = originals()
    monkeypatch.setattr(FusionCollector, "_patch_provenance", fails)
    with FusionCollector() as collector:
        assert originals() == before
    assert not collector.trace().supported
    assert "frozen class" in collector.trace().note


def test_a_warm_cache_is_missed_on_purpose() -> None:
    model = Small().to(device())
    run(model)
    for _ in range(2):
        torch._dynamo.reset()
        with FusionCollector(model) as collector:
            run(model)
        phases = [g.phase for g in collector.trace().graphs]
        assert phases == ["forward", "backward"]


def test_nothing_compiled_says_so() -> None:
    with FusionCollector() as collector:
        pass
    trace = collector.trace()
    assert trace.supported and "no graph was compiled" in trace.note


def test_layers_and_lines_are_the_users() -> None:
    model = nn.ModuleDict({"wrap": Small()}).to(device())
    with FusionCollector(model) as collector:
        run(model["wrap"])
    forward = collector.trace().graphs[0]
    assert (forward.root, forward.root_class) == ("wrap", "Small")
    assert set(forward.layers) == {"", "inner"}
    assert forward.layers["inner"].module_class == "Linear"
    assert all(k.source.startswith("test_collector.py:") for k in forward.kernels if k.ops)
    assert collector.trace().errors == {}


def test_a_subgraph_does_not_swallow_its_parent() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, lambda t: torch.sin(t) * 2, lambda t: torch.cos(t) * 3, (x,))
            return torch.tanh(y) + x

    model = Choosing().to(device())
    with FusionCollector(model) as collector, torch.no_grad():
        torch.compile(model)(torch.randn(64, device=device()))
    trace = collector.trace()
    assert trace.errors == {}
    assert len(trace.graphs) == 3
    assert sum(any("tanh" in op for k in g.kernels for op in k.ops) for g in trace.graphs) == 1


def test_hooks_cost_little() -> None:
    """Kernels that are not built take no time, so this share is far above that of a real compile."""
    shares = []
    while len(shares) < 4 and min(shares, default=1.0) >= 0.08:  # a garbage collection may fall into a hook
        torch._dynamo.reset()
        model = nn.Sequential(*(Small() for _ in range(6))).to(device())
        with FusionCollector(model) as collector:
            run(model)
        trace = collector.trace()
        assert trace.compile_seconds > 0
        shares.append(trace.hook_seconds / trace.compile_seconds)
    assert min(shares) < 0.08

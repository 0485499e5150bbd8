"""Compiles a small model under the collector and says what costlab says about it."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from costlab.probes.fusion.fqn import inside
from costlab.probes.fusion.inductor import FusionCollector
from costlab.probes.fusion.model import AntiPattern, FusionTrace
from costlab.probes.fusion.spans import join
from costlab.probes.records import MissRow, SpanRow
from costlab.probes.trace.model import RankTrace

from .scheduling import device, triton_scheduling


@dataclass
class Seen:
    """What the collector and the join say of one model."""

    trace: FusionTrace
    spans: list[SpanRow]
    misses: list[MissRow]

    def layer(self, path: str, phase: str = "forward") -> SpanRow:
        """Span of a layer."""
        return next(s for s in self.spans if s.kind == "layer" and s.layer == path and s.phase == phase)

    def step(self) -> SpanRow:
        """Span of the step."""
        return next(s for s in self.spans if s.kind == "step")

    def rate(self, path: str = "blocks.0") -> float:
        """Fusion rate of a layer over all phases."""
        rows = [s for s in self.spans if s.kind == "layer" and s.layer == path]
        moved = sum((s.bytes_read or 0) + (s.bytes_written or 0) for s in rows)
        return 1 - sum(s.addressable_lost or 0 for s in rows) / moved

    def causes(self, path: str = "blocks.0", phase: str = "forward") -> Counter[str]:
        """Lost bytes by cause, of a layer and what is inside it."""
        found: Counter[str] = Counter()
        for miss in self.misses:
            if miss.phase == phase and inside(miss.layer, path):
                found[miss.cause] += miss.bytes
        return found

    def sources(self, cause: str, phase: str = "forward") -> set[str]:
        """Lines named for a cause."""
        return {
            s
            for m in self.misses
            if m.cause == cause and m.phase == phase
            for s in (m.producer_source, m.consumer_source)
        }

    def patterns(self, kind: str) -> list[AntiPattern]:
        """Anti-patterns of one kind."""
        return [a for a in self.trace.antipatterns if a.kind == kind]


def line_of(owner: Any, marker: str) -> str:
    """`file.py:line` of the line in `owner`'s source that ends with the comment `# marker`."""
    path = inspect.getsourcefile(owner)
    assert path is not None
    lines = Path(path).read_text().splitlines()
    found = [i for i, text in enumerate(lines, 1) if text.rstrip().endswith(f"# {marker}")]
    assert len(found) == 1, f"{len(found)} lines are marked {marker!r}"
    return f"{Path(path).name}:{found[0]}"


def observe(
    model: nn.Module,
    *inputs: Tensor,
    cpp: bool = False,
    run: Callable[[Any], Any] | None = None,
    compile_blocks: bool = False,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Seen:
    """Compile forward and backward of `model`, for Triton or for C++, and join the trace to no launches.

    `run` takes the compiled model instead of one forward and backward on `inputs`.
    """
    import torch._dynamo
    from torch._inductor import config

    torch._dynamo.reset()
    model = model.to(device())
    blocks = [f"blocks.{i}" for i, _ in enumerate(getattr(model, "blocks", ()))] if compile_blocks else []
    with contextlib.ExitStack() as stack:
        if not cpp:
            stack.enter_context(triton_scheduling())
        stack.enter_context(config.patch(options or {}))
        collector = stack.enter_context(FusionCollector(model))
        for name in blocks:
            model.get_submodule(name).compile()
        callable_model = model if compile_blocks else torch.compile(model, dynamic=dynamic)
        if run is not None:
            run(callable_model)
        else:
            callable_model(*(x.to(device()) for x in inputs)).float().sum().backward()
        trace = collector.trace()
    assert not trace.errors, trace.errors
    spans, misses, _ = join(trace, RankTrace(None, device()), trace_id="t", rank=0, layer_classes={}, blocks=blocks)
    return Seen(trace, spans, misses)

"""One rank of the FSDP2 truth: `python fsdp_ranks.py RANK WORLD STORE OUT`; writes the joined rows as JSON.

Two scenarios in one process, because importing torch and compiling take seconds: blocks compiled one by one, and the
whole model compiled after sharding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from costlab.probes.fusion.classes import classify
from costlab.probes.fusion.inductor import FusionCollector
from costlab.probes.fusion.spans import join
from costlab.probes.trace import kineto
from costlab.probes.trace.analyse import analyse
from costlab.probes.trace.model import RankTrace

BLOCKS, WIDTH, VOCABULARY, STEPS = 3, 32, 50, 2


class Block(nn.Module):
    """norm > product > gelu > product > residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """embedding > blocks > norm > head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def annotate(module: nn.Module, name: str) -> None:
    """Name the compiled call for the profiler, outside the graph."""
    original = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"costlab::layer::{name}"), record_function(f"costlab::frame::{name}"):
            return original(*args, **kwargs)

    module._compiled_call_impl = call


def scenario(whole: bool, rank: int, out: Path) -> dict[str, Any]:
    """Shard, compile, collect, profile and join."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    frames = [""] if whole else [f"blocks.{i}" for i in range(BLOCKS)]
    if not whole:
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if whole:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        with record_function("costlab::phase::forward"):
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        with record_function("costlab::phase::backward"):
            loss.backward()
        with record_function("costlab::phase::optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    with FusionCollector(model) as collector:
        step()
        trace = collector.trace()
    for name in frames:
        annotate(model.get_submodule(name), name)
    measured = profiled(step, out / f"trace-{rank}.json", frames)
    classes = {n: classify(n, type(x).__name__) for n, x in model.named_modules() if n}
    spans, misses, kernels = join(trace, measured, trace_id="truth", rank=rank, layer_classes=classes, blocks=frames)
    return {
        "spans": [msgspec.structs.asdict(s) for s in spans],
        "misses": [msgspec.structs.asdict(x) for x in misses],
        "kernels": [msgspec.structs.asdict(k) for k in kernels],
        "launch_ms": sum(x.dur for x in measured.launches) / STEPS / 1e3,
        "graphs": [(g.compile_id, g.phase, g.root) for g in trace.graphs],
        "errors": trace.errors,
        "patterns": [(p.kind, p.layer, p.source, p.text) for p in trace.antipatterns],
    }


def profiled(step: Any, path: Path, frames: list[str]) -> RankTrace:
    """Two profiled steps, read back."""
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for i in range(STEPS):
            with record_function(f"costlab::step::{i}"):
                step()
    profiler.export_chrome_trace(str(path))
    return analyse(kineto.read(path), device="cpu", blocks=frames)


def main(rank: int, world: int, store: str, out: Path) -> None:
    """All scenarios of one rank."""
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {name: scenario(name == "whole", rank, out) for name in ("block", "whole")}
    (out / f"rank-{rank}.json").write_bytes(msgspec.json.encode(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

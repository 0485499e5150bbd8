"""One training step of one block for `ncu` to measure: `fusion_dram_step.py llama|gpt2|resnet50 SPANS.json`.

Writes what the collector says of the block's generated kernels, in launch order, then runs one forward and backward
between cudaProfilerStart and cudaProfilerStop. Sizes are such that most tensors are several times the L2 cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costlab.probes.fusion.inductor import FusionCollector
from costlab.probes.workloads import gpt2, llama, resnet

LOOPS = ("pointwise", "reduction", "layout_copy", "foreach")


def llama_block(device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The 1b size's block; 32 x 2048 tokens of width 2048 in bf16, 268 MB a tensor."""
    config = llama.SIZES["1b"]
    with device:
        model = llama.Llama(config.__class__(**{**vars(config), "layers": 1, "vocab": 512}), 2048).bfloat16()
        cos, sin = llama.rope_table(2048, config.dim // config.heads, config.rope_base)
        hidden = torch.randn(32, 2048, config.dim, dtype=torch.bfloat16, requires_grad=True)
    return model.layers[0], (hidden, cos, sin)


def gpt2_block(device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The small size's block with dropout; 192 x 1024 tokens of width 768 in bf16, 302 MB a tensor."""
    with device:
        model = gpt2.Block(gpt2.SIZES["small"]).bfloat16()
        hidden = torch.randn(192, 1024, 768, dtype=torch.bfloat16, requires_grad=True)
    return model, (hidden,)


def resnet_block(device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The first stage's second bottleneck; 384 images, channels last, 616 MB a wide tensor, 154 MB a narrow one."""
    with device:
        model = resnet.Bottleneck(256, 64, 1).bfloat16()
        hidden = torch.randn(384, 256, 56, 56, dtype=torch.bfloat16)
    hidden = hidden.to(memory_format=torch.channels_last).requires_grad_()
    return model, (hidden,)


BLOCKS = {"llama": llama_block, "gpt2": gpt2_block, "resnet50": resnet_block}


def described(collector: FusionCollector) -> list[dict[str, Any]]:
    """Every generated kernel in schedule order, forward graphs first."""
    trace = collector.trace()
    if not trace.supported or not trace.graphs:
        raise SystemExit(f"no fusion trace: {trace.note} {trace.errors}")
    if trace.errors:
        print(f"errors of the trace: {trace.errors}", file=sys.stderr)
    graphs = sorted(trace.graphs, key=lambda g: g.phase == "backward")
    return [
        {
            "names": [kernel.name, *kernel.aliases],
            "kind": kernel.kind,
            "phase": graph.phase,
            "layer": kernel.layer,
            "ops": kernel.ops,
            "read": kernel.bytes_read,
            "written": kernel.bytes_written,
        }
        for graph in graphs
        for kernel in graph.kernels
        if kernel.kind in LOOPS and kernel.name
    ]


def main() -> None:
    """Compile, warm up, write the spans, run one step for the profiler."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    module, inputs = BLOCKS[sys.argv[1]](device)
    module.train()
    compiled = torch.compile(module, dynamic=False)

    def step() -> None:
        out = compiled(*inputs)
        out.backward(upstream)
        module.zero_grad(set_to_none=True)
        inputs[0].grad = None

    with torch.no_grad():
        upstream = torch.randn_like(inputs[0])
    with FusionCollector(module) as collector:
        step()
        spans = described(collector)
    step()
    Path(sys.argv[2]).write_text(json.dumps(spans), encoding="utf-8")
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        step()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()

"""Generated source is kept for every generated kernel, in bounded size, without paths of the machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from costlab.probes.fusion.inductor import FusionCollector
from costlab.probes.fusion.sources import Sources, clean

TRITON = "async_compile.triton('triton_poi_a', '''\nimport triton\n@triton.jit\ndef triton_poi_a(x):\n    pass\n''')"
CPP = """async_compile.cpp_pybinding(['float*'], r'''
#include "/tmp/cache_me/ab/cab.h"
void kernel() { a / b; } // x/y
''')"""


def test_the_kernel_is_taken_out_of_the_call_that_compiles_it() -> None:
    kept = Sources()
    kept.add("triton_poi_a", "inference", "0/0", TRITON)
    kept.add("cpp_a", "backward", "0/0", CPP)
    first, second = kept.kept
    assert first.text.startswith("import triton") and first.text.endswith("pass\n")
    assert (first.language, first.phase, second.language, second.phase) == ("triton", "forward", "cpp", "backward")


def test_paths_are_cut_and_the_rest_stays() -> None:
    text = clean(CPP)
    assert '#include "cab.h"' in text and "cache_me" not in text
    assert "a / b; } // x/y" in text


@given(st.lists(st.text(min_size=1, max_size=50), max_size=30), st.integers(1, 40), st.integers(0, 400))
def test_size_is_bounded_and_what_is_missing_is_said(bodies: list[str], longest: int, total: int) -> None:
    kept = Sources(longest, total)
    for i, body in enumerate(bodies):
        kept.add(f"k{i}", "forward", "0/0", body)
    assert len(kept.kept) + kept.left_out == len(bodies)
    assert sum(len(s.text) for s in kept.kept) <= total
    assert all(len(s.text) <= longest for s in kept.kept)


def test_every_generated_kernel_of_a_compile_has_its_source() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.up = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.gelu(self.up(self.norm(x)))

    torch._dynamo.reset()
    model = Block()
    with FusionCollector(model) as collector:
        torch.compile(model)(torch.randn(8, 16)).sum().backward()
        trace = collector.trace()
    names = {k.name for g in trace.graphs for k in g.kernels if k.kind in ("pointwise", "reduction")}
    sources = {s.name: s for s in trace.sources}
    assert names and names <= sources.keys()
    assert all(s.text.count("\n") > 5 and "/torchinductor" not in s.text for s in sources.values())

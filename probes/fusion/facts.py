"""What one Inductor graph looked like when its schedule was final, as plain values. Torch-free.

The adapter fills these inside the compile; everything that judges them runs afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FxNode:
    """One node of the post-grad FX graph."""

    name: str
    op: str  # call_function | placeholder | other
    target: str  # aten.mm.default
    packet: str  # mm
    namespace: str  # aten
    inputs: tuple[str, ...]
    nbytes: int  # of its value, summed over a tuple
    dtype: str = ""
    device: str = ""
    module: str = ""  # source expression of the owning module; "" at the frame's root, "?" where no metadata says
    module_class: str = ""
    stack: str = ""  # the user's stack as text
    group: str = ""  # identifies the user-level operator it was decomposed from
    view: bool = False
    mutates: bool = False
    writes: tuple[str, ...] = ()  # inputs that it changes, where they are buffers made for it
    flops: int = 0
    layer: str = ""  # FQN relative to the frame's root, resolved after the compile
    source: str = ""  # file.py:line, resolved after the compile


@dataclass(slots=True)
class SchedOp:
    """One scheduler node: a loop nest, an extern call or a template."""

    name: str
    kernel: int
    role: str  # loop | extern | template | nop | multi_output
    buffers: tuple[str, ...]
    reads: dict[str, dict[int, int]]  # buffer or graph input -> index (by hash) -> bytes loaded through it
    origins: tuple[str, ...]  # FX node names
    origin: str  # the FX node whose value it produces exactly, or ""
    reduction: bool = False


@dataclass(slots=True)
class SchedKernel:
    """One final scheduler node, which becomes one kernel or library call."""

    index: int
    kind: str  # as model.KernelSpan.kind, layout copies not yet told apart
    device: str
    ops: tuple[str, ...]
    bytes_read: int
    bytes_written: int


@dataclass(slots=True)
class Rejection:
    """Why two groups of scheduler operations were not fused, in the scheduler's own words."""

    first: frozenset[str]
    second: frozenset[str]
    template: str
    args: tuple[object, ...] = ()

    @property
    def text(self) -> str:
        """The reason with its arguments filled in."""
        if not self.args:
            return self.template
        try:
            return self.template % self.args
        except (TypeError, ValueError):
            return f"{self.template} {self.args}"


@dataclass(slots=True)
class GraphFacts:
    """One graph."""

    compile_id: str
    phase: str  # forward | backward | inference
    root: str
    root_class: str = ""
    root_chain: tuple[str, ...] = ()  # the modules around the frame, innermost first
    resumed_at: str = ""  # file.py:line where the frame continues a function after a graph break, else ""
    nodes: dict[str, FxNode] = field(default_factory=dict)
    ops: dict[str, SchedOp] = field(default_factory=dict)
    kernels: list[SchedKernel] = field(default_factory=list)
    outputs: frozenset[str] = frozenset()
    user_outputs: tuple[str, ...] = ()
    rejections: list[Rejection] = field(default_factory=list)
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # (kernel name, operations), one a launch
    nodes_before: int = 0
    nodes_after: int = 0
    hook_seconds: float = 0.0
    complete: bool = False  # the final schedule was seen

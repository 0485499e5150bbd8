"""The fusion trace of a compiled model as plain values, independent of torch. Bytes are per call of the graph."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lost:
    """Traffic beyond the ideal, with its cause."""

    layer: str  # FQN relative to the graph's frame root
    cause: str
    addressable: bool
    bytes: int
    reason: str = ""
    producer: str = ""  # operator names
    consumer: str = ""
    producer_source: str = ""  # file.py:line
    consumer_source: str = ""
    producer_kernel: str = ""
    consumer_kernel: str = ""
    culprit: str = ""  # the operator or line at fault, where it is neither end
    culprit_source: str = ""


@dataclass(slots=True)
class KernelSpan:
    """One scheduled kernel."""

    name: str  # as the profiler shows it; "" where Inductor gave none
    kind: (
        str  # pointwise reduction template extern foreach collective wait copy device_copy layout_copy user_triton nop
    )
    layer: str  # FQN relative to the graph's frame root that owns most of its bytes
    layers: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    source: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    device: str = ""
    aliases: list[str] = field(default_factory=list)  # further kernels of the same span (split reductions)
    actual: int = 0  # modelled traffic of a fusible kernel, what the fusion rate is taken over
    addressable_lost: int = 0
    structural_lost: int = 0
    main_cause: str = ""


@dataclass(slots=True)
class LayerTraffic:
    """Traffic of one layer's fusible kernels in one graph."""

    layer: str
    actual: int = 0
    lost: list[Lost] = field(default_factory=list)
    ops: int = 0
    extern: int = 0
    fallback: int = 0
    read: int = 0  # actual = read + written
    written: int = 0
    module_class: str = ""
    crossing: int = 0  # bytes of fusible results that the user's code receives from the graph


@dataclass(slots=True)
class GraphSpan:
    """One Inductor graph."""

    compile_id: str
    phase: str  # forward | backward | inference
    root: str  # FQN of the module whose frame was compiled first, "" for the model
    root_class: str
    kernels: list[KernelSpan] = field(default_factory=list)
    layers: dict[str, LayerTraffic] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    hook_seconds: float = 0.0
    superseded: bool = False  # a newer recompile of the same frame replaced it
    hard: dict[str, list[str]] = field(default_factory=dict)  # layer -> causes that make it broken whatever the rate
    resumed_at: str = ""  # file.py:line where the frame continues after a graph break, "" for a frame from its start


@dataclass(slots=True)
class GraphBreak:
    """One graph break as the tracer reported it."""

    reason: str
    frames: list[str] = field(default_factory=list)  # file.py:line of the user's stack, outermost first
    count: int = 0
    layer: str = ""  # FQN of the module whose frame was cut, where it can be told
    skipped: bool = False  # the whole frame runs eagerly; `frames` is where its function begins
    own: str = ""  # the innermost of `frames` that is the user's own code, where it is known

    @property
    def source(self) -> str:
        """The innermost line of the user's code."""
        return self.own or (self.frames[-1] if self.frames else "")


@dataclass(slots=True)
class AntiPattern:
    """Code that costs fusion, found in the user's model."""

    kind: str  # one of antipatterns.KINDS
    layer: str  # FQN from the model's top
    source: str  # file.py:line
    text: str
    mend: str
    bytes: int = 0  # modelled traffic per call of the graph that the mend removes; 0 where there is none to remove
    phase: str = ""
    ops: str = ""
    count: int = 1


@dataclass(slots=True)
class KernelSource:
    """Source that Inductor generated for a kernel."""

    name: str  # as the span's
    phase: str
    compile_id: str
    language: str  # triton | cpp
    text: str
    cut: bool = False  # longer than what is kept


@dataclass(slots=True)
class FusionTrace:
    """Everything the collector saw while a model compiled."""

    supported: bool
    note: str = ""
    graphs: list[GraphSpan] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    hook_seconds: float = 0.0
    compile_seconds: float = 0.0
    breaks: list[GraphBreak] = field(default_factory=list)
    antipatterns: list[AntiPattern] = field(default_factory=list)
    module_types: dict[str, str] = field(default_factory=dict)  # FQN -> class, where a graph named it
    sources: list[KernelSource] = field(default_factory=list)

"""A llama-like model as the example runs see it: its options, kernels, missed fusions and parameter counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from costlab.probes import records as r
from costlab.probes.spec import Compile, Device, DType, Parallel

DIM, FFN, VOCAB, BATCH, SEQ = 2048, 5632, 32000, 4, 2048
TOKENS = BATCH * SEQ  # of one rank
COPY_GBPS, PEAK_TFLOPS = 4200.0, 780.0
BLOCK_PARAMETERS = 4 * DIM * DIM + 3 * DIM * FFN + 2 * DIM
ROOT_PARAMETERS = 2 * VOCAB * DIM + DIM
NASTY = "\x1b[2J[bold red]|`<script>\u202e*x*\n"


@dataclass(frozen=True, kw_only=True)
class Example:
    """What to write; the defaults are a complete two-GPU run."""

    run_id: str = "20261129-1402-llama-example-a1b2"
    ranks: int = 2
    layers: int = 4
    device: Device = "cuda"
    status: r.RunStatus = "complete"
    parallel: Parallel = "fsdp"
    compile: Compile = "block"
    dtype: DType = "bf16"
    price: float | None = None
    idle: float = 1.0  # factor on every idle part
    straggler_ms: float = 0.4  # how late the last rank is at each collective
    speed: float = 1.0  # divides every device time
    hostile: bool = False  # control characters and markup in every name
    own_spans: bool = False  # layer spans exclude their children
    omit: frozenset[str] = frozenset()  # tables not written
    schema_version: int = r.SCHEMA_VERSION
    gpu: str = "NVIDIA H200"
    created: str = "2026-11-29T14:02:00Z"
    steps: int = 20
    profile_steps: int = 3
    seed: int = 0
    pid: int | None = None
    pid_started: float | None = None
    spec: dict[str, Any] = field(default_factory=dict)  # further options of the run


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of one layer and phase, per step."""

    name: str
    kind: str
    category: Literal["matmul", "memory"]
    layer: str
    phase: str
    read: int = 0
    written: int = 0
    flops: int = 0
    ops: str = ""
    source: str = "llama.py:1"

    @property
    def ms(self) -> float:
        """Time at 80 % of the matrix peak, or at 88 % of the copy bandwidth."""
        if self.category == "matmul":
            return self.flops / (0.8 * PEAK_TFLOPS * 1e9)
        return (self.read + self.written) / (0.88 * COPY_GBPS * 1e6)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """One missed fusion of a layer and phase; bytes per step."""

    layer: str
    phase: str
    cause: str
    addressable: bool
    bytes: int
    reason: str
    producer: str = "aten.mul"
    consumer: str = "aten.sum"
    source: str = "llama.py:88"


def width_of(example: Example) -> int:
    return 4 if example.dtype == "fp32" else 2


def _block_phase(path: str, phase: str, w: int) -> list[Kernel]:
    """Kernels of one block in forward or backward; backward moves and computes twice as much."""
    f = 1 if phase == "forward" else 2
    act, wide = TOKENS * DIM * w, TOKENS * FFN * w

    def mm(name: str, layer: str, flops: int) -> Kernel:
        return Kernel(
            name=name,
            kind="extern",
            category="matmul",
            layer=f"{path}.{layer}",
            phase=phase,
            flops=f * flops,
            ops="aten.mm",
            source="llama.py:40",
        )

    def fused(name: str, layer: str, read: int, written: int, ops: str) -> Kernel:
        kind = "reduction" if "_red_" in f"_{name}" else "pointwise"
        return Kernel(
            name=f"triton_{name}_{phase[0]}",
            kind=kind,
            category="memory",
            layer=f"{path}.{layer}",
            phase=phase,
            read=f * read,
            written=f * written,
            ops=ops,
            source="llama.py:52",
        )

    return [
        fused("red_fused_mean_mul_rsqrt_0", "attention_norm", act, act, "aten.mean,aten.rsqrt,aten.mul"),
        mm("nvjet_qkv", "attention", 2 * TOKENS * DIM * 3 * DIM),
        fused("poi_fused_cat_mul_neg_1", "attention", 2 * act, 2 * act, "aten.mul,aten.neg,aten.cat"),
        mm("flash_fwd" if phase == "forward" else "flash_bwd", "attention", 2 * TOKENS * SEQ * DIM),
        mm("nvjet_out", "attention", 2 * TOKENS * DIM * DIM),
        fused("red_fused_add_mean_mul_rsqrt_2", "ffn_norm", 2 * act, 2 * act, "aten.add,aten.mean"),
        mm("nvjet_up", "feed_forward", 2 * TOKENS * DIM * 2 * FFN),
        fused("poi_fused_mul_silu_3", "feed_forward", 2 * wide, wide, "aten.silu,aten.mul"),
        mm("nvjet_down", "feed_forward", 2 * TOKENS * FFN * DIM),
    ]


def kernels_of(example: Example) -> list[Kernel]:
    """All kernels of one step of one rank."""
    w, logits = width_of(example), TOKENS * VOCAB * 4
    out: list[Kernel] = []
    for phase in ("forward", "backward"):
        f = 1 if phase == "forward" else 2
        for n in range(example.layers):
            out += _block_phase(f"layers.{n}", phase, w)
        out += [
            Kernel(
                name="vectorized_gather" if f == 1 else "embedding_backward",
                kind="eager",
                category="memory",
                layer="embed",
                phase=phase,
                read=TOKENS * DIM * w,
                written=f * TOKENS * DIM * w,
                ops="aten.embedding",
            ),
            Kernel(
                name="nvjet_head",
                kind="extern",
                category="matmul",
                layer="head",
                phase=phase,
                flops=f * 2 * TOKENS * DIM * VOCAB,
                ops="aten.mm",
            ),
            Kernel(
                name="softmax_warp" if f == 1 else "softmax_warp_backward",
                kind="eager",
                category="memory",
                layer="loss",
                phase=phase,
                read=2 * logits,
                written=logits,
                ops="aten._log_softmax",
                source="llama.py:120",
            ),
        ]
    shard = parameters_of(example) * 4 // shards_of(example)
    out.append(
        Kernel(
            name="multi_tensor_apply_adam",
            kind="foreach",
            category="memory",
            layer="",
            phase="optimizer",
            read=4 * shard,
            written=3 * shard,
            ops="aten._fused_adamw_",
        )
    )
    return out


def losses_of(example: Example) -> list[Lost]:
    """Missed fusions: two in every block, one at the loss."""
    w = width_of(example)
    out: list[Lost] = []
    for n in range(example.layers):
        path = f"layers.{n}"
        out += [
            Lost(
                layer=f"{path}.feed_forward",
                phase="forward",
                cause="through_extern",
                addressable=False,
                bytes=TOKENS * FFN * w,
                reason="node2 is extern or nop",
                producer="aten.silu",
                consumer="aten.mm",
            ),
            Lost(
                layer=f"{path}.attention",
                phase="backward",
                cause="backend_loop_mismatch",
                addressable=True,
                bytes=TOKENS * DIM * w * 2,
                reason="no shared data due to indexing mismatch",
                producer="aten.mul",
                consumer="aten.cat",
                source="llama.py:52",
            ),
        ]
    out.append(
        Lost(
            layer="loss",
            phase="forward",
            cause="graph_break",
            addressable=True,
            bytes=TOKENS * VOCAB * 4 * 2,
            reason="the loss runs outside the compiled graph",
            producer="aten.mm",
            consumer="aten._log_softmax",
            source="llama.py:120",
        )
    )
    return out


def parameters_of(example: Example) -> int:
    """Parameters of the whole model."""
    return example.layers * BLOCK_PARAMETERS + ROOT_PARAMETERS


def shards_of(example: Example) -> int:
    """Over how many ranks the parameters are sharded."""
    return example.ranks if example.parallel in ("fsdp", "hsdp") else 1


CLASSES = {"attention_norm": "RMSNorm", "attention": "Attention", "ffn_norm": "RMSNorm", "feed_forward": "FeedForward"}


def layer_classes(example: Example) -> dict[str, str]:
    """Module FQN -> class name."""
    out = {"": "Llama", "embed": "Embedding"}
    for n in range(example.layers):
        out[f"layers.{n}"] = "Block"
        out |= {f"layers.{n}.{part}": name for part, name in CLASSES.items()}
    return out | {"head": "Linear", "loss": "CrossEntropy"}

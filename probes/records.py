"""Every record and event that crosses a process boundary, defined once with unit and meaning. Torch-free.

A *row* is one line of a columnar table in `rank-NNNNN/<table>.parquet`; an *event* is one line of
`events.jsonl`. Times in columns are milliseconds unless the name ends otherwise; bytes are bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1

Ms = Annotated[float, Meta(extra={"unit": "ms"})]
Us = Annotated[float, Meta(extra={"unit": "us"})]
Bytes = Annotated[int, Meta(extra={"unit": "B"})]
Joules = Annotated[float, Meta(extra={"unit": "J"})]

FusionStatus = Literal["complete", "partial", "broken", "unknown"]
Phase = Literal["start", "check-in", "build", "compile", "warm-up", "measure", "profile", "checkpoint", "write", "done"]
RunStatus = Literal["running", "complete", "failed", "cancelled", "incomplete"]


class Row(msgspec.Struct, kw_only=True):
    """Base of table rows; `table` names the parquet file."""

    table: ClassVar[str] = ""


class StepRow(Row, kw_only=True):
    """One training step on one rank. `role` says under which conditions it ran."""

    table: ClassVar[str] = "steps"
    rank: int
    step: int
    role: Literal["warmup", "timed", "profiled", "control", "save_sync", "save_async"]
    ms: Ms
    host_ms: Ms | None = None  # time until the host had enqueued the step
    loss: float | None = None
    start_ns: int = 0  # unix time
    gc_ms: Ms | None = None  # of the host's time, what Python's garbage collector took; null: not watched


class SpanRow(Row, kw_only=True):
    """One node of the span tree of a step: step > phase > layer > kernel.

    `ms` is measured time per step (null where nothing was measured); bytes are Inductor's scheduled traffic.
    `fusion_rate` is 1 - addressable_lost/actual bytes, null where there is nothing to fuse.
    """

    table: ClassVar[str] = "spans"
    trace_id: str
    span_id: str
    parent_span_id: str | None
    rank: int
    kind: Literal["step", "phase", "layer", "kernel"]
    name: str
    phase: str = ""  # forward | backward | optimizer | other
    layer: str = ""  # module FQN, or "" at the root
    layer_class: str = ""
    kernel_kind: str = ""  # pointwise reduction template extern foreach collective copy user_triton eager
    fusion_status: FusionStatus = "unknown"
    fusion_rate: float | None = None
    strict_rate: float | None = None
    calls: int = 0  # launches per step
    ms: Ms | None = None
    bytes_read: Bytes | None = None
    bytes_written: Bytes | None = None
    addressable_lost: Bytes | None = None
    structural_lost: Bytes | None = None
    main_cause: str = ""
    flops: int | None = None
    ops: str = ""  # aten operators, comma separated
    source: str = ""  # file.py:line
    compile_id: str = ""


class MissRow(Row, kw_only=True):
    """A pair of operators that share data and were not fused, or a boundary that cost traffic."""

    table: ClassVar[str] = "misses"
    rank: int
    layer: str
    phase: str
    cause: str
    addressable: bool
    bytes: Bytes  # per step, all calls
    reason: str
    producer: str = ""
    consumer: str = ""
    producer_source: str = ""
    consumer_source: str = ""
    producer_kernel: str = ""
    consumer_kernel: str = ""
    compile_id: str = ""


class PatternRow(Row, kw_only=True):
    """Code in the model that costs fusion, with the line and the mend."""

    table: ClassVar[str] = "patterns"
    rank: int
    kind: str  # one of fusion.antipatterns.KINDS
    layer: str  # of the first module whose graph shows it
    phase: str = ""
    source: str = ""  # file.py:line
    text: str
    mend: str
    bytes: Bytes = 0  # per call of the graph; 0 where the cost is not traffic
    count: int = 1
    ops: str = ""


class KernelSourceRow(Row, kw_only=True):
    """Source that Inductor generated for a kernel, without paths of this machine; written by rank 0 alone."""

    table: ClassVar[str] = "kernel_sources"
    rank: int
    name: str  # as the spans and the profiler name the kernel
    phase: str
    compile_id: str
    language: str  # triton | cpp
    source: str
    cut: bool = False  # longer than what is kept


class KernelRow(Row, kw_only=True):
    """All launches of one device kernel (or CPU operator) within the profiled steps, per step."""

    table: ClassVar[str] = "kernels"
    rank: int
    name: str
    category: Literal["matmul", "memory", "communication", "copy", "other"]
    phase: str = ""
    layer: str = ""
    calls: float  # per step
    ms: Ms  # per step, summed over launches
    bytes_moved: Bytes | None = None
    flops: int | None = None
    stream: str = ""
    op: str = ""  # the operator that launched it


class CollectiveRow(Row, kw_only=True):
    """One collective call on one rank in one profiled step. Cross-rank wait and transfer are derived from these."""

    table: ClassVar[str] = "collectives"
    rank: int
    step: int
    seq: int  # n-th collective of this group in the step: the same call has the same seq on all ranks
    kind: str  # all_gather reduce_scatter all_reduce broadcast ... as torch names them, without prefixes
    group: str  # process group ranks, "0,1"
    group_size: int
    dtype: str = ""
    bytes_in: Bytes | None  # null where the trace does not say
    bytes_out: Bytes | None
    start_us: Us  # from the profiled step's start on this rank
    ms: Ms  # duration on this rank, wait for peers included
    exposed_ms: Ms = 0.0  # part not overlapped by compute on this rank
    layer: str = ""
    phase: str = ""
    schedule: str = ""  # of costlab's own, "" for the library's


class PartRow(Row, kw_only=True):
    """One part of one profiled step's wall time on one rank; parts of a step sum to its wall time."""

    table: ClassVar[str] = "parts"
    rank: int
    step: int
    name: str
    ms: Ms


class CompileRow(Row, kw_only=True):
    """A compile event: a graph, a graph break, a recompile, a cache fact or a phase total."""

    table: ClassVar[str] = "compile"
    rank: int
    kind: Literal["graph", "break", "recompile", "cache", "phase", "memory"]
    name: str = ""  # graph: compile id; cache: which cache; phase: which phase; memory: which counter
    detail: str = ""  # reason, guard
    source: str = ""  # file.py:line of the user's code
    seconds: float | None = None
    count: int | None = None  # cache: hits/misses/bypasses; graph: operators
    bytes: Bytes | None = None
    run: Literal["cold", "warm", ""] = ""


class CheckpointRow(Row, kw_only=True):
    """One checkpoint operation on one rank."""

    table: ClassVar[str] = "checkpoint"
    rank: int
    mode: str  # sync | async:<configuration> (torch.distributed.checkpoint) | costlab:<preset>
    op: Literal["save", "load"]
    ok: bool
    bytes: Bytes | None = None
    blocked_ms: Ms | None = None  # time the call kept the training thread
    total_ms: Ms | None = None  # until durable (save) or usable (load)
    stall_ms: Ms | None = None  # extra time of the steps around it against control steps, the figure that counts
    stall_low_ms: Ms | None = None
    stall_high_ms: Ms | None = None
    identical: bool | None = None  # load: every tensor bit-equal to what was saved; null where the save is lossy
    note: str = ""
    lossy: bool = False
    within_bound: bool | None = None  # load of a lossy save: every value within the error bound its file states
    state_bytes: Bytes | None = None  # of this rank's part before coding
    bits: float | None = None  # stored bits a value, everything included
    update_error: float | None = None  # lossy: relative error of the first resumed Adam update, worst parameter


class CheckpointStageRow(Row, kw_only=True):
    """One stage of one checkpoint operation on one rank; times count from the call."""

    table: ClassVar[str] = "checkpoint_stages"
    rank: int
    mode: str
    op: Literal["save", "load"]
    stage: str  # encode launch stage checksum write pack sync replica commit | to disk
    start_ms: Ms | None = None  # null for what was measured apart
    end_ms: Ms | None = None
    busy_ms: Ms  # time in which at least one piece of it was under way
    bytes: Bytes | None = None  # what it moved
    ceiling_gbps: float | None = None  # what this machine reaches at the same, measured in this run
    ceiling: str = ""  # how that was measured


class CheckpointCodecRow(Row, kw_only=True):
    """What a lossy save does to one class of tensors, on a sample of this rank's state."""

    table: ClassVar[str] = "checkpoint_codecs"
    rank: int
    mode: str
    codec: str
    tensor_class: str
    values: int
    bits: float
    ratio: float
    rel_l2: float
    max_abs: float
    flushed: int  # values that were not zero and came back as zero
    update_error: float | None = None  # with only this class coded
    encode_gbps: float | None = None  # original bytes over wall time
    decode_gbps: float | None = None


class ResumeRow(Row, kw_only=True):
    """Loss of one training step after a restore, and of the same step (same data) of the training that went on."""

    table: ClassVar[str] = "resume"
    rank: int
    mode: str
    after: int  # optimizer updates since the restore
    loss: float
    exact_loss: float


class MemoryRow(Row, kw_only=True):
    """Peak and current memory in one phase."""

    table: ClassVar[str] = "memory"
    rank: int
    phase: str
    allocated_peak: Bytes | None = None  # device allocator; null on CPU
    reserved_peak: Bytes | None = None
    allocated: Bytes | None = None
    device_total: Bytes | None = None
    host_peak: Bytes | None = None


class PowerRow(Row, kw_only=True):
    """Energy of one phase from the device's energy counter; no row where there is no counter."""

    table: ClassVar[str] = "power"
    rank: int
    phase: str
    joules: Joules
    seconds: float
    steps: int
    source: str


class GradientRow(Row, kw_only=True):
    """L2 norm of one parameter's gradient in one step, shards of all ranks together."""

    table: ClassVar[str] = "gradients"
    rank: int
    step: int  # training step, warm-up included
    tensor: str  # parameter FQN
    norm: float


class LinkRow(Row, kw_only=True):
    """A device and how it is reached, as found at check-in."""

    table: ClassVar[str] = "links"
    rank: int
    device: str
    kind: str
    fact: str
    value: str
    source: str


ROWS: tuple[type[Row], ...] = (
    StepRow,
    SpanRow,
    MissRow,
    PatternRow,
    KernelSourceRow,
    KernelRow,
    CollectiveRow,
    PartRow,
    CompileRow,
    CheckpointRow,
    CheckpointStageRow,
    CheckpointCodecRow,
    ResumeRow,
    MemoryRow,
    PowerRow,
    GradientRow,
    LinkRow,
)


class Event(msgspec.Struct, kw_only=True, tag_field="event", tag=str.lower):
    """Base of the event stream. `t` is unix seconds; rank -1 is the launcher."""

    t: float
    rank: int = -1


class Hello(Event, kw_only=True):
    """A rank has started."""

    pid: int
    host: str = ""


class PhaseEvent(Event, kw_only=True, tag="phase"):
    """A rank entered a phase."""

    phase: str
    detail: str = ""


class Progress(Event, kw_only=True):
    """`done` of `total` units of the phase; `eta_s` where it can be told."""

    phase: str
    done: int
    total: int
    detail: str = ""
    eta_s: float | None = None


class StepEvent(Event, kw_only=True, tag="step"):
    """A step finished; a live figure, not the stored measurement."""

    step: int
    ms: float
    loss: float | None = None
    role: str = ""


class Log(Event, kw_only=True):
    """A line for the log pane."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


class Failure(Event, kw_only=True):
    """A rank or the whole group failed; `kind` is one of failures.KINDS."""

    kind: str
    phase: str
    message: str
    traceback: str = ""
    advice: str = ""


class Heartbeat(Event, kw_only=True):
    """A rank's process is alive; says nothing about progress."""

    phase: str = ""


class Finished(Event, kw_only=True):
    """A rank wrote its tables, or (rank -1) the run ended with `status`."""

    status: str = "complete"


AnyEvent = Union[  # noqa: UP007 - msgspec reads the runtime union
    Hello, PhaseEvent, Progress, StepEvent, Log, Failure, Heartbeat, Finished
]
_event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """One JSON line, newline included."""
    return _encoder.encode(event) + b"\n"


def decode_event(line: bytes) -> AnyEvent:
    """Raise msgspec.DecodeError on a damaged line."""
    return _event_decoder.decode(line)


class Gpu(msgspec.Struct, kw_only=True):
    """One accelerator as the driver reports it."""

    index: int
    name: str
    memory_bytes: int | None = None
    sm_count: int | None = None
    capability: str = ""
    pcie: str = ""
    power_limit_w: float | None = None


class Environment(msgspec.Struct, kw_only=True):
    """What the run ran on. No host names, user names or paths are recorded."""

    costlab: str = ""
    python: str = ""
    platform: str = ""
    cpu: str = ""
    cpu_count: int = 0
    memory_bytes: int | None = None
    torch: str = ""
    triton: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    driver: str | None = None
    backend: str = ""
    device: str = ""
    gpus: list[Gpu] = []
    git: str | None = None
    limits: list[str] = []  # what could not be had on this machine, said in words


class WorkloadFacts(msgspec.Struct, kw_only=True):
    """What the workload is, as its builder and the worker know it; figures are per rank unless named otherwise."""

    name: str = ""
    title: str = ""
    parameters: int = 0
    parameter_bytes: int = 0
    unit: str = "tokens"  # what throughput counts: tokens or samples
    units_per_step: int = 0  # all ranks together
    flops_per_step: float | None = None  # all ranks together, model FLOPs (no recomputation)
    flops_formula: str = ""
    peak_tflops: float | None = None  # one device, measured in this run
    peak_method: str = ""
    copy_gbps: float | None = None  # one device, read + write, measured in this run
    expected_comm_bytes: int | None = None  # one rank, one step, from parameter sizes
    expected_comm_formula: str = ""
    layer_classes: dict[str, str] = {}  # module FQN -> class
    fused: list[str] = []  # "kernel: module" for every fused kernel put in
    fused_notes: list[str] = []  # where the unfused path was kept, and why
    source: str = ""
    passed_over: dict[str, int] = {}  # by class: modules compiled that Module.compile() alone leaves eager


class FailureInfo(msgspec.Struct, kw_only=True):
    """Why a run ended early, in one sentence, with what to try."""

    kind: str
    rank: int
    phase: str
    message: str
    advice: str = ""
    log_tail: list[str] = []


class Manifest(msgspec.Struct, kw_only=True):
    """`manifest.json`: the run's identity card, rewritten atomically; its final form is written last."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created: str  # ISO 8601, UTC
    status: RunStatus = "running"
    spec: dict[str, Any] = {}
    ranks: int = 0
    environment: Environment | None = None
    workload: WorkloadFacts | None = None
    failure: FailureInfo | None = None
    duration_s: float | None = None
    pid: int | None = None
    pid_started: float | None = None
    notes: list[str] = []
    imported_from: str | None = None
    extra: dict[str, Any] = {}

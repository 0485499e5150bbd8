"""View models of one run: what every renderer (TUI, Markdown, text, JSON) shows.

`RunReport` encodes directly to the documented JSON; its top-level keys are a fixed interface. Absent figures are
None, never zero. `Figure.source` is measured, derived, modelled or quoted; `how` says by what, over which sample.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from costlab.probes.records import SCHEMA_VERSION, Environment, FusionStatus

Source = Literal["measured", "derived", "modelled", "quoted"]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of immutable view models."""


class Figure(View, frozen=True, kw_only=True):
    """One number with its unit, origin and sample."""

    value: float | None
    unit: str
    source: Source
    how: str
    n: int | None = None
    low: float | None = None  # 95 % interval, or the range named in `how`
    high: float | None = None


class RunInfo(View, frozen=True, kw_only=True):
    """What was run and how it ended."""

    id: str
    title: str  # "llama 1b · compiled FSDP2 (block) · 2 x NVIDIA H200 · bf16"
    status: str
    created: str
    duration_s: float | None
    workload: str
    size: str
    ranks: int
    device: str
    parallel: str
    compile: str
    dtype: str
    unit: str  # tokens | samples
    units_per_step: int
    parameters: int
    spec: dict[str, Any]
    passed_over: dict[str, int] = {}  # by class: modules compiled that Module.compile() alone leaves eager
    fused: dict[str, int] = {}  # by name: fused kernels put in for --fused or --plan, each where it was recognised
    failure: str = ""
    failure_advice: str = ""
    log_tail: list[str] = []
    notes: list[str] = []  # what is missing from this run and why


class CollectorView(View, frozen=True, kw_only=True):
    """Python's garbage collector in the timed steps. A step waits for the rank that collects longest in it."""

    per_step_ms: float  # mean over the steps, each of the rank with the longest collections
    longest_ms: float  # of one step on one rank
    rank: int  # whose that was
    step: int  # which that was
    paused: int = 0  # steps with collections of at least 5 % of the median step on some rank
    lost_ms: float = 0.0  # what those steps took beyond the others, at most their collections; mean over all steps
    bound: bool = False  # there are too few others: `lost_ms` is as if nothing had hidden the collections


class StepsView(View, frozen=True, kw_only=True):
    """Unprofiled timed steps; a step's time is the slowest rank's."""

    step_ms: Figure  # median
    p10_ms: float | None = None
    p90_ms: float | None = None
    throughput: Figure | None = None  # unit: tokens/s or samples/s, all ranks
    mfu: Figure | None = None  # fraction of the peak measured in this run
    series_ms: list[float] = []  # in step order
    per_rank_ms: list[float] = []  # median by rank
    host_ms: float | None = None  # median time until the host had enqueued the step
    profiled_ms: float | None = None  # median of profiled steps, for the profiler's cost
    loss_first: float | None = None
    loss_last: float | None = None
    loss_bad: int = 0  # timed steps in which some rank's loss was infinite or not a number
    loss_bad_from: int | None = None  # the first of them
    collector: CollectorView | None = None  # None: not watched
    peak_tflops: Figure | None = None
    copy_gbps: Figure | None = None
    profiled_only: bool = False  # no unprofiled step was recorded: times include the profiler's own cost


class Part(View, frozen=True, kw_only=True):
    """One part of the step. `name` is one of waterfall.PARTS."""

    name: str
    ms: float
    share: float = 0.0
    note: str = ""  # e.g. "launch 8.9, sync 0.4" or "wait 3.1, transfer 14.5"


class WaterfallView(View, frozen=True, kw_only=True):
    """A step's wall time without remainder: `parts` sum to `step_ms`."""

    step_ms: float
    parts: list[Part]
    idle: list[Part] = []  # GPU idle by cause
    method: str = ""
    profiled_steps: int = 0
    rank_spread_ms: float | None = None
    wait_ms: float | None = None  # of exposed communication: waiting for peers; None with one rank recorded


class LayerRow(View, frozen=True, kw_only=True):
    """One line of the fusion tree; `path` is the module FQN ("" is the model), depth its level."""

    path: str
    label: str
    depth: int
    layer_class: str
    status: FusionStatus
    rate: float | None
    target: float | None
    ms: float | None  # measured, per step, of all kernels but collectives
    bytes: int | None  # actual traffic of fusible kernels, per step
    lost: int | None  # addressable bytes lost, per step
    structural: int | None
    main_cause: str
    saves_ms: float | None  # modelled: lost bytes at measured bandwidth
    gap_ms: float | None = None  # modelled: what reaching the target would save
    kernels: int = 0
    alike: int = 1  # how many identical siblings this line stands for
    has_children: bool = False


class ClassRow(View, frozen=True, kw_only=True):
    """Fusion rate of a layer class."""

    layer_class: str
    layers: int
    status: FusionStatus
    rate: float | None
    strict_rate: float | None
    target: float | None
    ms: float | None
    bytes: int | None
    lost: int | None
    structural: int | None
    saves_ms: float | None
    gap_ms: float | None = None  # modelled: what reaching the target would save
    gap_run_money: float | None = None  # the same over the run's steps, all GPUs


class KernelView(View, frozen=True, kw_only=True):
    """One kernel of a layer and phase."""

    name: str
    kind: str
    category: str
    layer: str
    phase: str
    calls: float
    ms: float
    bytes: int | None = None
    gbps: float | None = None
    of_copy: float | None = None  # achieved bandwidth / measured copy bandwidth
    flops: int | None = None
    status: FusionStatus = "unknown"
    ops: str = ""
    source: str = ""


class MissView(View, frozen=True, kw_only=True):
    """A missed fusion."""

    layer: str
    phase: str
    cause: str
    cause_text: str
    addressable: bool
    bytes: int
    saves_ms: float | None
    reason: str
    producer: str
    consumer: str
    producer_source: str
    consumer_source: str
    count: int = 1


class PatternView(View, frozen=True, kw_only=True):
    """Code that costs fusion, found in the user's model."""

    kind: str
    text: str
    mend: str
    layer: str  # FQN with indices replaced by *
    phase: str
    source: str
    bytes: int  # per call of the graph; 0 where the cost is not traffic
    saves_ms: float | None  # per call of the graph
    cost_ms: float | None = None  # per step
    cost_kind: Literal["derived", "modelled", ""] = ""  # from profiled kernels, or from bytes at copy bandwidth
    count: int = 1
    ops: str = ""


class KernelCode(View, frozen=True, kw_only=True):
    """The source that Inductor generated for a kernel; of the longest kernels that have one."""

    name: str
    phase: str
    ms: float  # measured, per step, of all layers together
    language: str  # triton or cpp
    source: str  # as generated, without paths
    cut: bool = False  # whether the end is missing
    variants: int = 1  # different kernels of that name and phase; this is the newest


class CandidateView(View, frozen=True, kw_only=True):
    """A rewrite that `costlab tune` considered. Changes are relative, of the step time; negative is faster."""

    name: str
    kernel: str  # fused kernel, "" where there is none
    how: str  # module, pattern, loss, or none where no kernel does it
    where: str  # module FQN, * for any index
    places: int = 1  # how many alike places
    layers: list[str] = []  # whose traffic and time it was judged by
    span_ms: float | None = None  # measured, of the layers' memory-bound kernels, per step
    kernel_bytes: int | None = None  # what the fused kernel moves, forward and backward, per step
    lost: int | None = None  # bytes of the missed fusions in the layers, per step
    predicted_ms: float | None = None  # saving per step
    predicted_how: str = ""  # what the prediction follows from
    intensity: float | None = None  # FLOP per byte of the layers' memory-bound kernels
    miss_rate: float | None = None  # L2 sectors missed / requested of the pair's kernels
    miss_how: str = ""  # measured by ncu or estimated
    latency_ratio: float | None = None  # second kernel's time / both kernels' time
    roofline: bool = False  # whether the roofline policy chooses it
    seed: bool | None = None  # whether the rule on L2 misses and latencies does; null where it cannot say
    seed_why: str = ""  # the rule's two figures
    checked: bool | None = None  # whether loss and gradients agreed with the plain step's
    check: str = ""  # differences of loss and gradients, and which code ran
    change: float | None = None  # measured, of the step time
    change_low: float | None = None  # its 95 % interval
    change_high: float | None = None  # its 95 % interval
    measured_ms: float | None = None  # saving per step
    decision: str = "untried"  # kept, dropped or untried
    why: str = ""  # of the decision


class BeforeAfter(View, frozen=True, kw_only=True):
    """A layer before the rewrites and after."""

    path: str
    label: str
    depth: int
    rate: float | None = None
    rate_after: float | None = None  # with the rewrites
    ms: float | None = None
    ms_after: float | None = None  # with the rewrites
    lost: int | None = None
    lost_after: int | None = None  # bytes, with the rewrites


class TuneView(View, frozen=True, kw_only=True):
    """What profile-guided fusion found on this run."""

    created: str
    policy: str  # roofline or seed
    plan: str = ""  # name of the plan file
    whatif: str = ""  # id of the what-if that measured
    unavailable: str = ""  # why Triton kernels cannot run here, "" where they can
    step_ms: float | None = None
    candidates: list[CandidateView] = []  # tried or not, largest prediction first
    layers: list[BeforeAfter] = []  # of the traces without and with the rewrites
    together: float | None = None  # change with all candidates at once
    together_low: float | None = None  # its 95 % interval
    together_high: float | None = None  # its 95 % interval
    notes: list[str] = []  # what to know of the figures


class FusionView(View, frozen=True, kw_only=True):
    """Fusion rate of the step, by class and layer, with the reasons."""

    rate: Figure | None
    strict_rate: float | None
    target: float | None
    status: FusionStatus
    quality: Figure | None  # share of kernel time whose span has an intact parent chain
    classes: list[ClassRow] = []
    layers: list[LayerRow] = []
    misses: list[MissView] = []
    kernels: list[KernelView] = []
    patterns: list[PatternView] = []
    sources: list[KernelCode] = []  # of the longest generated kernels
    tuning: TuneView | None = None  # what `costlab tune` found on this run
    note: str = ""


class CollectiveView(View, frozen=True, kw_only=True):
    """All calls of one kind and size in a group, per step."""

    kind: str
    group: str
    group_size: int
    dtype: str
    calls: float  # per step
    bytes_in: int | None  # one call; None where the trace does not say
    bytes_out: int | None
    bytes_step: int | None  # one rank, per step: the larger of in and out, all calls
    ms: float  # per step, mean over ranks, wait included
    transfer_ms: float | None  # minimum over ranks, summed; null with one rank recorded
    wait_ms: float | None
    exposed_ms: float
    algbw_gbps: float | None
    busbw_gbps: float | None
    last_rank: int | None = None  # who arrived last most often
    layer: str = ""
    wait_doubt_ms: float | None = None  # what the clocks' uncertainty makes of `wait_ms`, per step
    ideal_ms: float | None = None  # one call at the bandwidth and latency of the slowest link on its way
    ideal_ratio: float | None = None  # ideal / transfer of one call
    ideal_how: str = ""
    schedule: str = ""  # of costlab's own; "" for the library's own call, "backend" for one that a plan chose

    @property
    def name(self) -> str:
        """The kind, and the schedule where it isn't the library's."""
        return f"{self.kind}, {self.schedule}" if self.schedule not in ("", "backend") else self.kind


class CurveView(View, frozen=True, kw_only=True):
    """Bandwidth over size from a benchmark or a calibrated link, to lay the run's own collectives on."""

    name: str
    source: str
    bytes: list[int]
    busbw_gbps: list[float]


class ScheduleView(View, frozen=True, kw_only=True):
    """One message size and the all-reduce schedule that the run chose for it."""

    bytes: int
    schedule: str  # with its chunks; the library's name where its own all-reduce stays
    ms: float | None = None
    library_ms: float | None = None  # the library's own all-reduce; null where it was no candidate
    used: bool = False  # a message of the step, by the curves; otherwise a size that was measured


class CollectivesView(View, frozen=True, kw_only=True):
    """Communication of a step; `convention` says how bandwidths are defined."""

    rows: list[CollectiveView] = []
    bytes_per_step: Figure | None = None
    expected_bytes: Figure | None = None
    total_ms: float | None = None
    exposed_ms: float | None = None
    transfer_ms: float | None = None
    wait_ms: float | None = None
    wait_doubt_ms: float | None = None
    clock_uncertainty_us: float | None = None  # of a difference between two ranks' times; null where not compared
    clock: str = ""
    overlapped: float | None = None
    straggler: str = ""
    curves: list[CurveView] = []
    schedules: list[ScheduleView] = []  # where the run was asked to plan its all-reduce
    schedules_how: str = ""  # how they came about
    convention: str = ""
    note: str = ""


class CheckpointLine(View, frozen=True, kw_only=True):
    """One way of saving or loading, over all ranks (slowest rank)."""

    mode: str
    op: str
    ok: bool
    bytes: int | None  # all ranks
    blocked_ms: float | None
    total_ms: float | None
    stall: Figure | None
    gbps: float | None
    identical: bool | None  # load of an exact save: every value bit-equal to what was saved
    note: str = ""
    lossy: bool = False  # whether values may come back changed, within a bound
    within_bound: bool | None = None  # load of a lossy save: every value within the bound its file states
    state_bytes: int | None = None  # before coding, all ranks
    bits: float | None = None  # stored bits a value, everything included
    update_error: float | None = None  # first resumed Adam update, relative, worst parameter of any rank


class StageLine(View, frozen=True, kw_only=True):
    """One stage of a save on its slowest rank; times count from the call."""

    mode: str
    stage: str
    start_ms: float | None  # null for what was measured apart
    end_ms: float | None
    busy_ms: float  # time in which at least one piece of it was under way
    bytes: int | None  # what it moved on that rank
    gbps: float | None  # bytes over the busy time
    ceiling_gbps: float | None  # what this machine reaches at the same, measured in this run
    of_ceiling: float | None  # fraction
    ceiling: str = ""  # how that was measured


class CodecLine(View, frozen=True, kw_only=True):
    """What a lossy save does to one class of tensors, on a sample of the first rank's state."""

    mode: str
    codec: str
    tensor_class: str
    values: int
    bits: float  # stored bits a value
    ratio: float  # original over stored bytes
    rel_l2: float  # relative L2 error
    max_abs: float  # largest absolute error
    flushed: int  # values that were not zero and came back as zero
    update_error: float | None  # first resumed Adam update with only this class coded, relative
    encode_gbps: float | None  # original bytes over wall time
    decode_gbps: float | None  # the same


class ResumeLine(View, frozen=True, kw_only=True):
    """Loss after a restore beside that of the training that went on with the exact state; mean over ranks."""

    mode: str
    after: int  # optimizer updates since the restore
    loss: float
    exact_loss: float


class CheckpointView(View, frozen=True, kw_only=True):
    """Checkpoint saves and loads, and what a save costs a step at the run's interval."""

    lines: list[CheckpointLine] = []
    every_steps: int = 0
    per_step_ms: float | None = None  # stall of the way of saving the run was asked for, over the interval
    best_mode: str = ""
    note: str = ""
    chosen: str = "sync"  # that way
    stall: Figure | None = None  # its stall
    bytes: int | None = None  # what it writes, all ranks
    stages: list[StageLine] = []
    codecs: list[CodecLine] = []
    resumed: list[ResumeLine] = []


class GraphView(View, frozen=True, kw_only=True):
    """One compiled graph."""

    compile_id: str
    name: str
    ops: int | None
    seconds: float | None


class BreakView(View, frozen=True, kw_only=True):
    """A graph break or a recompile."""

    reason: str
    source: str
    count: int = 1
    compile_id: str = ""
    seconds: float | None = None  # compile time of the recompiles, all together


class CacheView(View, frozen=True, kw_only=True):
    """Cache facts of one rank in one run: three counts, never one ratio."""

    rank: int
    run: str
    cache: str
    hit: int
    miss: int
    bypass: int


class CompileView(View, frozen=True, kw_only=True):
    """Compilation of the run."""

    cold_s: Figure | None = None
    warm_s: Figure | None = None
    graphs: list[GraphView] = []
    breaks: list[BreakView] = []
    recompiles: list[BreakView] = []
    caches: list[CacheView] = []
    phases: list[Part] = []  # name, ms
    peak_host_bytes: Figure | None = None
    peak_device_bytes: Figure | None = None
    amortised_ms: float | None = None  # cold compile over the steps of a run
    note: str = ""


class MemoryPhase(View, frozen=True, kw_only=True):
    """Peak memory of a phase, the largest rank."""

    phase: str
    allocated_peak: int | None
    reserved_peak: int | None
    host_peak: int | None


class MemoryView(View, frozen=True, kw_only=True):
    """Memory by phase; `headroom` is device total less the reserved peak of a step."""

    peak: Figure | None = None
    headroom: Figure | None = None
    device_total: int | None = None
    phases: list[MemoryPhase] = []
    note: str = ""


class EnergyView(View, frozen=True, kw_only=True):
    """Energy, all devices together."""

    per_step: Figure | None = None
    average_w: Figure | None = None
    note: str = ""


class CostView(View, frozen=True, kw_only=True):
    """Money: price per GPU-hour times time. `None` everywhere when the price is unknown or not applicable."""

    price_per_gpu_hour: Figure | None = None
    currency: str = "USD"
    price_date: str = ""
    gpus: int = 0
    per_step: Figure | None = None
    per_million: Figure | None = None  # per 1 M tokens or samples
    per_run: Figure | None = None
    run_steps: int = 0
    note: str = ""


class Finding(View, frozen=True, kw_only=True):
    """Something that costs, what it costs, and what to do. Savings are per step."""

    id: str  # stable rule name, e.g. "launch-bound"
    title: str
    severity: Literal["high", "medium", "low", "info"]
    evidence: list[str]
    action: str
    saves_ms: float | None = None
    saves_share: float | None = None  # of the step
    saves_money: float | None = None  # per 1 M tokens/samples
    saves_run_money: float | None = None  # over run_steps steps
    source: Source = "modelled"
    how: str = ""
    proves: str = ""  # the option or toggle that would prove it, as a command-line fragment
    layer: str = ""
    where: str = ""  # file.py:line


class RunReport(View, frozen=True, kw_only=True):
    """Everything known about a run. The keys are a fixed interface."""

    schema_version: Annotated[int, Meta(description="version of this document's structure")] = SCHEMA_VERSION
    run: RunInfo
    environment: Environment
    steps: StepsView | None
    waterfall: WaterfallView | None
    fusion: FusionView | None
    collectives: CollectivesView | None
    checkpoint: CheckpointView | None
    compile: CompileView | None
    memory: MemoryView | None
    energy: EnergyView | None
    cost: CostView | None
    findings: list[Finding] = []

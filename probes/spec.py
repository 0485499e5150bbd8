"""What a run is asked to do: every option, its default, its limits, and the named presets. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["auto", "cuda", "cpu"]
Parallel = Literal["ddp", "fsdp", "hsdp"]
Compile = Literal["none", "block", "model"]
DType = Literal["fp32", "bf16"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
Recompute = str  # none, block, operator, or budget:0.5
Optimizer = Literal["adamw", "sgd"]
GradCompression = Literal["none", "bf16", "fp16", "powersgd"]
AllReduce = Literal["stock", "auto", "ring", "chain", "two-level", "hybrid", "symmetric"]
Dynamic = Literal["auto", "off", "on"]
CheckIn = Literal["off", "report", "bind"]
Collector = Literal["default", "freeze"]
CheckpointCodec = Literal["dcp", "exact", "fp8"]

RECOMPUTE_NAMES = ("none", "block", "operator")
BUILTIN_WORKLOADS = ("llama", "gpt2", "resnet50")
WORKLOAD_SIZES: dict[str, tuple[str, ...]] = {
    "llama": ("tiny", "small", "medium", "1b", "8b"),
    "gpt2": ("tiny", "small", "medium"),
    "resnet50": ("tiny", "small", "full"),
}


class SpecError(ValueError):
    """An option, or a combination of options, that cannot be run; the message says which and what to do."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """All options of one run.

    `batch` is per rank; `seq` is tokens per sample (ignored by image workloads). `size` names a model size of
    the workload ("tiny" .. "1b"). `ranks` 0 means one per local GPU, or 2 on CPU. Zero in `batch` or `seq` means the
    workload's default for that size; in `checkpoint_budget_s`, what is left of a run of about two minutes.
    `checkpoint_codec` is how the training would save: "dcp" is a plain `dcp.save`, the others are presets of costlab's
    engine; it decides which stall is spread over the steps, all ways are measured as far as the budget goes, with
    `chosen_save_only` none but this one.
    `autocast` puts torch.autocast around model and loss under FSDP2 too, which by itself casts what goes into its
    modules and nothing in between; DDP in bf16 always has it.
    `gc` "freeze" leaves what there is before the timed steps out of Python's later garbage collections.
    `plan` is the path of a fusion plan, whose rewrites are put in. `lean` leaves out what a repetition need not measure
    again: the machine's ceilings, the FLOP count, gradient norms, and the cold compile with its fusion trace; it finds
    the graphs that an earlier run of its `cache_salt` compiled. What stands before a slash in that is shared by runs
    whose all-reduces are timed once.
    """

    workload: str = "llama"
    size: str = "tiny"
    preset: str | None = None
    ranks: int = 0
    device: Device = "auto"
    parallel: Parallel = "fsdp"
    shard_size: int = 0
    compile: Compile = "block"
    compile_mode: CompileMode = "default"
    dynamic: Dynamic = "auto"
    cudagraphs: bool = False
    dtype: DType = "bf16"
    autocast: bool = False
    batch: int = 0
    seq: int = 0
    recompute: Recompute = "none"
    fused: bool = False
    plan: str = ""
    optimizer: Optimizer = "adamw"
    grad_compression: GradCompression = "none"
    schedule: AllReduce = "stock"
    accumulation: int = 1
    lr: float = 3e-4
    steps: int = 20
    warmup: int = 5
    profile_steps: int = 3
    seed: int = 0
    checkpoint: bool = True
    checkpoint_codec: CheckpointCodec = "dcp"
    checkpoint_steps: int = 8
    checkpoint_budget_s: float = 0.0
    chosen_save_only: bool = False
    keep_raw: bool = True
    lean: bool = False
    cache_salt: str = ""
    silence_timeout_s: float = 600.0
    collective_timeout_s: float = 180.0
    threads: int = 0
    check_in: CheckIn = "report"
    gc: Collector = "default"
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""
    price_per_gpu_hour: float | None = None
    price_note: str = ""
    checkpoint_every: int = 500
    run_steps: int = 100_000


PRESETS: dict[str, dict[str, object]] = {
    "smoke": {
        "workload": "llama",
        "size": "tiny",
        "dtype": "fp32",
        "steps": 20,
        "warmup": 3,
        "profile_steps": 2,
        "checkpoint_budget_s": 15.0,  # the first look at costlab; the other ways of saving can be asked for
    },
    "small": {"workload": "llama", "size": "small", "dtype": "bf16", "steps": 20},
    "1b": {"workload": "llama", "size": "1b", "dtype": "bf16", "batch": 4, "seq": 2048, "steps": 20},
    "resnet50": {"workload": "resnet50", "size": "full", "dtype": "bf16", "steps": 20},
    "gpt2": {"workload": "gpt2", "size": "small", "dtype": "bf16", "steps": 20},
}


def recompute_budget(text: str) -> float | None:
    """The share of `budget:0.5`, None for the named policies; SpecError for anything else."""
    if text in RECOMPUTE_NAMES:
        return None
    name, _, share = text.partition(":")
    try:
        value = float(share) if name == "budget" else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        named = ", ".join(RECOMPUTE_NAMES)
        raise SpecError(f"--recompute: '{text}' is not one of {named}, or budget:SHARE with 0 to 1")
    return value


def apply_preset(spec: RunSpec, name: str, overridden: frozenset[str] = frozenset()) -> RunSpec:
    """Return `spec` with the preset's values, except for the fields named in `overridden` (set by the user)."""
    if name not in PRESETS:
        raise SpecError(f"no preset '{name}'; there are: {', '.join(PRESETS)}")
    values = {k: v for k, v in PRESETS[name].items() if k not in overridden}
    return msgspec.structs.replace(spec, preset=name, **values)


def validate(spec: RunSpec) -> None:
    """Raise SpecError for options that cannot work, before any process is started."""
    positive = ("steps", "silence_timeout_s", "collective_timeout_s", "checkpoint_steps", "nnodes", "run_steps")
    for field in (*positive, "accumulation"):
        if getattr(spec, field) <= 0:
            raise SpecError(f"--{field.replace('_', '-')} must be above zero, got {getattr(spec, field)}")
    counts = ("ranks", "batch", "seq", "warmup", "profile_steps", "threads", "shard_size", "node_rank")
    for field in (*counts, "checkpoint_budget_s"):
        if getattr(spec, field) < 0:
            raise SpecError(f"--{field.replace('_', '-')} cannot be negative, got {getattr(spec, field)}")
    if recompute_budget(spec.recompute) is not None and spec.compile == "none":
        raise SpecError("--recompute budget works in the partitioner of torch.compile: add --compile block or model")
    if spec.cudagraphs and spec.compile == "none":
        raise SpecError("--cudagraphs needs a compiled model: add --compile block or --compile model")
    if spec.autocast and spec.dtype != "bf16":
        raise SpecError(f"--autocast casts to bf16: leave it or --dtype {spec.dtype} out")
    if spec.grad_compression != "none" and spec.parallel != "ddp":
        raise SpecError("--grad-compression is a communication hook of DDP: add --parallel ddp")
    if spec.schedule != "stock" and spec.parallel == "fsdp":
        raise SpecError("--schedule: FSDP2 over all ranks has no all-reduce; add --parallel ddp, or hsdp")
    if spec.schedule != "stock" and spec.grad_compression != "none":
        raise SpecError("--schedule and --grad-compression are both DDP's one communication hook: give one of them")
    if spec.parallel == "hsdp" and spec.shard_size and spec.ranks and spec.ranks % spec.shard_size:
        raise SpecError(f"--shard-size {spec.shard_size} does not divide --ranks {spec.ranks}")
    if spec.plan and spec.fused:
        raise SpecError("--fused puts in every kernel that fits, --plan those of a file: give one of them")
    if spec.plan:
        _check_plan(spec.plan)
    if spec.nnodes > 1 and not spec.rdzv_endpoint:
        raise SpecError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the same on every host")
    if ":" not in spec.workload and spec.workload not in BUILTIN_WORKLOADS:
        known = ", ".join(BUILTIN_WORKLOADS)
        raise SpecError(f"no workload '{spec.workload}'; built in: {known}; your own: path/to/file.py:make")


def _check_plan(path: str) -> None:
    from costlab.kernels.fused.plan import PlanError, read

    try:
        read(path)
    except PlanError as error:
        raise SpecError(f"--plan: {error}") from error

"""Turns every way a run can die into one sentence, with what to try. Torch-free."""

from __future__ import annotations

import re
import signal

from costlab.probes.records import Failure, FailureInfo

KINDS = {
    "out-of-memory": "lower --batch or --seq, try --recompute block, or add ranks",
    "host-out-of-memory": "the host ran out of memory: lower --ranks, --batch or the model size",
    "collective-timeout": "a rank did not reach a collective: look at the log of the rank that is named, or raise"
    " --collective-timeout if its work is merely slow",
    "communication": "check that all ranks can reach each other (NCCL_DEBUG=INFO tells more)",
    "workload": "mend the workload file; `costlab run --device cpu --ranks 1` shows the error faster",
    "spec": "change the option that is named",
    "compile": "run again with --compile none to see whether the eager model works, or with --dynamic off if it is"
    " symbolic shapes that the compiler stumbles over",
    "dtype": "under FSDP2 run again with --autocast if it was not on, elsewhere with --dtype fp32, or convert what"
    " meets in the operator at the end of the traceback: it takes one element type only, on a CPU more often than"
    " on a GPU",
    "mixed-parameters": "FSDP2 shards what is gathered together as one tensor: give the parameters one element type or"
    " run with --parallel ddp",
    "scalar-parameters": "FSDP2 shards along the first dimension, which a scalar has not: make it a vector of one"
    " element, as torch.ones(1), or run with --parallel ddp",
    "unused-parameters": "some parameters take no part in the loss, which costlab's DDP does not allow: freeze them"
    " (requires_grad_(False)), leave them out, or run with --parallel fsdp",
    "sparse-gradients": "sharding and AdamW take dense gradients only: make the embedding with sparse=False",
    "past-the-wrapper": "DDP and FSDP2 act in the model's forward() alone: have the loss call model(...) and nothing"
    " else of it, and move into forward() what such a method does or a parameter is needed for",
    "illegal-address": "a kernel wrote out of bounds: CUDA_LAUNCH_BLOCKING=1 names it",
    "segfault": "a native library crashed: the log tail shows the last Python frames",
    "killed": "something outside costlab killed the process",
    "silent": "no progress: the stack of the silent rank is in its log; raise --silence-timeout if it was working",
    "launcher": "run `costlab doctor`",
    "disk": "free some disk space or point --out elsewhere",
    "error": "see the traceback in the log",
}


MIXED_DTYPES = (
    r"expected scalar type \w+ but found|mixed dtype|(to have|must have) (the )?same (dtype|scalar type)|dtypes match"
    r"|dtypes? (to be equal|must be the same)|[Ee]xpected (self\.)?dtype \w+ for|does not match weight dtype"
    r"|Found dtype \w+ but expected|Type promoting not supported"
    r"|(Unsupported dtype|not implemented for) '?(BFloat16|Half)"
)


def classify(type_name: str, message: str) -> str:
    """Kind of a Python exception by its type name and text."""
    text = f"{type_name}: {message}"
    tests = (
        (r"WorkloadError", "workload"),
        (r"SpecError", "spec"),
        (r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED", "out-of-memory"),
        (r"MemoryError|DefaultCPUAllocator: can't allocate", "host-out-of-memory"),
        (r"[Tt]imed? ?out|Timeout", "collective-timeout"),
        (r"DistBackendError|NCCL|ncclUnhandled|[Gg]loo|Connection (closed|reset)|DistNetworkError", "communication"),
        (r"illegal memory access|CUDA error|device-side assert", "illegal-address"),
        (r"No space left on device|Errno 28|Disk quota", "disk"),
        (MIXED_DTYPES, "dtype"),
        (r"FSDP expects uniform (original parameter|reduce) dtype", "mixed-parameters"),
        (r"doesn't support scalar parameters", "scalar-parameters"),
        (r"parameters that were not used in producing loss", "unused-parameters"),
        (r"Sparse(CPU|CUDA)|does not support sparse gradients", "sparse-gradients"),
        (r"'DistributedDataParallel' object has no attribute", "past-the-wrapper"),
        (r"got mixed torch\.Tensor and DTensor", "past-the-wrapper"),
        (
            r"torch\._dynamo|torch\._inductor|torch\.compile with|BackendCompilerFailed|Inductor|CppCompileError",
            "compile",
        ),
    )
    return next((kind for pattern, kind in tests if re.search(pattern, text)), "error")


def advice(kind: str, line: str) -> str:
    """What to try; `line` is the user's own line under the error, if there is one."""
    if not line or kind not in ("error", "dtype", "past-the-wrapper"):
        return KINDS.get(kind, KINDS["error"])
    if kind != "error":
        return f"{KINDS[kind]}; your own line is {line}"
    return f"look at {line}, the last line of your own code in the traceback"


def signal_kind(number: int) -> str:
    """Kind of a death by signal."""
    if number == signal.SIGKILL:
        return "host-out-of-memory"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return "segfault"
    return "killed"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal N` for a number this platform has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def from_event(event: Failure, tail: list[str]) -> FailureInfo:
    """A rank's own account of its failure."""
    message = f"rank {event.rank} failed in phase '{event.phase}': {one_line(event.message)}"
    advice = event.advice or KINDS.get(event.kind, KINDS["error"])
    return FailureInfo(
        kind=event.kind, rank=event.rank, phase=event.phase, message=message, advice=advice, log_tail=tail
    )


def from_exit(rank: int, code: int, phase: str, tail: list[str]) -> FailureInfo:
    """A rank that died without a word: by exit code (above zero) or signal (below)."""
    if code < 0:
        kind = signal_kind(-code)
        name = signal_name(-code)
        reason = f"was killed by {name}"
        if kind == "host-out-of-memory":
            reason += " (most often the kernel's out-of-memory killer)"
    else:
        kind, reason = "error", f"ended with exit code {code}"
    message = f"rank {rank} {reason} in phase '{phase}'"
    return FailureInfo(kind=kind, rank=rank, phase=phase, message=message, advice=KINDS[kind], log_tail=tail)


def silent(rank: int, phase: str, seconds: float, tail: list[str]) -> FailureInfo:
    """A rank that is alive but made no progress."""
    message = f"rank {rank} made no progress for {seconds:.0f} s in phase '{phase}'"
    return FailureInfo(kind="silent", rank=rank, phase=phase, message=message, advice=KINDS["silent"], log_tail=tail)


def one_line(text: str, limit: int = 400) -> str:
    """The message without line breaks, shortened in the middle of nowhere but said so."""
    flat = re.sub(r"\s+", " ", text).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


# torchrun's own account, printed when a rank fails: "  rank      : 1 (local_rank: 1)" ... "  exitcode  : -9 (pid: 77)"
_REPORT = re.compile(r"rank\s*:\s*(\d+)\s*\(local_rank.*?exitcode\s*:\s*(-?\d+)\s*\(pid", re.S)


def torchrun_exits(text: str) -> list[tuple[int, int]]:
    """(rank, exit code) pairs from torchrun's failure report; the root cause is the last one."""
    return [(int(rank), int(code)) for rank, code in _REPORT.findall(text)]

"""The fusion plan: which rewrites a model gets, where and within which limits, and why each was kept or dropped.

A plan is a JSON file that `costlab tune` writes and `costlab run --plan` and `costlab.kernels.apply` read. It may come
from anywhere, so reading it checks everything: size, version, names, numbers. Torch-free.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

FORMAT, VERSION = "costlab-fusion-plan", 1
MOST_BYTES, MOST_REWRITES, MOST_TEXT = 1 << 20, 512, 400
How = Literal["module", "pattern", "loss"]
Decision = Literal["kept", "dropped", "untried"]
Policy = Literal["roofline", "seed"]
DTypeName = Literal["float32", "bfloat16", "float16"]

MODULE_KERNELS = ("ffn_layer_norm", "add_norm", "norm_linear", "gated_linear", "rope", "batch_norm_relu", "rms_norm")
PATTERN_KERNELS = (
    "linear_cross_entropy",
    "add_rms_norm",
    "add_layer_norm",
    "rms_norm",
    "layer_norm",
    "gated",
    "rope",
)
LOSS_KERNELS = ("linear_cross_entropy",)
KERNELS_OF: dict[str, tuple[str, ...]] = {"module": MODULE_KERNELS, "pattern": PATTERN_KERNELS, "loss": LOSS_KERNELS}
_WHERE = re.compile(r"[\w.*<> -]{0,200}")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


class PlanError(ValueError):
    """A plan that cannot be used; the message says what, where and what to do."""


class Guards(msgspec.Struct, frozen=True, kw_only=True):
    """Within which limits a rewrite is wanted; outside of them the unfused operations run.

    `rows` are those of the flattened [rows, columns] operand. No dtype listed means any the kernel takes.
    """

    rows_min: int = 1
    rows_max: int | None = None
    columns_max: int = 16384
    dtypes: tuple[DTypeName, ...] = ()
    dynamic: bool = True  # whether a symbolic number of rows is served


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The relative change of the step time, negative is faster, with its interval, over `n` rounds."""

    change: float
    low: float
    high: float
    n: int
    verdict: str = ""
    ms: float | None = None  # the same of the baseline's step


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one place. `where` is a module FQN, "*" standing for any index, "" for the model itself."""

    kernel: str
    how: How
    where: str = ""
    guards: Guards = Guards()
    places: int = 1
    predicted_ms: float | None = None
    predicted_how: str = ""
    lost_bytes: int | None = None
    kernel_bytes: int | None = None
    measured: Measured | None = None
    decision: Decision = "untried"
    why: str = ""
    chosen_by: tuple[Policy, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in tables and command lines."""
        return f"{self.kernel}@{self.where or 'model'}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All rewrites of one workload, kept and dropped. `environment` is what it was measured on, `key` its digest."""

    format: str = FORMAT
    version: int = VERSION
    created: str = ""
    workload: str = ""
    policy: Policy = "roofline"
    environment: dict[str, str] = {}
    key: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()

    def kept(self) -> tuple[Rewrite, ...]:
        """The rewrites to apply: those kept, and those that have not been tried."""
        return tuple(r for r in self.rewrites if r.decision != "dropped")


def environment_key(environment: dict[str, str]) -> str:
    """Digest of the software and hardware a plan was measured on."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]


def any_index(fqn: str) -> str:
    """The FQN with "*" for every index: the same for all instances of a repeated block."""
    return _INDEX.sub("*", fqn)


def covers(where: str, fqn: str) -> bool:
    """Whether a rewrite's `where` names this module; "*" is one index."""
    if where == fqn or any_index(where) == any_index(fqn) == where:
        return True
    parts, own = where.split("."), fqn.split(".")
    return len(parts) == len(own) and all(fnmatch.fnmatchcase(b, a) for a, b in zip(parts, own, strict=True))


def encode(plan: Plan) -> bytes:
    """The plan as JSON."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode(data: bytes, source: str = "the plan") -> Plan:
    """The plan of a file's content. Raises PlanError with one line that says what is wrong and where."""
    if len(data) > MOST_BYTES:
        raise PlanError(f"{source}: {len(data)} bytes, a plan has at most {MOST_BYTES}; is this the right file?")
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{source}: not a fusion plan ({_line(error)}); `costlab tune` writes one") from None
    if head.format != FORMAT:
        raise PlanError(
            f"{source}: not a fusion plan (its format is '{_line(head.format)}'); `costlab tune` writes one"
        )
    if head.version != VERSION:
        raise PlanError(f"{source}: plan version {head.version}, this costlab reads {VERSION}; tune again")
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{source}: {_line(error)}") from None
    problem = _problem(plan)
    if problem:
        raise PlanError(f"{source}: {problem}")
    return plan


class _Head(msgspec.Struct):
    format: str
    version: int


def read(path: str | Path) -> Plan:
    """Read a plan file. Raises PlanError."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as source:
            data = source.read(MOST_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {_line(path)}: {error.strerror or 'no such file'}") from None
    except ValueError:  # a name with a NUL byte
        raise PlanError(f"cannot read the plan {_line(path)}: not a file name") from None
    return decode(data, _line(file.name))


def write(plan: Plan, path: Path) -> None:
    """Write a plan file, whole or not at all."""
    problem = _problem(plan)
    if problem:
        raise PlanError(problem)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(encode(plan))
    temporary.replace(path)


def _problem(plan: Plan) -> str:
    """What makes a well-formed plan unusable, "" if nothing does."""
    if len(plan.rewrites) > MOST_REWRITES:
        return f"{len(plan.rewrites)} rewrites, a plan has at most {MOST_REWRITES}"
    texts = [plan.created, plan.workload, plan.key, *plan.environment, *plan.environment.values(), *plan.notes]
    if len(plan.notes) > MOST_REWRITES or len(plan.environment) > 64 or any(map(_unfit, texts)):
        return "a text in its head is too long or has control characters"
    if plan.key and plan.key != environment_key(plan.environment):
        return "its key is not that of its environment: it was edited or damaged; tune again"
    for number, rewrite in enumerate(plan.rewrites):
        reason = _rewrite_problem(rewrite)
        if reason:
            return f"rewrite {number + 1}: {reason}"
    return ""


def _rewrite_problem(rewrite: Rewrite) -> str:
    known = KERNELS_OF[rewrite.how]
    if rewrite.kernel not in known:
        return f"no kernel '{_line(rewrite.kernel)}' to put in by {rewrite.how}; there are: {', '.join(known)}"
    if not _WHERE.fullmatch(rewrite.where):
        return f"'{_line(rewrite.where)}' is no module name"
    guards = rewrite.guards
    if guards.rows_min < 0 or guards.columns_max < 1 or (guards.rows_max or guards.rows_min) < guards.rows_min:
        return "its guards allow no shape at all"
    figures = [rewrite.predicted_ms, *_figures(rewrite.measured)]
    if any(f is not None and not math.isfinite(f) for f in figures):
        return "a figure is not a finite number"
    if any(map(_unfit, (rewrite.why, rewrite.predicted_how))):
        return "a text is too long or has control characters"
    return ""


def _figures(measured: Measured | None) -> tuple[float | None, ...]:
    return () if measured is None else (measured.change, measured.low, measured.high, measured.ms)


def _unfit(text: str) -> bool:
    return len(text) > MOST_TEXT or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)


def _line(value: Any) -> str:
    """Hostile text on one short line."""
    return "".join(c if c.isprintable() else "?" for c in str(value))[:120]

"""What a what-if asks: a baseline, the differences to try, and how often. Torch-free.

A variant is a difference of run options: a named toggle, any `key=value`, or several of them joined by "+".
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from costlab.app.whatif.toggles import TOGGLES, Machine, this_machine
from costlab.probes.spec import RunSpec, SpecError, validate

BASELINE, CONTROL = "baseline", "A/A control"
MOST_VARIANTS = 32
FACTOR_LIMIT = 4
# An engine's or a run's own business.
_FIXED = ("preset", "nnodes", "node_rank", "rdzv_endpoint", "seed", "keep_raw", "chosen_save_only", "cache_salt")


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. `factors` are the items it is made of, for main effects and interactions."""

    name: str
    options: dict[str, Any]
    factors: list[str] = []


class WhatIfSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline and its variants.

    `legs` is the number of legs of each arm. With `budget_s` the legs go on until every interval is decided or the
    time is over, and `legs` is the most there may be. An arm whose spec saves checkpoints does so in its first leg.
    """

    baseline: RunSpec
    variants: list[Variant]
    legs: int = 4
    budget_s: float | None = None
    factorial: bool = False

    def arm(self, name: str) -> RunSpec:
        """Options of one arm's legs, before the engine's own settings."""
        options = next((v.options for v in self.variants if v.name == name), {})
        return msgspec.structs.replace(self.baseline, **options)

    def arms(self) -> list[str]:
        """Baseline, variants, and the baseline once more."""
        return [BASELINE, *(v.name for v in self.variants), CONTROL]


def parse_setting(text: str) -> dict[str, Any]:
    """`batch=8` as an option with its type; SpecError for an unknown option or a value that does not fit."""
    key, equals, value = text.partition("=")
    name = key.strip().lstrip("-").replace("-", "_")
    hints = typing.get_type_hints(RunSpec)
    if not equals or not name:
        raise SpecError(f"'{text}' is no toggle and no KEY=VALUE; toggles: {', '.join(TOGGLES)}")
    if name not in hints or name in _FIXED:
        near = difflib.get_close_matches(name, [h for h in hints if h not in _FIXED], 1)
        raise SpecError(f"no option '{key.strip()}' to vary" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        found = msgspec.convert(value.strip(), hints[name], strict=False)
        # A leg may run elsewhere than where the question was asked.
        return {name: str(Path(found).expanduser().absolute()) if name == "plan" and found else found}
    except msgspec.ValidationError as error:
        choices = [str(c) for c in typing.get_args(hints[name])]
        more = f"; choose from {', '.join(choices)}" if choices else ""
        raise SpecError(f"{name}={value.strip()}: {str(error).partition(' - ')[0]}{more}") from error


def from_command(fragment: str) -> str:
    """A piece of a command line as an item: `--compile block --cudagraphs` is `compile=block+cudagraphs=true`.

    A finding names what would prove it in that form. SpecError for what is no option of a run.
    """
    words, parts = shlex.split(fragment), []
    while words:
        key, equals, value = words.pop(0).partition("=")
        name = key.removeprefix("--").replace("-", "_")
        if not key.startswith("--"):
            raise SpecError(f"'{key}' is no option")
        if name.startswith("no_"):
            name, value = name[3:], "false"
        elif not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        parse_setting(f"{name}={value}")
        parts.append(f"{name}={value}")
    return "+".join(parts)


def parse_item(text: str, baseline: RunSpec, machine: Machine) -> dict[str, Any]:
    """Options of one item of `--what-if`: a toggle's name, `key=value`, or several joined by "+"."""
    options: dict[str, Any] = {}
    for part in (p.strip() for p in text.split("+")):
        options |= TOGGLES[part].options if part in TOGGLES else parse_setting(part)
    joined = msgspec.structs.replace(baseline, **options)
    for part in (p.strip() for p in text.split("+")):
        own = TOGGLES.get(part)
        others = {k: v for k, v in options.items() if own is None or k not in own.options}
        reason = own.unavailable(msgspec.structs.replace(baseline, **others), machine) if own else ""
        if reason:
            raise SpecError(f"what-if '{part}' cannot be tried here: {reason}")
    if joined == baseline:
        raise SpecError(f"what-if '{text}' changes nothing: the baseline has it already")
    try:
        validate(joined)
    except SpecError as error:
        raise SpecError(f"what-if '{text}': {error}") from error
    return options


def make_whatif(
    baseline: RunSpec,
    items: Sequence[str] = (),
    settings: Sequence[str] = (),
    *,
    factorial: bool = False,
    legs: int = 4,
    budget_s: float | None = None,
    checkpoint: bool = False,
    machine: Machine | None = None,
) -> WhatIfSpec:
    """The what-if of `--what-if` items and `--set` settings; SpecError where something cannot be tried.

    Each item is a variant of its own; all settings together are one more. Several items that do not contradict each
    other are also tried all together, or, with `factorial`, in every combination.
    """
    here = machine or this_machine()
    wanted = [*(i.strip() for i in items if i.strip())]
    wanted += list(settings) if factorial else ["+".join(settings)] if settings else []
    if len(set(wanted)) != len(wanted):
        raise SpecError("the same what-if is given twice")
    if not wanted:
        raise SpecError(f"nothing to try: name a toggle ({', '.join(TOGGLES)}) or --set KEY=VALUE")
    if legs < 2:
        raise SpecError(f"--legs must be at least 2, got {legs}: one leg says nothing of the noise")
    if baseline.nnodes > 1:
        raise SpecError("a what-if runs on one host; --nnodes must be 1")
    if budget_s is not None and budget_s <= 0:
        raise SpecError(f"--budget must be above zero seconds, got {budget_s:g}")
    baseline = msgspec.structs.replace(resolved(baseline), checkpoint=checkpoint, lean=False)
    variants = combinations(wanted, baseline, here, factorial=factorial)
    if any("checkpoint_codec" in v.options for v in variants):  # without saves there would be nothing to compare
        baseline = msgspec.structs.replace(baseline, checkpoint=True)
    return WhatIfSpec(
        baseline=baseline,
        variants=variants,
        legs=legs,
        budget_s=budget_s,
        factorial=factorial,
    )


def combinations(wanted: Sequence[str], baseline: RunSpec, machine: Machine, *, factorial: bool) -> list[Variant]:
    """Each item alone and then together; all combinations with `factorial`."""
    if factorial and not 2 <= len(wanted) <= FACTOR_LIMIT:
        raise SpecError(f"--factorial takes 2 to {FACTOR_LIMIT} items, got {len(wanted)}")
    if factorial:
        groups = [g for size in range(1, len(wanted) + 1) for g in itertools.combinations(wanted, size)]
    else:
        groups = [(w,) for w in wanted] + ([tuple(wanted)] if len(wanted) > 1 and _agree(wanted) else [])
    if len(groups) > MOST_VARIANTS:
        raise SpecError(f"{len(groups)} variants are more than {MOST_VARIANTS}")
    if factorial and not _agree(wanted):
        raise SpecError("--factorial needs items that change different options")
    return [
        Variant(name=" + ".join(group), options=parse_item("+".join(group), baseline, machine), factors=list(group))
        for group in groups
    ]


def _agree(wanted: Sequence[str]) -> bool:
    """Whether no option is set by two of the items."""
    keys = [k for w in wanted for part in w.split("+") for k in _keys(part.strip())]
    return len(keys) == len(set(keys))


def _keys(part: str) -> list[str]:
    return list(TOGGLES[part].options) if part in TOGGLES else list(parse_setting(part))


def accept(spec: RunSpec, variant: Variant) -> RunSpec:
    """The baseline with a variant made permanent."""
    return msgspec.structs.replace(spec, **variant.options)


def command_of(whatif: WhatIfSpec) -> str:
    """The options that differ from the defaults, as `key=value` words."""
    base = msgspec.to_builtins(whatif.baseline)
    default = msgspec.to_builtins(RunSpec())
    return " ".join(f"{k}={v}" for k, v in base.items() if v != default[k])


def resolved(spec: RunSpec) -> RunSpec:
    """The spec without the name of its preset: two ways to the same options are the same baseline."""
    return msgspec.structs.replace(spec, preset=None)


def workload_digest(spec: RunSpec) -> str:
    """Digest of a user's workload file, "" for a built-in one or a file that cannot be read."""
    if ":" not in spec.workload:
        return ""
    try:
        return hashlib.sha256(Path(spec.workload.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def plan_digest(spec: RunSpec) -> str:
    """Digest of a fusion plan's file, "" where there is none or it cannot be read."""
    try:
        return hashlib.sha256(Path(spec.plan).read_bytes()).hexdigest()[:16] if spec.plan else ""
    except OSError:
        return ""


def spec_key(whatif: WhatIfSpec) -> str:
    """Digest of everything that is asked, the text of a user's workload file included."""
    files = sorted({workload_digest(whatif.arm(name)) + plan_digest(whatif.arm(name)) for name in whatif.arms()})
    body = msgspec.json.encode([msgspec.to_builtins(whatif), files], order="sorted")
    return hashlib.sha256(body).hexdigest()[:16]


def environment_key() -> str:
    """Digest of the hardware and software that times depend on."""
    from costlab.probes.machine import machine

    found = machine()
    kept = (found.costlab, found.python, found.platform, found.cpu, found.cpu_count, found.torch, found.triton)
    gpus = [(g.name, g.memory_bytes, g.power_limit_w) for g in found.gpus]
    return hashlib.sha256(msgspec.json.encode([kept, found.driver, gpus])).hexdigest()[:16]

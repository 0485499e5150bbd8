"""The new-run form without its widgets: text fields to a RunSpec and back to a command line."""

from __future__ import annotations

import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from costlab.probes.spec import PRESETS, RECOMPUTE_NAMES, WORKLOAD_SIZES, RunSpec, SpecError, apply_preset, validate

NO_PRESET = "custom"
FIELDS = (
    "workload",
    "size",
    "ranks",
    "device",
    "parallel",
    "compile",
    "dtype",
    "recompute",
    "batch",
    "seq",
    "steps",
    "cudagraphs",
)
_KINDS = {int: "a whole number", float: "a number", bool: "on or off"}
_WORDS = {"on": True, "off": False, "yes": True, "no": False, "true": True, "false": False}


def choices(field: str) -> tuple[str, ...]:
    """The values a field of RunSpec may take, where these are named."""
    hint = typing.get_type_hints(RunSpec)[field]
    if hint is bool:
        return ("off", "on")
    if field == "recompute":
        return (*RECOMPUTE_NAMES, "budget:0.5")
    return tuple(map(str, typing.get_args(hint)))


def field_text(spec: RunSpec, field: str) -> str:
    """A field's value as the form shows it."""
    value = getattr(spec, field)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def preset_values(name: str) -> dict[str, str]:
    """Texts of all form fields under a preset."""
    spec = RunSpec() if name == NO_PRESET else apply_preset(RunSpec(), name)
    return {field: field_text(spec, field) for field in FIELDS}


def build_spec(values: Mapping[str, str], extra: str = "", preset: str = NO_PRESET) -> RunSpec:
    """A valid spec from the form's texts; SpecError names the option that is wrong."""
    base = RunSpec() if preset == NO_PRESET else apply_preset(RunSpec(), preset)
    texts = {**values, **parse_extra(extra)}
    typed = {name: _typed(name, text) for name, text in texts.items()}
    spec = msgspec.structs.replace(base, **typed)
    validate(spec)
    sizes = WORKLOAD_SIZES.get(spec.workload)
    if sizes and spec.size not in sizes:
        raise SpecError(f"{spec.workload} has no size '{spec.size}'; there are: {', '.join(sizes)}")
    return spec


def parse_extra(text: str) -> dict[str, str]:
    """`--lr 1e-3 --no-checkpoint --seed=7` as field texts; SpecError for what is no option."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"extra: {str(error).lower()}") from error
    found: dict[str, str] = {}
    while words:
        word = words.pop(0)
        name, value = _option(word, words)
        found[name] = value
    return found


def _option(word: str, rest: list[str]) -> tuple[str, str]:
    if not word.startswith("--"):
        raise SpecError(f"extra: '{word}' is no option; options look like --seed 7")
    name, equals, value = word[2:].partition("=")
    field = name.replace("-", "_")
    known = typing.get_type_hints(RunSpec)
    if field.startswith("no_") and known.get(field[3:]) is bool:
        return field[3:], "off"
    if field not in known or field == "preset":
        raise SpecError(f"extra: no option --{name}")
    if known[field] is bool and not equals:
        return field, "on"
    if not equals and not rest:
        raise SpecError(f"extra: --{name} needs a value")
    return field, value if equals else rest.pop(0)


def _typed(field: str, text: str) -> Any:
    hint = typing.get_type_hints(RunSpec)[field]
    value: Any = _WORDS.get(text.strip().lower(), text.strip()) if hint is bool else text.strip()
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        option = f"--{field.replace('_', '-')}"
        kind = _KINDS.get(hint) or f"one of {', '.join(map(str, typing.get_args(hint)))}"
        raise SpecError(f"{option} must be {kind}, got '{text}'") from error


def command_line(spec: RunSpec) -> str:
    """The `costlab run` command that records the same: only options that differ from the preset or the defaults."""
    base = RunSpec() if spec.preset is None else apply_preset(RunSpec(), spec.preset)
    words = ["costlab", "run"] + (["--preset", spec.preset] if spec.preset else [])
    for field in RunSpec.__struct_fields__:
        value = getattr(spec, field)
        if field != "preset" and value != getattr(base, field):
            words += _words(field, value)
    return shlex.join(words)


def _words(field: str, value: object) -> Sequence[str]:
    names = {"silence_timeout_s": "silence-timeout", "collective_timeout_s": "collective-timeout"}
    names |= {"price_per_gpu_hour": "price", "keep_raw": "raw"}
    option = names.get(field, field.replace("_", "-"))
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", str(value)]


def preset_names() -> list[str]:
    """Presets, then the free form."""
    return [*PRESETS, NO_PRESET]

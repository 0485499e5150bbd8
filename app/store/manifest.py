"""Reads `manifest.json` as far as it can be read and says what could not be."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec

from costlab.app.store.errors import StoreError
from costlab.app.text import plain
from costlab.probes.records import SCHEMA_VERSION, Manifest

NAME = "manifest.json"
_LIMIT = 16 << 20  # bytes; a manifest is a few kB
_COMPILE = {"none": "eager", "block": "compiled", "model": "compiled (whole model)"}


def read_manifest(directory: Path) -> tuple[Manifest, list[str]]:
    """The manifest, and notes on what in it could not be read; StoreError where it is absent or no JSON object."""
    path = directory / NAME
    try:
        if path.stat().st_size > _LIMIT:
            raise StoreError(f"{path} is larger than {_LIMIT >> 20} MiB: not a manifest")
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"no readable {NAME} in {directory}: {error.strerror}") from error
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged: {plain(error, 200)}") from error
    return _convert(fields, directory.name)


def _convert(fields: dict[str, Any], name: str) -> tuple[Manifest, list[str]]:
    """Field by field, so that one damaged value costs one value."""
    notes = newer(fields.get("schema_version"))
    values: dict[str, Any] = {"run_id": name, "created": "", "status": "incomplete"}
    hints = typing.get_type_hints(Manifest, include_extras=True)
    for field in (f for f in Manifest.__struct_fields__ if f in fields):
        try:
            values[field] = msgspec.convert(fields[field], hints[field])
        except msgspec.ValidationError as error:
            notes.append(f"manifest: '{field}' could not be read ({plain(error, 120)})")
    notes += [f"manifest: no '{field}'" for field in ("run_id", "created", "status") if field not in fields]
    return Manifest(**values), notes


def newer(version: object) -> list[str]:
    """A note if `version` is above the schema this costlab knows."""
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return [f"written by a newer costlab (schema {version} > {SCHEMA_VERSION}): what it added is not shown"]
    return []


def title_of(manifest: Manifest) -> str:
    """One line that tells runs apart: "llama 1b · compiled FSDP2 · 2 x NVIDIA H200 · bf16". Text is not escaped."""
    spec, facts = manifest.spec, manifest.workload
    own = str(spec.get("workload", "")) or (facts.name if facts else "")
    name = facts.name if facts and facts.name else own
    model = " ".join(p for p in (name, "" if ":" in own else str(spec.get("size", ""))) if p)
    return " · ".join(p for p in (model, _how(spec), hardware_of(manifest), str(spec.get("dtype", ""))) if p)


def _how(spec: dict[str, Any]) -> str:
    parallel = str(spec.get("parallel", ""))
    if not parallel:
        return ""
    compiled = str(spec.get("compile", ""))
    graphs = " + CUDA graphs" if spec.get("cudagraphs") else ""
    graphs += " + fused kernels" if spec.get("fused") else " + fusion plan" if spec.get("plan") else ""
    return f"{_COMPILE.get(compiled, compiled)} {'FSDP2' if parallel == 'fsdp' else parallel.upper()}{graphs}".strip()


def hardware_of(manifest: Manifest) -> str:
    """ "2 x NVIDIA H200" or "2 CPU ranks"; "" where it is not recorded."""
    env = manifest.environment
    if not manifest.ranks or env is None:
        return ""
    if env.device == "cpu":
        return f"{manifest.ranks} CPU rank{'s' if manifest.ranks > 1 else ''}"
    names = sorted({gpu.name for gpu in env.gpus})
    return f"{manifest.ranks} x {' / '.join(names) if names else env.device}"

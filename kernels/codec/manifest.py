"""A checkpoint directory: one file a rank, and `manifest.json`, written last, which makes them a checkpoint.

    <root>/step-0000000100-1f2e3d4c/rank-00000.clck
                                    rank-00001.clck
                                    manifest.json

A directory without a valid manifest is no checkpoint: a save that died, ignored by every reader. The part after
the step is drawn anew by every run, so no directory is ever written twice. The manifest names every rank's file
with size and digest, so files of two saves can't be mixed.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costlab.kernels.codec import crc
from costlab.kernels.codec.container import Container, Mode
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import readable, sync_directory, write_atomically
from costlab.kernels.codec.layout import Limits

NAME = "manifest.json"
FORMAT = "costlab-checkpoint"
MAX_BYTES = 32 << 20
MAX_RANKS = 1 << 17
_log = logging.getLogger(__name__)
_DIRECTORY = re.compile(r"step-(\d{10})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: name, size in bytes, digest as hex."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a directory a checkpoint. `base` is the directory that deltas build on; `created` unix seconds.

    `update_error` is the measured relative error of the first resumed Adam update over all ranks' parameters, the worst
    rank's; None where it was not measured.
    """

    step: int
    preset: str
    files: tuple[RankFile, ...]
    base: str | None = None
    update_error: float | None = None
    created: float = 0.0


def rank_name(rank: int) -> str:
    """File name of a rank."""
    return f"rank-{rank:05d}.clck"


def directory_name(step: int, run: str) -> str:
    """Directory name of a step saved by the run with this 8-digit hexadecimal id."""
    return f"step-{step:010d}-{run}"


def _checksum(body: dict[str, Any]) -> int:
    return crc.of_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Commit: after this returns the checkpoint is there and durable. Raises `OSError`."""
    body = {"format": FORMAT, "version": 1, **asdict(manifest), "files": [asdict(f) for f in manifest.files]}
    text = json.dumps({**body, "crc32c": _checksum(body)}, indent=1)
    write_atomically(directory / NAME, text.encode())
    sync_directory(directory.parent)


def _load(path: Path) -> dict[str, Any]:
    with readable(f"reading {path}"), path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_BYTES} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("version") != 1:
        raise CheckpointError(f"{path}: not a manifest of this format's version 1")
    try:
        right = body.pop("crc32c", None) == _checksum(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: can't be checked") from error
    if not right:
        raise CheckpointError(f"{path}: checksum is wrong")
    return body


def _rank_file(raw: Any, rank: int) -> RankFile:
    if not isinstance(raw, dict) or set(raw) != {"name", "size", "digest"}:
        raise CheckpointError(f"manifest: file of rank {rank} is not described")
    name, size, digest = raw["name"], raw["size"], raw["digest"]
    if name != rank_name(rank) or type(size) is not int or not isinstance(digest, str):
        raise CheckpointError(f"manifest: file of rank {rank} is {str(name)[:80]!r}")
    if not 0 < size < 1 << 62 or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise CheckpointError(f"manifest: size or digest of rank {rank} is impossible")
    return RankFile(name, size, digest)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory; `CheckpointError` where it is absent, damaged or names a wrong file."""
    body = _load(directory / NAME)
    step, preset, files = body.get("step"), body.get("preset"), body.get("files")
    base, error, created = body.get("base"), body.get("update_error"), body.get("created")
    numbers = all(value is None or type(value) in (int, float) for value in (error, created))
    if type(step) is not int or step < 0 or not isinstance(preset, str) or not isinstance(files, list) or not numbers:
        raise CheckpointError(f"{directory}: manifest has fields of the wrong type")
    if base is not None and (not isinstance(base, str) or not _DIRECTORY.fullmatch(base)):
        raise CheckpointError(f"{directory}: manifest has no directory of this format as its base")
    if not 0 < len(files) <= MAX_RANKS:
        raise CheckpointError(f"{directory}: manifest of {len(files)} ranks")
    found = tuple(_rank_file(raw, rank) for rank, raw in enumerate(files))
    return Manifest(step, preset, found, base, error, float(created or 0))


def new_manifest(
    step: int, preset: str, files: list[RankFile], base: str | None, update_error: float | None
) -> Manifest:
    """A manifest of now."""
    return Manifest(step, preset, tuple(files), base, update_error, time.time())


def open_rank(
    directory: Path, manifest: Manifest, rank: int, mode: Mode = "map", limits: Limits | None = None,
    replicas: Sequence[Path] = (),
) -> Container:  # fmt: skip
    """One rank's file, checked to be the one the manifest means; symbolic links are refused.

    Where it is missing or damaged in its header or index, a replica below one of the roots `replicas` serves.
    """
    try:
        return _open_stated(directory, manifest, rank, mode, limits)
    except CheckpointError as first:
        for root in replicas:
            try:
                found = _open_stated(root / directory.name, manifest, rank, mode, limits)
            except CheckpointError as error:
                _log.warning("no replica of rank %d: %s", rank, error)
                continue
            _log.warning("using the replica %s: %s", found.path, first)
            return found
        raise


def _open_stated(directory: Path, manifest: Manifest, rank: int, mode: Mode, limits: Limits | None) -> Container:
    stated = manifest.files[rank]
    file = Container.open(directory / stated.name, mode, limits, follow_symlinks=False)
    header = file.header
    if (header.file_size, file.digest.hex()) != (stated.size, stated.digest):
        file.close()
        raise CheckpointError(f"{file.path}: not the file that the manifest names: it is of another save")
    if (header.step, header.rank, header.world_size) != (manifest.step, rank, len(manifest.files)):
        file.close()
        raise CheckpointError(
            f"{file.path}: is step {header.step}, rank {header.rank} of {header.world_size}; the manifest says step "
            f"{manifest.step}, rank {rank} of {len(manifest.files)}"
        )
    return file


def committed(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Checkpoints under `root`, newest first; directories of saves that died are passed over."""
    names = [p for p in root.iterdir() if _DIRECTORY.fullmatch(p.name)] if root.is_dir() else []
    found = []
    for directory in names:
        try:
            found.append((directory, read_manifest(directory)))
        except CheckpointError as error:
            if (directory / NAME).exists():
                _log.warning("passing over a checkpoint whose manifest is damaged: %s", error)
    yield from sorted(found, key=lambda pair: (pair[1].step, pair[1].created), reverse=True)


def latest(root: Path | str) -> Path | None:
    """The directory of the newest committed checkpoint, or None."""
    return next((directory for directory, _ in committed(Path(root))), None)

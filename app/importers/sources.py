"""Finds traces in files, folders and tar archives, and reads them one at a time. Nothing is unpacked to disk."""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from costlab.app.importers import ImportProblem
from costlab.probes.trace import kineto
from costlab.probes.trace.columns import TraceEvents

MAX_MEMBER = 4 << 30  # bytes of one archive member
MAX_ARCHIVE = 64 << 30  # bytes of all members read from one archive
MAX_FILES = 100_000
_TRACE = re.compile(r".*\.(?:json|trace)(?:\.gz)?", re.IGNORECASE)
_TAR = re.compile(r".*\.(?:tar|tgz|tbz2?|txz)(?:\.(?:gz|bz2|xz))?", re.IGNORECASE)
_BROKEN = (tarfile.TarError, EOFError, zlib.error, OSError)

Read = TraceEvents | kineto.TraceError


def read_all(paths: list[Path]) -> Iterator[tuple[str, Read]]:
    """Each trace's base name with its events, or with why it could not be read; ImportProblem for a path with none."""
    for path in paths:
        if not path.exists():
            raise ImportProblem(f"{path} does not exist; give a trace file, a folder of traces, or a tar of them")
        if path.is_dir():
            yield from _folder(path)
        elif _TAR.fullmatch(path.name):
            yield from _archive(path)
        else:
            yield path.name, _read(path, path.name)


def _read(source: Path | bytes, name: str) -> Read:
    try:
        return kineto.read(source, name=name)
    except kineto.TraceError as error:
        return error


def _folder(folder: Path) -> Iterator[tuple[str, Read]]:
    found = [p for p in sorted(folder.rglob("*")) if _TRACE.fullmatch(p.name) and p.is_file() and not p.is_symlink()]
    if not found:
        raise ImportProblem(f"{folder} holds no *.json or *.json.gz; give the folder the profiler wrote to")
    if len(found) > MAX_FILES:
        raise ImportProblem(f"{folder} holds {len(found)} traces, more than {MAX_FILES}; give a folder of one run")
    for path in found:
        yield path.name, _read(path, path.name)


def _archive(path: Path) -> Iterator[tuple[str, Read]]:
    """Regular members only, read in memory under their base name: no path of the archive is ever used."""
    seen = total = 0
    try:
        with tarfile.open(path, mode="r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or not _TRACE.fullmatch(name) or name.startswith("._"):
                    continue
                seen, total = seen + 1, total + member.size
                if member.size > MAX_MEMBER or total > MAX_ARCHIVE or seen > MAX_FILES:
                    raise ImportProblem(f"{path.name}: too large at {name}; unpack it and import the folder")
                stream = archive.extractfile(member)
                if stream is not None:
                    yield name, _read(_bytes(stream, member.size), name)
    except _BROKEN as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ImportProblem(f"{path.name}: damaged archive ({reason}); copy it again or unpack it yourself") from error
    if not seen:
        raise ImportProblem(f"{path.name}: no *.json or *.json.gz in the archive; give a tar of the ranks' traces")


def _bytes(stream: IO[bytes], size: int) -> bytes:
    with stream:
        return stream.read(size)
